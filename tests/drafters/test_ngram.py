"""The n-gram drafter: its tables, its tries, and what it states of them."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.contest.traces import shipped
from langchain_card.config import EngineConfig
from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.ngram.drafter import NgramDrafter
from langchain_card.drafters.ngram.table import MAX_MATCH, PAGE, WAYS, Table, Tenants, TextCursor
from langchain_card.engine.engine import Engine
from langchain_card.errors import InvalidInputError
from langchain_card.limits import Limits
from langchain_card.ports import Budget, Setting

LEAST = 1 << 16


def drafter(max_bytes: int = 1 << 22, **options: Any) -> NgramDrafter:
    return NgramDrafter(Setting(limits=Limits(max_ngram_bytes=max_bytes)), **options)


def begin(asked: NgramDrafter, prompt: Sequence[int], request_id: int = 0, tenant: str = "") -> None:
    asked.begin(Request(request_id, tuple(prompt), SamplingParams(tenant=tenant)), ())


def step(asked: NgramDrafter, request_id: int = 0, ahead: tuple[int, ...] = ()) -> Proposal:
    [proposal] = asked.step([Budget(request_id, ahead=ahead)])
    return proposal


def reached(proposal: Proposal) -> list[tuple[tuple[int, ...], float]]:
    """For each node the tokens that lead there, and the chance that they come."""
    found: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for parent, token, score in zip(proposal.parents, proposal.token_ids, proposal.scores, strict=True):
        path, chance = found[parent]
        found.append(((*path, token), chance * math.exp(score)))
    return found[1:]


def tokens(table: Table, *tail: int) -> list[int]:
    return [token for token, _, _ in table.followers([*tail])]


# Tables.


def test_a_leader_keeps_its_latest_followers() -> None:
    table, text = Table(LEAST), TextCursor()
    table.write(text, [9, 1, 9, 2, 9, 3, 9, 4])
    assert tokens(table, 9) == [4, 3, 2, 1]
    table.write(text, [9, 2])
    assert tokens(table, 9) == [2, 4, 3, 1], "what comes again is the latest, and there once"
    table.write(text, [9, 4])
    assert tokens(table, 9) == [4, 2, 3, 1]
    table.write(text, [9, 5])
    assert tokens(table, 9) == [5, 4, 2, 3] and WAYS == 4, "the oldest goes"
    assert tokens(table, 7) == []


def test_the_longest_match_comes_first() -> None:
    table, text = Table(LEAST), TextCursor()
    table.write(text, [1, 2, 3, 4, 50, 7, 8, 3, 4, 60, 9, 9, 4, 70])
    assert [(token, match) for token, _, match in table.followers([1, 2, 3, 4])] == [(50, 4), (60, 2), (70, 1)]


def test_old_leaders_go_first_and_the_bound_holds() -> None:
    table, text, last = Table(LEAST), TextCursor(), 0
    for last in range(20_000):
        table.write(text, [last])
        assert table.num_bytes <= LEAST
    known = [token for token in range(last) if tokens(table, token) == [token + 1]]
    assert known[-1] == last - 1 and len(known) > 1500 and known[0] > last - len(known) * 1.5


def test_pieces_of_a_text_are_one_text() -> None:
    """Leaders reach over calls and pages."""
    whole, pieces, text, said = Table(1 << 20), Table(1 << 20), TextCursor(), [*range(4 * PAGE)]
    whole.write(TextCursor(), said)
    for start in range(0, len(said), 7):
        pieces.write(text, said[start : start + 7])
    for end in range(1, len(said)):
        assert whole.followers(said[max(0, end - 8) : end]) == pieces.followers(said[max(0, end - 8) : end])
    unknown = {end for end in range(1, len(said)) if tokens(whole, *said[max(0, end - 8) : end]) != [end]}
    room = PAGE - MAX_MATCH - 1
    assert len(unknown) < len(said) / 20 and not unknown & {room, 2 * room, 3 * room}


def test_texts_that_take_turns_do_not_mix() -> None:
    table, texts = Table(1 << 20), (TextCursor(), TextCursor())
    for i in range(2 * PAGE):
        for number, text in enumerate(texts):
            table.write(text, [10_000 * number + i])
    found = [(i, tokens(table, i)) for i in (*range(2 * PAGE - 1), *range(10_000, 10_000 + 2 * PAGE - 1))]
    assert all(known in ([i + 1], []) for i, known in found)
    assert sum(not known for _, known in found) < len(found) / 20, "rows are shared: few are too full"


def test_a_page_that_was_taken_is_nobodys() -> None:
    """A text that rests while others fill the log goes on in a new page, and knows how it ended."""
    table, resting, busy = Table(LEAST), TextCursor(), TextCursor()
    table.write(resting, [1, 2, 3])
    table.write(busy, [*range(10, 20_000)])
    table.write(resting, [4])
    assert tokens(table, 1, 2, 3) == [4] and tokens(table, 19_998) == [19_999]


def test_tenants_have_one_bound_and_the_one_that_rests_goes() -> None:
    tenants, said = Tenants(1 << 18), [*range(4 * PAGE)]
    for name in "ab":
        tenants.table(name).write(TextCursor(), said)
    tenants.table("a")  # used again, so that b has rested longer
    text = TextCursor()
    tenants.table("c").write(text, [5, 6])
    while len(tenants._tables) == 3:
        tenants.table("c").write(text, said[: PAGE // 2])
        assert tenants.num_bytes <= 1 << 18
    assert [tokens(tenants.table(name), 5) for name in "acb"] == [[6], [6], []]


@pytest.mark.parametrize("bound", [LEAST, 200_000, 1 << 19, 3_000_000])
def test_the_bound_holds_after_every_write(bound: int) -> None:
    tenants, source, texts = Tenants(bound), random.Random(bound), defaultdict[int, TextCursor](TextCursor)
    for _ in range(3000):
        number = source.randrange(source.choice([1, 3, 7]))
        said = [source.randrange(50_000) for _ in range(source.randrange(1, PAGE))]
        tenants.table(str(number)).write(texts[number], said)
        assert tenants.num_bytes <= bound


@pytest.mark.slow
def test_a_million_tokens_stay_within_their_bytes() -> None:
    bound, source = 1 << 21, random.Random(0)
    words = [[source.randrange(150_000) for _ in range(source.randrange(1, 12))] for _ in range(3000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        asked = drafter(bound)
        for number in range(40):
            begin(asked, [1], number % 3, tenant=f"tenant {number % 5}")
            for start in range(1, 25_000, 1000):
                said = [token for _ in range(90) for token in source.choice(words)] + source.sample(range(10**6), 400)
                asked.correct(number % 3, start - 1, said[:1000])
                assert asked.num_bytes <= bound
        taken, peak = (size - before for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert peak <= bound + 200_000, "beside the tables: the piece of text at hand, and where its words lie"
    assert 0.7 * taken <= asked.num_bytes <= 1.5 * taken, "what is counted is what is taken"


# Tries.


def test_nothing_known_nothing_proposed() -> None:
    asked = drafter()
    begin(asked, [1, 2, 3])
    assert step(asked).token_ids == ()


def test_a_trie_is_a_trie_of_what_is_likeliest() -> None:
    source = random.Random(3)
    for max_nodes in (1, 5, 16):
        asked = drafter(max_nodes=max_nodes, min_chance=0.05)
        begin(asked, [source.randrange(6) for _ in range(400)])
        proposal = step(asked)
        paths = reached(proposal)
        chances = [chance for _, chance in paths]
        assert 0 < len(paths) <= max_nodes and len({path for path, _ in paths}) == len(paths)
        assert chances == sorted(chances, reverse=True) and chances[-1] >= 0.05
        assert all(parent <= node for node, parent in enumerate(proposal.parents))


def test_what_is_copied_is_proposed_far_ahead() -> None:
    asked, text = drafter(), [*range(100, 160)]
    begin(asked, text)
    done, rounds = 0, 0
    while done < 50:
        paths = [path for path, _ in reached(step(asked))]
        right = max((len(path) for path in paths if list(path) == text[done : done + len(path)]), default=0)
        asked.correct(0, done, text[done : done + right + 1])
        done, rounds = done + right + 1, rounds + 1
    assert rounds <= 8


def test_a_copy_goes_on_behind_a_word_that_differs() -> None:
    asked, text = drafter(min_chance=0.01), [*range(100, 140)]
    begin(asked, text)
    asked.correct(0, 0, [100, 101])
    for number, token in enumerate([102, 7], 2):  # 7 in place of 103
        step(asked)
        asked.correct(0, number, [token])
    assert step(asked).token_ids[0] == 104


def test_what_is_proposed_stood_there_once() -> None:
    """Each pair of tokens, from the first proposal on; and a tenant's own, always."""
    source = random.Random(5)
    for seed in range(30):
        asked = drafter()
        texts = [[100 * tenant + source.randrange(12) for _ in range(300)] for tenant in range(2)]
        for tenant, text in enumerate(texts):
            begin(asked, text, tenant, tenant=str(tenant))
        for tenant, text in enumerate(texts):
            pairs = {*itertools.pairwise(text)}
            for path, _ in reached(step(asked, tenant)):
                assert {*itertools.pairwise([text[-1], *path])} <= pairs
            for start in range(20):
                asked.correct(tenant, start, [100 * tenant + seed % 12])
                assert {token // 100 for token in step(asked, tenant).token_ids} <= {tenant}


def test_one_request_learns_from_another_of_its_tenant_alone() -> None:
    asked, text = drafter(), [*range(50)]
    begin(asked, text, 0, tenant="one")
    asked.end(0)
    begin(asked, text[:5], 1, tenant="one")
    begin(asked, text[:5], 2, tenant="other")
    assert step(asked, 1).token_ids[:2] == (5, 6) and step(asked, 2).token_ids == ()
    asked.close()
    begin(asked, text[:5], 3, tenant="one")
    assert step(asked, 3).token_ids == () and asked.step([Budget(1)]) == []


def test_no_tenant_spoils_anothers_chances() -> None:
    """What never comes true for one is as likely as ever for the other."""
    spoilt, fresh, text = drafter(), drafter(), [*range(50)] * 2
    for number in range(50):
        begin(spoilt, text, tenant="one")
        assert step(spoilt).token_ids or number
        spoilt.correct(0, 0, [1000 + number])
    for asked in (spoilt, fresh):
        begin(asked, text, 1, tenant="other")
    assert step(spoilt, 1).scores == step(fresh, 1).scores != ()
    one, other = (spoilt._tenants.table(name).chances.values for name in ("one", "other"))
    assert one != other, "it learnt"


def test_corrections_may_come_twice_late_or_not_at_all() -> None:
    asked, other = drafter(), drafter()
    for each in (asked, other):
        begin(each, [*range(20)])
    asked.correct(0, 0, [1, 2])
    asked.correct(0, 0, [1, 2, 3])
    asked.correct(0, 5, [9])  # one before it was lost
    asked.correct(0, 3, [])
    asked.correct(7, 0, [1])
    asked.end(7)
    other.correct(0, 0, [1, 2, 3])
    told, plain = step(asked), step(other)
    assert (told.token_ids, told.applied_len) == (plain.token_ids, 3)
    assert told.token_ids[:1] == (4,) and step(asked).epoch == told.epoch + 1


def test_ahead_is_as_if_it_stood_there() -> None:
    asked, there = drafter(), drafter()
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    for each in (asked, there):
        begin(each, text)
    plain = step(asked)
    assumed = step(asked, ahead=(4, 5))
    there.correct(0, 0, [4, 5])
    real = step(there)
    assert (assumed.token_ids, assumed.parents, assumed.root) == (real.token_ids, real.parents, 0)
    assert (assumed.applied_len, real.applied_len) == (0, 2) and assumed.token_ids[0] == 6
    again = step(asked)
    assert (again.token_ids, again.scores) == (plain.token_ids, plain.scores), "nothing was written"
    step(asked, ahead=(4, 5))
    asked.correct(0, 0, [4, 5, 6, 7])
    assert step(asked).scores[0] > assumed.scores[0], "what came behind it was learnt"


def test_what_was_assumed_and_did_not_come_teaches_nothing() -> None:
    asked, other = drafter(), drafter()
    for each in (asked, other):
        begin(each, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert step(asked, ahead=(1, 2)).token_ids[0] == 3
    for each in (asked, other):
        each.correct(0, 0, [4, 5, 6, 7])
    assert step(asked, ahead=(1, 2)).scores == step(other, ahead=(1, 2)).scores


def test_chances_are_what_they_are_called() -> None:
    """On recorded answers, tenfold: of what is said to come so often, so much came."""
    stated, came, number = defaultdict[int, float](float), defaultdict[int, int](int), defaultdict[int, int](int)
    for traces in shipped().values():
        asked = drafter()
        for request_id, trace in enumerate(traces):
            begin(asked, trace.prompt_ids, request_id)
            for done in range(len(trace.token_ids)):
                for path, chance in reached(step(asked, request_id)):
                    if len(path) <= len(trace.token_ids) - done:
                        tenth = int(chance * 10)
                        stated[tenth] += chance
                        came[tenth] += trace.token_ids[done : done + len(path)] == path
                        number[tenth] += 1
                asked.correct(request_id, done, [trace.token_ids[done]])
            asked.end(request_id)
    assert sum(number.values()) > 5000 and len(number) == 10
    for tenth, count in number.items():
        assert abs(stated[tenth] - came[tenth]) / count < 0.08 + 1 / math.sqrt(count), tenth


# Bounds, and engines.


@pytest.mark.parametrize(("field", "value"), [("max_nodes", 0), ("min_chance", 0.0), ("max_nodes", "x")])
def test_options_have_bounds(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"{field} = .*must be a"):
        drafter(**{field: value})


@pytest.mark.parametrize("tenant", ["x" * 257, "a\0b", 5])
def test_names_of_tenants_have_bounds(tenant: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"tenant = .*at most 256 printable characters"):
        SamplingParams(tenant=tenant).check(Limits())
    with pytest.raises(InvalidInputError, match=r"max_ngram_bytes = 65535: .*between 65,536"):
        Limits(max_ngram_bytes=LEAST - 1)


@pytest.mark.usefixtures("one_thread")
def test_an_engine_drafts_from_its_tenants_texts(tiny_pairs: dict[str, tuple[str, str]]) -> None:
    target, _ = tiny_pairs["llama"]
    with Engine(EngineConfig(target, "ngram", dtype="float64")) as engine:
        asked = {name: SamplingParams(max_tokens=40, schedule="sequential", tenant=name) for name in ("one", "other")}
        plain = engine.submit([5, 6, 7], SamplingParams(max_tokens=40, schedule="plain")).result()
        done = [engine.submit([5, 6, 7], asked[name]).result() for name in ("one", "one", "other")]
    assert {each.token_ids for each in done} == {plain.token_ids}
    first, again, other = (each.stats.rounds for each in done)
    assert again < other and again < first


def test_the_tail_is_what_was_said_last() -> None:
    """Whatever pieces the text comes in, and wherever a page ends."""
    table, text, said, rng = Table(1 << 20), TextCursor(), list[int](), random.Random(0)
    while len(said) < 20 * PAGE:
        piece = [rng.randrange(1000) for _ in range(rng.choice((1, 2, 3, 4, 7, 9)) if said else 600)]
        table.write(text, piece)
        said += piece
        assert text.tail == said[-MAX_MATCH:]


def test_a_table_that_had_to_go_is_gone() -> None:
    """Also where a request of its tenant still runs."""
    asked = drafter(LEAST)
    begin(asked, range(100, 120), 1, "a")
    step(asked, 1)
    table = weakref.ref(asked._tenants.table("a"))
    for number in range(8):
        begin(asked, range(100, 1500), 2 + number, f"b{number}")
    assert table() is None
    asked.correct(1, 0, (5, 6))
    assert step(asked, 1).applied_len == 2
