"""`langchain-card bench --load`: so many requests at once, real peers, honest figures."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from langchain_card.bench.load import Cell, LoadResults, keep_busy, laps, lengths, measure_load, table, times_plain
from langchain_card.bench.method import Served
from langchain_card.bench.method_table import LOAD_SETS
from langchain_card.bench.prompts import named_sets
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError
from langchain_card.limits import Pins
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[1, 2], [3, 4], [5, 6]]


class Scripted:
    """A method whose answers take as long as it is told."""

    def __init__(self, name: str, seconds: float, *, fails: bool = False, order: list[str] | None = None) -> None:
        self.name, self.weights, self.calls = name, "none", list[tuple[int, int, str]]()
        self.limits = list[list[int]]()
        self._seconds, self._fails, self._order = seconds, fails, [] if order is None else order

    def serve(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], requests: int, tenant: str
    ) -> list[Served]:
        self.calls.append((len(prompts), requests, tenant))
        self.limits.append([*max_tokens])
        self._order.append(self.name)
        if self._fails:
            raise EngineError(self.name, requests, "failed on purpose")
        return [Served((7,) * 10, i, i + 0.5, i + self._seconds) for i, _ in enumerate(prompts)]


def test_so_many_are_in_work_at_once_and_all_are_answered() -> None:
    lock, at_once, most = threading.Lock(), 0, 0

    def answer(prompt: Sequence[int]) -> Served:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1
        return Served(tuple(prompt), 0.0, 0.0, 1.0)

    answers = keep_busy(answer, 3, [[i] for i in range(9)])
    assert [answer.token_ids for answer in answers] == [(i,) for i in range(9)] and most == 3


def test_a_set_that_is_smaller_than_the_load_is_answered_again_by_another_tenant() -> None:
    plain, card = Scripted("plain", 2.0), Scripted("card", 1.0)
    results = LoadResults({"plain": "none", "card": "none"})
    measure_load(results, [plain, card], {"code": PROMPTS}, [1, 4], 10, lambda _: None)
    calls = [call for call in card.calls if "warm-up" not in call[2]]
    assert [(answers, count) for answers, count, _ in calls] == [(3, 1), (3, 1), (10, 4), (11, 4)]
    assert len({tenant for *_, tenant in calls}) == 4
    assert [*laps([*PROMPTS, *PROMPTS[:2]])] == [0, 0, 0, 1, 1], "no text is known before"
    times = times_plain(results, "code", 4, "card")
    assert times is not None and times.value == pytest.approx(2.0)
    header, *lines = table(results)
    assert header[:3] == ("text", "at once", "plain, tokens/s") and len(lines) == 2
    assert lines[1][-1] == "21 of 21" and lines[0][-2] == "10.0"


def test_answers_end_at_different_lengths_the_same_for_each_method() -> None:
    limits = lengths(20, 128)
    assert min(limits) < 70 and max(limits) == 128 and sum(limits) / 20 == pytest.approx(96, abs=4)
    assert min(abs(a - b) for a, b in itertools.pairwise(limits)) > 10
    plain, card = Scripted("plain", 2.0), Scripted("card", 1.0)
    measure_load(LoadResults({"plain": "", "card": ""}), [plain, card], {"code": PROMPTS}, [2], 10, lambda _: None)
    assert plain.limits == card.limits and [*itertools.chain(*plain.limits[1:])] == lengths(12, 10)


def test_methods_take_turns_in_a_load() -> None:
    order = list[str]()
    methods = [Scripted("plain", 2.0, order=order), Scripted("card", 1.0, order=order)]
    measure_load(LoadResults({"plain": "none", "card": "none"}), methods, {"code": PROMPTS}, [2], 10, lambda _: None)
    assert order[-4:] in (["plain", "card", "card", "plain"], ["card", "plain", "plain", "card"])


def test_the_speed_of_a_load_is_that_of_all_requests_together() -> None:
    """Count the first 5 s of one turn and the first second of the other: then a single answer is left."""
    first = Served((1,) * 30, 1.0, 2.0, 4.0), Served((1,) * 20, 1.0, 1.5, 6.0), Served((1,) * 20, 4.0, 4.25, 9.0)
    last = Served((1,) * 10, 10.0, 10.5, 11.0), Served((1,) * 10, 10.0, 11.5, 12.0)
    cell = Cell("code", 2, "card", (first, last))
    assert cell.speed == pytest.approx((30 + 20 + 1 + 19 * 1.75 / 4.75 + 10) / (5 + 1))
    assert cell.slowest == pytest.approx(20 / 5) and len(cell.answers) == 5


def test_a_method_that_fails_is_left_out_and_plain_is_not() -> None:
    results = LoadResults({"plain": "none", "card": "none"})
    measure_load(results, [Scripted("plain", 1.0), Scripted("card", 1.0, fails=True)], {"a": PROMPTS}, [1], 8, print)
    assert "failed on purpose" in results.failed["card"] and [cell.method for cell in results.cells] == ["plain"]
    assert "" in [*table(results)][1]
    with pytest.raises(EngineError, match="failed on purpose"):
        measure_load(results, [Scripted("plain", 1.0, fails=True)], {"a": PROMPTS}, [1], 8, print)


def test_shipped_sets_have_twenty_prompts_of_one_kind() -> None:
    found = named_sets(LOAD_SETS, 20)
    texts = [text for rows in found.values() for text in rows]
    assert {*map(len, found.values())} == {20} and len({*texts}) == len(texts)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = tiny.make_target("llama", (folder := tmp_path_factory.mktemp("pair")) / "target")
    draft = tiny.make_draft(target, folder / "draft", noise=0.02)
    return EngineConfig(target, draft, dtype="float64", pins=Pins(lead=3, window=4))


def test_the_command_measures_and_writes(
    pair: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--model", pair.model, "--draft-model", str(pair.draft_model), "--dtype", "float64"]
    files = ["--json", str(tmp_path / "cells.json"), "--plot", str(tmp_path / "cells.png")]
    sets = ["--prompts", "code", "chat", "--count", "3", "--max-tokens", "12"]
    assert main(["bench", "--load", "1", "3", *own, *sets, *files]) == 0
    said = capsys.readouterr()
    assert "| chat | 3 " in said.out and said.out.count("6 of 6") == 2 and said.out.count("15 of 15") == 2
    assert "code, 3 at once, card" in said.err and "8 rows are in" in said.err
    written = json.loads((tmp_path / "cells.json").read_text())
    assert len(written["cells"]) == 8 and written["prompts"] == ["code", "chat"]
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--load", "0"], "--load"),
        (["--load", "--batch", "4"], "does not go with --load"),
        (["--load", "--context", "64"], "does not go with --context"),
        (["--load", "--methods", "hf-generate"], "does not go with --load"),
        (["--load", "--count", "21"], "not 21"),
        (["--prompts", "code", "chat"], "several go with --load"),
    ],
)
def test_the_command_looks_before_it_works(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err
