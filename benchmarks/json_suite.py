"""Documents under JSON schemas, and what the grammar costs in passes: `constrained.py` prints and writes the counts.

Three counts, none of them a time:

- *Tokens a pass*, of all documents of the built-in pair together, and of the same texts without the grammar. For the
  second, a steering plug-in has the target choose the recorded tokens, one by one. So the text is the same, the policy
  is fixed and the same, the drafters start empty, and nothing but the grammar differs: neither the draft nor the
  target has a mask, and no text is known to be forced.
- *Invalid documents*: those that are no JSON, or that `jsonschema` refuses.
- *Longest gap* between the tokens of an answer, in passes of the target, and the longest run of passes that brought
  one token each. Every pass brings a token, so a gap of more than one pass would be a fault of the protocol; a stall
  of the draft shows in the run. The longest gap over the median one, in CPU seconds, shows a stall of masks.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from torch import Tensor

from langchain_card import Engine, EngineConfig, SamplingParams, plugins
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.core import messages as m
from langchain_card.engine.generation import Completion, Generation
from langchain_card.limits import Limits, Pins
from langchain_card.testing import tiny

REPLAY = "replay"
"""Name of the steering plug-in that has the target write a recorded text."""

POLICY = Pins(draft_width=2, window=16, lead=4)
"""The same draft steps and windows in every run, however fast or busy the machine is."""

MAX_TOKENS = 160
TINY_TOKENS = 80


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_TEXT, _COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 9999}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(name=_TEXT, age=_COUNT, email={"type": "string", "format": "email"}),
    "order": _object(
        full_name_of_the_customer=_TEXT,
        delivery_address=_object(street=_TEXT, postal_code={"type": "string", "pattern": r"^\d{4,5}$"}, city=_TEXT),
        number_of_ordered_pieces=_COUNT,
        customer_wants_express_delivery={"type": "boolean"},
    ),
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue", "none"]}, "minItems": 1, "maxItems": 4},
    "event": _object(title=_TEXT, date={"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"}, kind={"enum": ["a", "b"]}),
    "call": _object(
        function={"enum": ["search", "send_mail", "set_alarm"]}, arguments=_object(query=_TEXT, limit=_COUNT)
    ),
    "book": {**_object(title=_TEXT, authors={"type": "array", "items": _TEXT, "maxItems": 2}), "required": ["title"]},
    "nested": _object(a=_object(b=_object(c=_object(d={"type": ["boolean", "null"]})))),
    "either": {"anyOf": [_object(celsius=_COUNT), _object(fahrenheit=_COUNT), {"type": "null"}]},
}
TOPICS = (
    "a gardener in Oslo", "wool blankets", "the first day of spring", "a lost key", "a trip to Lyon", "green lamps",
    "a birthday", "the night train", "tulip bulbs", "a letter from Brno", "bread", "an old map", "the harbour",
)  # fmt: skip


@dataclass
class Counts:
    """The counts of one way to write documents.

    Attributes:
        documents, invalid: documents, and those that their schema refuses.
        tokens, passes: of all documents.
        longest_gap: passes of the target between two tokens of an answer, at most.
        longest_run: passes in a row that brought one token each, at most.
        slowest_gap: the longest gap over the median one, in CPU seconds of the target's process.
        accepted: candidates that became tokens, by drafter.
    """

    documents: int = 0
    invalid: int = 0
    tokens: int = 0
    passes: int = 0
    longest_gap: int = 0
    longest_run: int = 0
    slowest_gap: float = 0.0
    accepted: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass of the target."""
        return self.tokens / max(1, self.passes)


class Gaps:
    """An observer of an engine with one request at a time: passes between the tokens of an answer.

    Attributes:
        longest: see `Counts`; so are `longest_run` and `slowest_gap`.
        seconds: CPU seconds of each gap.
    """

    def __init__(self) -> None:
        self.longest = self.longest_run = 0
        self.seconds: list[float] = []
        self._passes = self._run = 0
        self._last: float | None = None

    def __call__(self, event: m.Event, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, m.Begin) and effect.worker == m.TARGET:
                self._passes, self._run, self._last = 0, 0, None
            elif isinstance(effect, m.Verify):
                self._passes += 1
            elif isinstance(effect, m.Emit):
                now = time.process_time()
                if self._last is not None:  # else the passes read the prompt
                    self.longest = max(self.longest, self._passes)
                    self.seconds.append(now - self._last)
                self._run = self._run + 1 if len(effect.token_ids) == 1 else 0
                self.longest_run = max(self.longest_run, self._run)
                self._passes, self._last = 0, now


@dataclass(frozen=True)
class Document:
    """A document, and how it was written."""

    schema: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    done: Completion


