"""Grammars alone: masks, forks, ends of every prefix; and grammars that do harm to the compiler."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from pydantic import AnyHttpUrl

from langchain_card.constraints import compiler
from langchain_card.constraints.compiler import Grammars, Matcher
from langchain_card.constraints.json_schema import json_grammar
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.testing.tokenizer import byte_tokenizer
from tests.support.grammars import PADDED, eos, grammars, tokenizer
from tests.support.schemas import Schema, random_schema, satisfies

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"enum": ["<|end|>", "</s>", 1]}}}
CASES: dict[str, Schema] = {
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "branching": {"$defs": {"tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 2},
                                               {"type": "null"}]}}, "$ref": "#/$defs/tree"},
    "pattern": {"type": "string", "pattern": "^(ab)*c$"},
    "counted": {"type": "string", "pattern": "^[0-9]{3}-([a-f]{2}:){4}x$"},
    "control tokens": {"enum": ["<|end|>", "</s>", "<｜end▁of▁sentence｜>", "<s>"]},
    "optional": {"type": "object", "properties": {name: {"type": "integer"} for name in "abcdef"}},
    "email": {"type": "object", "properties": {"e": {"type": "string", "format": "email"}}, "required": ["e"]},
    "any": {},
}  # fmt: skip


def start(schema: Schema, name: str = "bytes") -> Matcher:
    grammars(name).check(json_grammar(schema), 10**6)
    return grammars(name).start(json_grammar(schema))


def tokens(state: Matcher) -> list[int]:
    bits = np.frombuffer(state.allowed(), dtype=np.uint8)
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]


def walk(state: Matcher, rng: random.Random, name: str, most: int) -> Iterator[list[int]]:
    """Says tokens at random, text rather than marks at first; yields what was said so far, the state moved on."""
    said: list[int] = []
    yield said
    for _ in range(most):
        may = [token for token in tokens(state) if token != eos(name)]
        if not may:
            return
        said = [*said, rng.choice(may)]
        assert state.accept(said[-1])
        yield said


def ended(state: Matcher, name: str, room: int = 0) -> tuple[int, ...]:
    """Its ending, which must end it."""
    ending = state.closing(room)
    assert ending is not None
    own = state.fork()
    assert all(map(own.accept, ending)) and eos(name) in tokens(own)
    return ending


def text(name: str, ids: list[int]) -> str:
    return str(tokenizer(name).decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("name", ["bytes", "deepseek"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_masks_are_what_is_accepted(name: str, case: str) -> None:
    """For every token of the vocabulary, also those that it is padded with; and asking changes nothing.

    The end of text is in masks alone: nothing is said with it.
    """
    state, rng = start(CASES[case], name), random.Random(case)
    for said in walk(state, rng, name, 12 if name == "bytes" else 4):
        may = tokens(state)
        every = (
            range(PADDED)
            if name == "bytes"
            else {*rng.sample(may, min(len(may), 3000)), *rng.sample(range(len(tokenizer(name))), 3000), eos(name)}
        )
        taken = [token for token in every if token == eos(name) in may or state.fork().accept(token)]
        assert taken == [token for token in every if token in {*may}], said
        refused = [token for token in every if token not in taken]
        assert not state.accept(refused[0]) and tokens(state) == may, "a refusal changes nothing"
        forced = state.forced()
        assert state.fork().fitting(forced) == len(forced) and tokens(state) == may


def test_forks_know_nothing_of_each_other() -> None:
    state = start({"enum": ["abc", "axy"]})
    state.accept(*byte_tokenizer()('"').input_ids)
    state.accept(*byte_tokenizer()("a").input_ids)
    one, other = state.fork(), state.fork()
    assert one.forced() == [] and one.accept(*byte_tokenizer()("b").input_ids)
    assert text("bytes", one.forced()) == 'c"<|end|>' and text("bytes", list(one.closing(9) or ())) == 'c"'
    assert not other.accept(*byte_tokenizer()("c").input_ids)
    assert other.accept(*byte_tokenizer()("x").input_ids) and text("bytes", other.forced()) == 'y"<|end|>'
    assert len(tokens(state)) == 2 and state.forced() == []


def test_an_end_of_text_comes_last() -> None:
    state = start({"const": 12})
    assert eos("bytes") not in tokens(state)
    assert all(map(state.accept, byte_tokenizer()("12").input_ids))
    assert tokens(state) == state.forced() == [eos("bytes")] and state.closing(0) == ()


@pytest.mark.parametrize("case", CASES)
def test_what_fits_is_what_is_accepted(case: str) -> None:
    """Along random texts of every case: the first token that does not fit is the first that is refused."""
    for seed in range(4):
        rng, state = random.Random(seed), start(CASES[case])
        *_, said = walk(state.fork(), rng, "bytes", 12)
        for change in (None, rng.randrange(256), eos("bytes")):
            ahead = said if change is None else [*said[: rng.randrange(len(said) + 1)], change, *said[:1]]
            behind, count = state.fork(), 0
            while count < len(ahead) and behind.accept(ahead[count]):
                count += 1
            ends = ahead[count : count + 1] == [eos("bytes")] and eos("bytes") in tokens(behind)
            assert state.fitting(ahead) == count + ends
            assert behind.fitting(ahead[count:]) == ends, "from where it stopped, too"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["bytes", "deepseek"])
@pytest.mark.slow
def test_every_prefix_has_an_end(name: str, case: str) -> None:
    lengths = []
    for seed in range(6):
        state = start(CASES[case], name)
        for said in walk(state, random.Random(seed), name, 30 if name == "bytes" else 10):
            if complete(name, said):
                ending = ended(state, name)
                lengths.append(len(ending))
                assert satisfies(text(name, [*said, *ending]), CASES[case])
    assert max(lengths) < 400


def complete(name: str, said: list[int]) -> bool:
    """Whether it ends with a whole character, so that it can be read back."""
    return not text(name, said).endswith("�")


@pytest.mark.slow
def test_random_schemas_end_from_everywhere() -> None:
    prefixes, count = 0, 400 if os.environ.get("CARD_EXPLORE") else 50
    for seed in range(count):
        rng = random.Random(seed)
        schema = random_schema(rng)
        state = start(schema)
        again = state.fork()
        for said in walk(state, rng, "bytes", rng.choice([5, 20, 60])):
            if said:
                again.accept(said[-1])
            if rng.random() < 0.3:
                ending = ended(state, "bytes")
                assert satisfies(text("bytes", [*said, *ending]), schema), (schema, text("bytes", said))
                assert again.closing(0) == ending, "the same questions have the same answers"
                prefixes += 1
    assert prefixes > 4 * count


@pytest.mark.parametrize(
    "text",
    [{"format": name} for name in ("email", "uri", "hostname", "ipv6", "uuid", "date-time", "duration")]
    + [{"pattern": p} for p in ("ab+c", "é$", "^\\w+@\\w+\\.(com|org)$", "^[^@]+@[^@]+\\.[^@]+$", "^\\S+ \\S+$",
                                "^https?://.+\\.pdf$", "^[A-Z]{2}[0-9]+;$", "^.*\\.(png|jpg)$", "foo.*bar")],
)  # fmt: skip
def test_what_people_ask_of_texts_has_a_short_end(text: Schema) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} | text for name in "ab"},
        "required": ["a", "b"],
    }
    state = start(schema)
    ending = ended(state, "bytes")
    decoded = byte_tokenizer().decode(ending)
    assert satisfies(decoded, schema) and len(ending) < 120


# What does harm.

DEEP: Schema = {"type": "null"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
HOSTILE: dict[str, tuple[Schema, str]] = {
    "crashes": ({"const": -(2**63)}, "the compiler of grammars fails with it"),
    "overflows the stack": ({"$defs": CHAIN | {"d3000": {}}, "$ref": "#/$defs/d0"}, "the compiler of grammars fails"),
    "hangs": ({"properties": {f"p{i}": True for i in range(10_000)}}, "takes more than 1 seconds to compile"),
    "wide": ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}}, "no text was found"),
    "deep": (DEEP, "65 levels': at most 64 levels"),
    "large": ({"enum": ["x" * 300_000]}, "300,213 bytes': at most 262,144 bytes"),
    "endless": ({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
                 "$ref": "#/$defs/n"}, "no text was found"),
    "itself": ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, "cannot be compiled"),
    "contradicts itself": ({"type": "integer", "minimum": 5, "maximum": 4}, "is greater than maximum"),
    "long": ({"type": "string", "minLength": 10**6}, "no text was found"),
    "no characters": ({"const": "\ud800"}, "must be text"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_harm_is_refused_in_time(name: str) -> None:
    schema, words = HOSTILE[name]
    limits = Limits(max_grammar_seconds=1.0)
    own, begun = Grammars(byte_tokenizer(), PADDED, [256], limits), time.monotonic()
    with pytest.raises(InvalidInputError, match=words):
        own.check(json_grammar(schema), 10**6)
    assert time.monotonic() - begun < 5
    own.check(json_grammar({"type": "null"}), 4)


@pytest.mark.parametrize(
    "grammar",
    ["start: (", " ", '%llguidance {}\na: "x"\n', '%llguidance {}\nstart: "a" start\n', "start: %json {", "start: <no>",
     "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, '%llguidance {}\nstart: "ab"{1000000}\n'],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidInputError, match="grammar = "):
        Grammars(byte_tokenizer(), PADDED, [256], Limits()).check(grammar, 10**6)


def test_the_fewest_tokens() -> None:
    with pytest.raises(InvalidInputError, match=r"max_tokens = 13: the shortest answer of this form takes 14 tokens"):
        grammars().check(json_grammar({"const": "twelve chars"}), 13)
    grammars().check(json_grammar({"const": "twelve chars"}), 14)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^.+, [A-Z]{2} \\d{5}$", "12 Main St, Ames, IA 50010"),
        ("^(.*)\\.(pdf|docx)$", "a .pdf of my report.docx"),
        ("^SELECT .+ FROM [a-z_]+;$", "SELECT a FROM b FROM orders;"),
        ("^.+ <.+@.+>$", "Ann B. <ann@example.org>"),
        ("^(\\w+\\s){2,5}\\w+\\.$", "this is short."),
        ("^Dear .+,\\n.+", "Dear Ann,\nhello"),
        ("^https?://.+\\..+/.+$", "https://example.org/a/b"),
        ("^(?:[A-Za-z]+ ){3}because .+ [0-9]+%$", "sales went up because of 15 % and 20%"),
        ("^\\[.+\\]\\(.+\\)$", "[text](more) (and)"),
        ("^.+ v\\d+\\.\\d+$", "card version v1.20"),
        ("^[^:]+: .+ \\(.+\\)$", "a: b (c: d)"),
        ("^.*[aeiou]{3}.*q$", "a queue of q"),
        ('^"\\w+" \\\\ .+"$', '"quoted" \\ and "'),
    ],
)
def test_texts_of_patterns_end_from_everywhere(pattern: str, text: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    written = json.dumps({"x": text})
    assert re.search(pattern, text)
    for end in range(len(written) + 1):
        state = start(schema)
        assert all(map(state.accept, byte_tokenizer()(written[:end]).input_ids))
        ending = state.closing(10**6)
        assert ending is not None, written[:end]
        assert re.search(pattern, json.loads(written[:end] + byte_tokenizer().decode(ending))["x"])


def test_a_pattern_that_cannot_be_ended_is_refused_though_the_shortest_text_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^.*[aeiou]{3}.*q$"}}}
    own = Grammars(byte_tokenizer(), PADDED, [256], Limits())
    own.check(json_grammar(schema), 2)
    monkeypatch.setattr(compiler, "hints_of", lambda grammar: [])
    with pytest.raises(InvalidInputError, match=r"pattern = .*aeiou.*: no text was found"):
        Grammars(byte_tokenizer(), PADDED, [256], Limits()).check(json_grammar(schema), 2)


@pytest.mark.parametrize(
    ("format_", "kind"),
    [("date", date.fromisoformat), ("date-time", datetime.fromisoformat), ("uri", AnyHttpUrl), ("uuid", UUID)],
)
def test_ends_of_formats_are_what_others_take(format_: str, kind: Callable[[str], Any]) -> None:
    for begun in ('"', '"2', '"20') if format_.startswith("date") else ('"',):
        state = start({"type": "string", "format": format_})
        assert all(map(state.accept, byte_tokenizer()(begun).input_ids))
        text = begun + byte_tokenizer().decode(state.closing(10**6) or ())
        kind(json.loads(text).replace("Z", "+00:00"))


@pytest.mark.parametrize(
    ("schema", "tokens"),
    [
        ({"type": "string", "minLength": 4000}, 4002),
        ({"type": "string", "minLength": 500, "maxLength": 503}, 502),
        ({"type": "string", "pattern": "^[a-f0-9]{512}$"}, 514),
        ({"type": "string", "pattern": "^.{700,}$"}, 702),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 300}, 900),
    ],
)
def test_documents_that_must_be_long(schema: dict[str, Any], tokens: int) -> None:
    grammars().check(json_grammar(schema), tokens)
    with pytest.raises(InvalidInputError, match=f"takes {tokens:,} tokens"):
        grammars().check(json_grammar(schema), tokens - 1)


@pytest.mark.parametrize(
    ("schema", "tokens"),
    [
        ({"type": "string", "minLength": 100}, 27),
        ({"type": "string", "minLength": 4}, 3),
        ({"type": "array", "items": {"type": "string", "minLength": 100}, "minItems": 2}, 53),
    ],
)
def test_padding_is_as_long_as_text(schema: dict[str, Any], tokens: int) -> None:
    """A vocabulary with tokens of many blanks does not make a document fit that no text would fit. 2 seconds."""
    assert len(tokenizer("deepseek").tokenize(" " * 100)) < 5
    with pytest.raises(InvalidInputError, match=r"the shortest answer of this form takes \d+ tokens"):
        grammars("deepseek").check(json_grammar(schema), tokens - 2)
    assert abs(grammars("deepseek").shortest(json_grammar(schema)) - tokens) <= 1


def test_the_cache_is_bounded_and_what_it_lost_works() -> None:
    own = Grammars(byte_tokenizer(), PADDED, [256], Limits(max_grammar_cache_bytes=10**6))
    own._validate = lambda grammar: None  # type: ignore[method-assign]
    asked = [json_grammar({"const": "x" * n}) for n in range(100)]

    def use(n: int) -> int:
        own.check(asked[n], 10**6)
        state = own.start(asked[n])
        assert sum(kept.size for kept in list(own._compiled.values())) <= 10**6
        return len(state.closing(0) or ())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, [*range(100), *range(100)])) == [*range(2, 102), *range(2, 102)]
    assert 0 < len(own._compiled) < 20 and asked[0] not in own._compiled
    assert len(own.start(asked[0]).closing(0) or ()) == 2
    small = Grammars(byte_tokenizer(), PADDED, [256], Limits(max_grammar_cache_bytes=1000))
    small._validate = lambda grammar: None  # type: ignore[method-assign]
    for n in (3, 4):
        small.check(asked[n], 10**6)
        assert [*small._compiled] == [asked[n]], "one that is larger than all of it is kept until the next"


def test_many_threads_check_a_grammar_once() -> None:
    own, checked = Grammars(byte_tokenizer(), PADDED, [256], Limits()), list[str]()
    own._validate = checked.append  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(own.shortest, [json_grammar({"const": "x"})] * 16)} == {3}
    assert len(checked) == 1


def test_the_package_that_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidInputError, match=r"needs the package llguidance.*pip install 'llguidance"):
        Grammars(byte_tokenizer(), PADDED, [256], Limits()).shortest(json_grammar({"const": "x"}))


# Schemas.

OPEN = {"properties": {"a": {}}}


def test_strict_refuses_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    start(schema)
    with pytest.raises(InvalidInputError, match="uniqueItems"):
        Grammars(byte_tokenizer(), PADDED, [256], Limits()).check(json_grammar(schema, strict=True), 10**6)


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, True),
        ({"properties": {"properties": OPEN}}, True),
        ({"properties": {"properties": {"type": "string"}, "a": {}}}, True),
        (OPEN | {"required": ["b"]}, False),
        (OPEN | {"additionalProperties": True}, False),
        (OPEN | {"allOf": [{"properties": {"b": {}}}]}, False),
        ({"allOf": [OPEN], "title": "as pydantic 1 writes"}, True),
        ({"allOf": [OPEN, {"properties": {"b": {}}}]}, False),
        (OPEN | {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}}, False),
        (OPEN | {"anyOf": [{"properties": {"b": {}}}, {}]}, False),
        (OPEN | {"patternProperties": {"^b$": {}}}, False),
        ({"type": "object"}, False),
    ],
)
def test_objects_without_properties_that_nobody_named(schema: Schema, closed: bool) -> None:
    state = start(schema | {"type": "object"})
    assert all(map(state.accept, byte_tokenizer()("{").input_ids))
    for part in ('"', "b"):
        accepted = state.accept(*byte_tokenizer()(part).input_ids)
    assert accepted is not closed
