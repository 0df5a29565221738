"""Speed under a grammar: the same texts with and without one, and long documents under a schema.

    python benchmarks/constrained.py [--model NAME --draft NAME] [--count 10] [--max-tokens 160]
    python benchmarks/constrained.py --suite 96 --tiny 904 [--transport process] [--schedule sequential] [--json FILE]

The second form counts passes and documents, and no times (`json_suite.py`). The first one answers every prompt in each
way, in an order that alternates:

- *Texts*: free, and under the grammar of an answer that may call a tool, which allows any text. Both ways write the
  same text, so that the difference is the cost of masks and grammar states.
- *Documents*: an order is extracted from a letter, by `auto` and by the target alone, each with and without a schema
  that has long names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import json_suite
from langchain_card import Engine, EngineConfig, SamplingParams
from langchain_card.bench import prompts
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.engine.generation import Completion
from langchain_card.text.tool_form import FENCED
from langchain_card.text.tool_grammar import AnswerShape, answer_grammar


class Address(BaseModel):
    street_and_house_number: str
    postal_code_of_the_city: str = Field(pattern=r"^\d{4,5}$")
    name_of_the_city: str


class Order(BaseModel):
    full_name_of_the_customer: str
    delivery_address_of_the_customer: Address
    description_of_the_ordered_product: str
    number_of_ordered_pieces: int = Field(ge=1, le=999)
    customer_wants_express_delivery: bool


LETTERS = [
    f"{name} here. Please send {count} {thing} to {street}, {code} {city}. {hurry}"
    for name, count, thing, street, code, city, hurry in (
        ("Ann Berg", 3, "green lamps", "Storgata 5", "0155", "Oslo", "It is urgent!"),
        ("Bob Klein", 12, "garden chairs", "Am Markt 7", "04109", "Leipzig", "No hurry."),
        ("Cleo Rossi", 1, "coffee machine", "Via Roma 22", "00184", "Roma", "As fast as you can."),
        ("Dan Novak", 40, "oak boards of 2 m", "Hlavni 3", "60200", "Brno", "Any time in May will do."),
        ("Eva Lund", 2, "bicycle pumps", "Nygade 14", "1164", "Copenhagen", "Express, please."),
        ("Fred Moser", 100, "paper boxes", "Ringstrasse 1", "1010", "Wien", "Take your time."),
        ("Gina Vogt", 5, "red umbrellas", "Seeweg 9", "8001", "Zurich", "I need them tomorrow."),
        ("Hugo Leroy", 7, "wool blankets", "Rue Verte 30", "69001", "Lyon", "Standard delivery is fine."),
        ("Ines Silva", 15, "tile samples", "Rua Nova 8", "4050", "Porto", "With express delivery."),
        ("Jan Maas", 60, "tulip bulbs", "Kade 11", "1012", "Amsterdam", "Whenever it suits you."),
    )
]
TOOL = {"function": {"name": "archive", "parameters": {"type": "object", "properties": {}}}}
ANY_TEXT = answer_grammar(AnswerShape((TOOL,)), FENCED, ())
ORDER = json_grammar(Order.model_json_schema(), strict=True)


def in_turn(engine: Engine, texts: Sequence[str], ways: Mapping[str, SamplingParams]) -> dict[str, list[Completion]]:
    """Return the answers to every prompt, by way."""
    answers: dict[str, list[Completion]] = {name: [] for name in ways}
    for i, text in enumerate(texts):
        messages: Any = [{"role": "user", "content": text}]
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for name in [*ways][:: 1 if i % 2 else -1]:
            answers[name].append(engine.submit(ids, ways[name]).result())
        print(".", end="", flush=True)
    print()
    return answers


def report(title: str, completions: Mapping[str, list[Completion]], base: str) -> None:
    """Print a line for each way, with the ratios of tokens per second, paired by prompt."""
    print(title)
    speeds = {name: [answer.stats.tokens_per_second for answer in answers] for name, answers in completions.items()}
    for name, answers in completions.items():
        ratios = [speed / other for speed, other in zip(speeds[name], speeds[base], strict=True)]
        same = sum(a.token_ids == b.token_ids for a, b in zip(answers, completions[base], strict=True))
        tokens = statistics.mean(len(answer.token_ids) for answer in answers)
        forced = statistics.mean(answer.stats.accepted_by_source.get("forced", 0) for answer in answers)
        print(
            f"  {name:22} {statistics.median(speeds[name]):6.1f} tokens/s, {statistics.median(ratios):.2f} times {base}"
            f" ({min(ratios):.2f} to {max(ratios):.2f}); {tokens:.0f} tokens, {forced:.0f} of them forced; same: {same}"
        )


def count_passes(config: EngineConfig, args: argparse.Namespace) -> None:
    """Run the suite; print its table, and write the figures."""
    figures = dict[str, Any]()
    if args.suite:
        counts = json_suite.measure(config, args.suite, args.schedule)
        print(
            "way                      documents  invalid  tokens  passes  tokens a pass  longest gap  one token a pass"
        )
        for way, of in counts.items():
            print(
                f"{way:24} {of.documents:9} {of.invalid:8} {of.tokens:7} {of.passes:7} {of.tokens_per_pass:14.2f} "
                f"{of.longest_gap:5} passes  {of.longest_run:4} in a row; accepted {of.accepted}; "
                f"longest gap {of.slowest_gap:.1f} times the median one"
            )
            figures[way] = {**asdict(of), "tokens_per_pass": of.tokens_per_pass}
    if args.tiny:
        written, invalid = json_suite.tiny_documents(args.tiny, args.transport)
        print(f"tiny random models: {written} documents, {invalid} invalid")
        figures["tiny"] = {"documents": written, "invalid": invalid}
    if args.json is not None:
        settings = {"transport": args.transport, "schedule": args.schedule, "model": config.model}
        args.json.write_text(json.dumps({**settings, **figures}, indent=1) + "\n", encoding="utf-8")


def compare_speeds(config: EngineConfig, args: argparse.Namespace) -> None:
    """Time texts and documents with and without grammars."""

    def params(schedule: Any, grammar: str = "") -> SamplingParams:
        return SamplingParams(max_tokens=args.max_tokens, schedule=schedule, grammar=grammar)

    with Engine(config) as engine:
        texts = prompts.load(prompts.OWN, args.count)
        in_turn(engine, texts[:2], {"first": params("auto")})  # measures step times of both schedules
        for schedule in ("auto", "plain"):
            ways = {"free": params(schedule), "under a grammar": params(schedule, ANY_TEXT)}
            report(f"Texts, {schedule}", in_turn(engine, texts, ways), "free")
        questions = [f"Read the order out of this letter, as JSON.\n\n{letter}" for letter in LETTERS[: args.count]]
        ways = {
            "plain, free": params("plain"),
            "plain, the schema": params("plain", ORDER),
            "auto, free": params("auto"),
            "auto, the schema": params("auto", ORDER),
        }
        completions = in_turn(engine, questions, ways)
        for answer in (*completions["plain, the schema"], *completions["auto, the schema"]):
            Order.model_validate_json(answer.text)
        report("Documents", completions, "plain, free")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--draft", default="ngram", help="beside --model")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--suite", type=int, default=0, help="documents of the models; counts passes, not seconds")
    parser.add_argument("--tiny", type=int, default=0, help="documents of tiny random models")
    parser.add_argument("--transport", choices=("thread", "process"), default="thread", help="of the suite's draft")
    parser.add_argument("--schedule", choices=("sequential", "parallel"), default="sequential", help="of the suite")
    parser.add_argument("--json", type=Path, help="file for the suite's figures")
    args = parser.parse_args()
    config = EngineConfig() if args.model is None else EngineConfig(model=args.model, draft_model=args.draft)
    if args.suite or args.tiny:
        count_passes(replace(config, draft_transport=args.transport), args)
    else:
        compare_speeds(config, args)


if __name__ == "__main__":
    main()