class Replay:
    """Steering that has the target write `text`, prompt and answer, token by token, and leaves other rows alone."""

    text: tuple[int, ...] = ()

    def __init__(self, setting: Any) -> None:
        pass

    def __call__(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        steered = logits.clone()
        for row, text in enumerate(map(tuple, texts)):
            if len(text) < len(self.text) and self.text[: len(text)] == text:
                steered[row] = -1e4
                steered[row, self.text[len(text)]] = 0.0
        return steered


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return whether a text is a document of a schema."""
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def questions(count: int) -> Iterator[tuple[str, str, float]]:
    """Yield the schema, the prompt and the temperature of each document: every second one is sampled."""
    names = [*SCHEMAS]
    for i in range(count):
        name, turn = names[i % len(names)], i // len(names)
        yield name, f"As JSON, number {i}: {name} ({TOPICS[turn % len(TOPICS)]}).", 0.8 * (turn % 2)


def write(engine: Engine, count: int, schedule: Any) -> list[Document]:
    """Write documents, one after the other."""
    documents = []
    for i, (name, prompt, temperature) in enumerate(questions(count)):
        messages: Any = [{"role": "user", "content": prompt}]
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        params = SamplingParams(MAX_TOKENS, temperature, i, grammar=json_grammar(SCHEMAS[name]), schedule=schedule)
        documents.append(Document(name, tuple(ids), params, engine.submit(ids, params).result()))
        print(".", end="", flush=True)
    print()
    return documents


def replay(engine: Engine, documents: Sequence[Document]) -> list[Document]:
    """Write the same texts again, without their grammars."""
    replayed = []
    for document in documents:
        wanted = document.done.token_ids
        Replay.text = (*document.prompt_ids, *wanted)
        params = replace(document.params, grammar="", max_tokens=len(wanted))
        done = engine.submit(document.prompt_ids, params).result()
        assert done.token_ids == wanted, "the replay wrote another text"
        replayed.append(replace(document, params=params, done=done))
        print(".", end="", flush=True)
    print()
    return replayed


def measure(config: EngineConfig, count: int, schedule: Any) -> dict[str, Counts]:
    """Write documents under their grammars and the same texts without them; return the counts of both ways."""
    gaps = {"grammar": Gaps(), "same text, no grammar": Gaps()}
    under, without = gaps.values()
    config = replace(config, pins=POLICY, limits=replace(config.limits, max_num_seqs=1))
    with Engine(config, observe=under) as engine:
        documents = write(engine, count, schedule)
    plugins.register("steering", REPLAY, Replay)
    with Engine(replace(config, steering=REPLAY), observe=without) as engine:
        replayed = replay(engine, documents)
    return {name: counted(each, gaps[name]) for name, each in zip(gaps, (documents, replayed), strict=True)}


def counted(documents: Sequence[Document], gaps: Gaps) -> Counts:
    """Return the counts of documents."""
    seconds = sorted(gaps.seconds) or [1.0]
    counts = Counts(len(documents), longest_gap=gaps.longest, longest_run=gaps.longest_run)
    counts.slowest_gap = seconds[-1] / seconds[len(seconds) // 2]
    for each in documents:
        stats = each.done.stats
        counts.invalid += not is_valid(each.done.text, SCHEMAS[each.schema])
        counts.tokens, counts.passes = counts.tokens + stats.output_tokens, counts.passes + stats.rounds
        for source, accepted in stats.accepted_by_source.items():
            counts.accepted[source] = counts.accepted.get(source, 0) + accepted
    return counts


def tiny_documents(count: int, transport: Any) -> tuple[int, int]:
    """Write documents with tiny random models, eight at a time; return how many there are, and how many are invalid.

    Such a model writes noise, so that only the grammar makes its texts documents.
    """
    invalid, names = 0, [*SCHEMAS]
    with tempfile.TemporaryDirectory() as home:
        target = tiny.make_target("llama", Path(home) / "target")
        draft = tiny.make_draft(target, Path(home) / "draft", noise=0.02)
        limits = Limits(max_num_seqs=8, max_queue=1024)
        config = EngineConfig(target, draft, dtype="float64", draft_transport=transport, pins=POLICY, limits=limits)
        with Engine(config) as engine:
            for first in range(0, count, len(names)):
                turn, writing = first // len(names), list[Generation]()
                schedule: Any = ("sequential", "parallel", "plain")[turn % 3]
                for i, name in enumerate(names[: count - first], first):
                    grammar = json_grammar(SCHEMAS[name])
                    room = TINY_TOKENS * (turn % 4) // 3  # with none, the end of the shortest document is forced
                    params = SamplingParams(
                        engine.grammars.shortest(grammar) + room,
                        0.4 * (turn % 5),
                        i,
                        grammar=grammar,
                        schedule=schedule,
                    )
                    writing.append(engine.submit(engine.tokenizer(f"number {i}").input_ids, params))
                for name, each in zip(names, writing, strict=False):
                    invalid += not is_valid(each.result().text, SCHEMAS[name])
                print(".", end="", flush=True)
    print()
    return count, invalid
