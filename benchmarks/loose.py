"""Lossy acceptance rules compared with the exact one: tokens per round, rescued tokens and task scores.

    python benchmarks/loose.py --prompts humaneval.jsonl gsm8k.jsonl --count 40 --json docs/loose.jsonl

HumanEval's rows are scored by their tests, in a process with resource limits and without sockets; GSM8K's by the last
number of the answer. Windows are pinned to chains of 15 candidates of the draft model, so that counts do not depend on
time. Each answer is added to the `--json` file at once, so that a stopped run can continue; only the state of
`quantile` is lost. Intervals are of 95 %: Wilson's for scores, else bootstrapped over prompts. Differences to the exact
rule are paired by prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.limits import Pins
from langchain_card.text.prompt import encode

RULES = ("exact", "loose", "loose?reading=paper", "loose?quantile=0.5")
MAX_TOKENS = {"humaneval": 256, "gsm8k": 320}
SECONDS = 10
GUARD = f"""
import resource, sys
for bound, most in ((resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_FSIZE, 0)):
    resource.setrlimit(bound, (most, most))
def forbid(event, arguments):
    names = "system exec fork posix_spawn remove rename kill chmod"
    kind, _, name = event.partition(".")
    if kind in ("socket", "subprocess", "ctypes", "shutil") or (kind == "os" and name in names.split()):
        raise PermissionError(event)
program = sys.stdin.read()
sys.addaudithook(forbid)
exec(compile(program, "answer", "exec"), {{"__name__": "answer"}})
print("passed")
"""
"""Program that runs a model's code. It guards against accidents, not against malicious code."""

Row = dict[str, Any]
Interval = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="HumanEval's and GSM8K's JSON lines")
    parser.add_argument("--count", type=int, default=40, help="rows of each (%(default)s)")
    parser.add_argument("--rules", nargs="+", default=RULES, help="the first is what the others are compared with")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="JSON lines, read and added to")
    args = parser.parse_args()
    answered = measure(args, read(args.json))
    for name in dict.fromkeys(row["set"] for row in answered):
        report(name, [row for row in answered if row["set"] == name], args.rules)


def read(path: Path) -> list[Row]:
    """Return the answers of earlier runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "draft_model", "set", "number", "rule", "max_tokens"))


def measure(args: argparse.Namespace, known: list[Row]) -> list[Row]:
    """Answer every task with every rule, except those in `known`. Each rule has an engine over the same weights."""
    questions = [task for path in args.prompts for task in tasks(path, args.count)]
    jobs = [
        {**task, "rule": rule, "model": args.model, "draft_model": args.draft_model}
        for task in questions
        for rule in args.rules
    ]
    done = {key_of(row): row for row in known}
    with contextlib.ExitStack() as stack, args.json.open("a") as file:
        engines: dict[str, Engine] = {}
        for task in tqdm(jobs, unit="answer", initial=0):
            if key_of(task) in done:
                continue
            if task["rule"] not in engines:
                engines[task["rule"]] = stack.enter_context(engine_of(args, task["rule"]))
            row = answer(engines[task["rule"]], task)
            done[key_of(task)] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
    return [done[key_of(task)] for task in jobs]


def engine_of(args: argparse.Namespace, rule: str) -> Engine:
    pins = Pins(window=16, lead=15, draft_width=1)
    config = EngineConfig(model=args.model, draft_model=args.draft_model, drafters=(), acceptance=rule, pins=pins)
    return Engine(config)


def tasks(path: Path, count: int) -> list[Row]:
    """Return the first rows of a file as questions, each with the row that scores its answer."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    questions: list[Row] = []
    for number, row in enumerate(rows):
        if "entry_point" in row:
            question = "Complete this function. Answer with the code only.\n\n" + row["prompt"]
            judged: dict[str, Any] = {
                "set": "humaneval",
                "row": {name: row[name] for name in ("prompt", "test", "entry_point")},
            }
        else:
            question = row["question"] + "\nThink step by step, and end with the answer as a number."
            judged = {"set": "gsm8k", "row": {"answer": row["answer"]}}
        questions.append({**judged, "number": number, "question": question, "max_tokens": MAX_TOKENS[judged["set"]]})
    return questions


