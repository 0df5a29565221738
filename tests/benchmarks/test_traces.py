"""Traces: recorded, kept, replayed; and the contest over them as a command."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from benchmarks.contest.__main__ import main as contest_main
from benchmarks.contest.beams import beam_reach, trace_path
from benchmarks.contest.contest import BATCHES, CPU_CELLS
from benchmarks.contest.devices import costs_of, load_device
from benchmarks.contest.paths import DEEP, MISS, TOP, Kind
from benchmarks.contest.record import main as record_main
from benchmarks.contest.record import record
from benchmarks.contest.traces import Trace, TraceScript, load, save
from langchain_card.bench import prompts
from langchain_card.bench.teacher_forced import shared_model
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.core.request import SamplingParams
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.models.loader import resolve
from langchain_card.runtime.runner import ModelRunner
from tests.support import tiny

PROMPT = list(range(40, 60))


def made_up(tokens: int, seed: int) -> Trace:
    """A draft that says 0.7, 0.2 and 0.05, and is right so often."""
    rng = random.Random(seed)
    text = [rng.randrange(100, 200) for _ in range(tokens)]
    ranks = rng.choices((0, 1, 2, 3), (70, 20, 5, 5), k=tokens)
    ids = tuple(
        tuple(token if i == rank else 200 + i for i in range(3)) for token, rank in zip(text, ranks, strict=True)
    )
    return Trace((1, 2), tuple(text), ids, ((math.log(0.7), math.log(0.2), math.log(0.05)),) * tokens)


TRACES = [made_up(100, seed) for seed in range(3)]


def test_own_prompts_are_whole_and_each_there_once() -> None:
    own, copying = (prompts.load(path, 100) for path in (prompts.OWN, prompts.COPYING))
    assert (len(own), len(copying)) == (20, 28)
    assert len({*own, *copying}) == 48
    rows = [json.loads(line) for line in prompts.COPYING.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["edit", "quote", "edit", "quote", "edit", "quote", "edit"] * 4
    assert all(len(prompt.splitlines()) >= 15 or len(prompt.split()) >= 150 for prompt in copying), "much to copy"


def test_traces_are_kept_as_they_are(tmp_path: Path) -> None:
    save(TRACES, tmp_path / "made-up.json")
    found = load(tmp_path / "made-up.json")
    assert [trace.token_ids for trace in found] == [trace.token_ids for trace in TRACES]
    assert found[0].draft_ids == TRACES[0].draft_ids
    assert found[0].draft_logs[0] == pytest.approx(TRACES[0].draft_logs[0], abs=1e-3)


def test_a_script_follows_its_text_and_only_that() -> None:
    trace = TRACES[0]
    script = TraceScript(trace, TRACES)
    prefix = (*trace.prompt_ids, *trace.token_ids[:7])
    assert script.target_token(prefix) == trace.token_ids[7]
    assert [token for token, _ in script.candidates(prefix)] == list(trace.draft_ids[7])
    assert script.target_token((*prefix, 199)) == 0 or trace.token_ids[7] == 199
    assert len(script.candidates((*prefix, 0))) == 3, "something all the same"


def test_a_path_tells_what_each_token_was() -> None:
    path = trace_path(TRACES[0], TRACES, width=64, branch=2)
    for position, token in enumerate(path):
        rank = TRACES[0].rank(position)
        assert (token == TOP) == (rank == 0) and (token == MISS) == (rank is None)
        assert rank != 1 or token.kind is Kind.NEAR
        assert rank != 2 or token.kind is Kind.FAR


def test_a_siblings_subtree_lives_as_long_as_the_beam_holds_it() -> None:
    rng = random.Random(0)
    sure = [(math.log(0.98), math.log(0.01))]
    assert beam_reach((math.log(0.9), math.log(0.1)), 1, sure, 1, rng) == 0, "no room for it"
    assert beam_reach((math.log(0.9), math.log(0.1)), 1, sure, 2, rng) == DEEP, "likelier than what is beside it"
    even = [(math.log(0.5), math.log(0.5))]
    assert beam_reach((math.log(0.9), math.log(0.1)), 1, even, 4, rng) == 1, "crowded out in the second layer"


def test_a_draft_that_equals_its_target_is_recorded_as_always_right(tmp_path: Path) -> None:
    target = tiny.make_target("llama", tmp_path / "target")
    pair = resolve(EngineConfig(target, target, dtype="float64", drafters=()))
    assert pair.draft is not None
    with Engine(EngineConfig(target, None, dtype="float64")) as engine, shared_model(pair.draft) as model:
        draft = ModelRunner(model, max_len=256, num_scratch=16)
        record(engine, draft, PROMPT[:2], 40)  # it has room for one text at a time
        trace = record(engine, draft, PROMPT, 40)
        assert trace.token_ids == engine.submit(PROMPT, SamplingParams(max_tokens=40)).result().token_ids
    assert all(trace.rank(position) == 0 for position in range(40))
    assert torch.tensor(trace.draft_logs).diff().le(0).all()


@pytest.mark.slow
def test_bench_simulates_over_traces_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save([made_up(12, 0)], tmp_path / "made-up.json")
    files = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    contest_main(["--traces", str(tmp_path), "--ratios", "4", *files])
    out = capsys.readouterr().out
    assert "made-up: 1 texts, 12 tokens" in out and out.count("card-synchronous") == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"trace", "c", "method", "setting", "speedup", "ceiling"} == set(rows[0])
    assert sum(row["method"] == "card" for row in rows) == 1 + 1 + len(BATCHES) + len(CPU_CELLS), (
        "alone, on one device, ..."
    )
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_the_contest_says_what_is_missing(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(InvalidInputError, match=match):
            contest_main(["--traces", str(tmp_path)])

    refused("holds no .json file")
    (tmp_path / "broken.json").write_text('[{"prompt_ids": [1]}]')
    refused(r"broken\.json")
    (tmp_path / "broken.json").write_text("[]")
    refused("holds no text")
    whole = {"prompt_ids": [1], "token_ids": [5, 6], "draft_ids": [[5]], "draft_logs": [[-0.1]]}
    (tmp_path / "broken.json").write_text(json.dumps([whole]))
    refused("for each of its tokens")
    for name, text in (("absent.jsonl", None), ("broken.jsonl", "{"), ("other.jsonl", '{"a": 1}'), ("empty.jsonl", "")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(InvalidInputError, match=name):
            record_main([str(tmp_path / "x.json"), "--prompts", str(tmp_path / name)])
    with pytest.raises(InvalidInputError, match="must be a model"):
        record_main([str(tmp_path / "x.json"), "--draft-model", "none"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ratios", "0"], "--ratios"),
        (["--ratios", "nan"], "--ratios"),
        (["--json", "nowhere/rows.json"], "mkdir -p nowhere"),
        (["--json", "rows.txt"], "must end in .json"),
        (["--plot", "picture.txt"], ".png"),
    ],
)
def test_the_contest_checks_before_it_works(options: list[str], said: str) -> None:
    with pytest.raises(InvalidInputError) as seen:
        contest_main(options)
    assert said in str(seen.value)


def test_step_times_are_measured_into_a_file_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.1)
    pair = ["--model", target, "--draft-model", draft, "--count", "3"]
    assert main(["bench", "--steps", str(tmp_path / "here.json"), *pair]) == 0
    assert "both at once" in capsys.readouterr().out
    device = load_device(str(tmp_path / "here.json"))
    assert device.name == "here" and device.measured and target in device.source
    assert min(*device.target.values(), *device.draft.values(), *device.slowdown) > 0
    assert costs_of(device, 8).target(1) == pytest.approx(8 * costs_of(device, 8).draft(1)), (
        "the draft's curve is stretched"
    )


def test_a_device_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    device = {"name": "x", "measured": True, "source": "", "target": {"1": 1}, "draft": {"1": 1}, "slowdown": [1, 1]}
    still = device | {"target": {"1": 1, "2": 0}, "draft": {"1": 1, "2": 1}}
    files = {"broken.json": "[]", "short.json": json.dumps(device), "still.json": json.dumps(still)}
    for name, text in (("b100", None), *files.items()):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        with pytest.raises(InvalidInputError, match=f"{name}.*h200"):
            load_device(str(file) if text else name)