def answer(engine: Engine, task: Row) -> Row:
    prompt_ids = encode([{"role": "user", "content": task["question"]}], engine.tokenizer, engine.config.model)
    params = SamplingParams(max_tokens=task["max_tokens"], schedule="sequential")
    done = engine.submit(prompt_ids, params).result()
    counts = {
        name: getattr(done.stats, name) for name in ("rounds", "output_tokens", "accepted", "verified", "rescued")
    }
    judge = passes if task["set"] == "humaneval" else is_right
    known = {name: value for name, value in task.items() if name not in ("row", "question")}
    return {**known, **counts, "right": judge(done.text, task["row"])}


def passes(text: str, row: Row) -> bool:
    """Return True if the code of an answer passes its row's tests."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    program = "\n\n".join([row["prompt"], block[1] if block else text, row["test"], f"check({row['entry_point']})"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = [sys.executable, "-I", "-c", GUARD]
            run = subprocess.run(
                command, input=program.encode(), cwd=folder, env={}, capture_output=True, timeout=2 * SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
    return run.stdout.endswith(b"passed\n")


def is_right(text: str, row: Row) -> bool:
    """Return True if the last number of an answer is the one after `####` in its row."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    wanted = row["answer"].rpartition("####")[2].strip()
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(wanted.replace(",", ""))


def report(name: str, rows: list[Row], rules: Sequence[str]) -> None:
    """Print a table for `docs/performance.md`."""
    by_rule = {rule: sorted((r for r in rows if r["rule"] == rule), key=lambda r: r["number"]) for rule in rules}
    base = by_rule[rules[0]]
    print(f"\n| {name}, {len(base)} rows | tokens a round | more than {rules[0]} | rescued, % | right | points more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rule, answers in by_rule.items():
        pairs, right = [*zip(base, answers, strict=True)], sum(row["right"] for row in answers)
        cells = [
            f"`{rule}`",
            f"{pace(answers):.2f} {shown(bootstrap(answers, pace))}",
            f"{gain(pairs):.2f} {shown(bootstrap(pairs, gain))}",
            f"{100 * share(answers):.2f} {shown(bootstrap(answers, share), 100)}",
            f"{right} {shown(wilson(right, len(answers)), len(answers), 0)}",
            f"{100 * better(pairs):.1f} {shown(bootstrap(pairs, better), 100, 0)}",
        ]
        if answers is base:
            cells = [*cells[:2], "", "", cells[4], ""]
        print("| " + " | ".join(cells) + " |")


def pace(rows: Sequence[Row]) -> float:
    return float(sum(row["output_tokens"] for row in rows) / sum(row["rounds"] for row in rows))


def share(rows: Sequence[Row]) -> float:
    return float(sum(row["rescued"] for row in rows) / sum(row["output_tokens"] for row in rows))


def gain(pairs: Sequence[tuple[Row, Row]]) -> float:
    return pace([row for _, row in pairs]) - pace([base for base, _ in pairs])


def better(pairs: Sequence[tuple[Row, Row]]) -> float:
    return statistics.mean(row["right"] - base["right"] for base, row in pairs)


def shown(interval: Interval, times: float = 1.0, digits: int = 2) -> str:
    return "({})".format(" to ".join(f"{times * bound:.{digits}f}" for bound in interval))


def bootstrap(items: Sequence[Any], figure: Callable[[Sequence[Any]], float], draws: int = 2000) -> Interval:
    """Return the 95 % bootstrap interval of a figure."""
    rng = random.Random(0)
    samples = sorted(figure(rng.choices(items, k=len(items))) for _ in range(draws))
    return samples[int(0.025 * draws)], samples[int(0.975 * draws)]


def wilson(right: int, count: int, z: float = 1.96) -> Interval:
    """Return the 95 % interval of a share."""
    middle, width = right + z * z / 2, z * math.sqrt(right * (count - right) / count + z * z / 4)
    return (middle - width) / (count + z * z), (middle + width) / (count + z * z)


if __name__ == "__main__":
    main()
