"""The tuning of peers: which settings are tried, the best is chosen, nothing is measured twice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.tune_peers import Tuning, key, tune
from langchain_card.bench.method import Method, Run
from langchain_card.bench.method_table import PEER_OPTIONS, PeerOptions
from langchain_card.errors import EngineError, InvalidInputError

IDS = {"code": [(1,), (2,), (3,)], "chat": [(4,), (5,), (6,)]}
GRID: list[PeerOptions] = [{"n": 1}, {"n": 2}, {"n": 3}]


class Setting:
    """A method whose speed is 10 times its option; the setting 0 fails."""

    name, weights = "llama-server", "none"

    def __init__(self, options: PeerOptions) -> None:
        self._options = options

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        if self._options["n"] == 0:
            raise EngineError("llama-server", "exit code 1", "its process ended")
        return Run(((1,) * max_tokens,), 0.1, 1.0, 10 * int(self._options["n"]))


class Starts:
    """The settings that were started, in order; optionally interrupted at one."""

    def __init__(self, stops: int = -1) -> None:
        self.seen, self._stops = list[object](), stops

    @contextlib.contextmanager
    def __call__(self, method: str, options: PeerOptions) -> Iterator[Method]:
        if len(self.seen) == self._stops:
            raise KeyboardInterrupt
        self.seen.append(options["n"])
        yield Setting(options)


def tuning(path: Path, starts: Starts, about: str = "here") -> Tuning:
    return Tuning(path, {"about": about}, IDS, 8, starts, lambda _: None)


def test_the_fastest_is_chosen_and_the_better_half_is_measured_again(tmp_path: Path) -> None:
    found = tuning(tmp_path / "tuned.json", starts := Starts())
    assert found.best("llama-server", [GRID[1], GRID[2], GRID[0]]) == {"n": 3}
    assert starts.seen == [2, 3, 1, 3, 2], "in the opposite order"
    assert found.score("llama-server", {"n": 2}) == pytest.approx(20) and found.score("llama-server", {"n": 9}) == 0
    header, first, *_, last = found.table()
    assert header == ("method", "options", "answers", "tokens/s", "code", "chat")
    assert first == ("llama-server", "n 3", "6", "30.0", "30.0", "30.0") and last[1:3] == ("n 1", "2")
    speeds = json.loads((tmp_path / "tuned.json").read_text())["speeds"]
    assert sorted(speeds[key("llama-server", {"n": 1})]) == ["chat 0", "code 0"]
    assert len(speeds[key("llama-server", {"n": 3})]) == 6, "each prompt once"


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    with pytest.raises(KeyboardInterrupt):
        tuning(file, first := Starts(stops=4)).best("llama-server", GRID)
    assert tuning(file, second := Starts()).best("llama-server", GRID) == {"n": 3}
    assert first.seen + second.seen == [1, 2, 3, 3, 2]
    assert tuning(file, third := Starts()).best("llama-server", GRID) == {"n": 3} and not third.seen
    with pytest.raises(InvalidInputError, match="under other conditions"):
        tuning(file, Starts(), "elsewhere")


def test_a_setting_that_fails_is_not_chosen(tmp_path: Path) -> None:
    found = tuning(tmp_path / "tuned.json", Starts())
    assert found.best("llama-server", [{"n": 0}, {"n": 1}]) == {"n": 1}
    with pytest.raises(InvalidInputError, match=r"failed with every setting.*process ended"):
        found.best("llama-server", [{"n": 0}])


def test_the_grid() -> None:
    """Each method is tried with its own options, few enough for 40 minutes, defaults among them."""
    tried: dict[str, list[PeerOptions]] = {}

    def last(method: str, grid: Sequence[PeerOptions]) -> PeerOptions:
        tried.setdefault(method, []).extend(grid)
        return next((options for options in reversed(grid) if {*options} == {*PEER_OPTIONS[method]}), grid[-1])

    found = tune([*PEER_OPTIONS], last)
    assert [*found] == [*PEER_OPTIONS] and sum(map(len, tried.values())) <= 60
    for method, grid in tried.items():
        assert len({key(method, options) for options in grid}) >= len(grid) - 1, "but the best draft, which is kept"
        same_options = [{*options} >= {*PEER_OPTIONS[method]} for options in grid]
        assert any(same_options), f"{method}: no setting has the options of the table"
    drafts = {(options["spec-draft-n-max"], options["spec-draft-p-min"]) for options in tried["llama-server-draft"]}
    assert len(drafts) == 15 and {options["flash-attn"] for options in tried["llama-server-draft"]} == {"on", "off"}
    both = tried["llama-server-both"][0]
    assert both["spec-draft-n-max"] == found["llama-server-draft"]["spec-draft-n-max"], "they build on the best draft"
    defaults = {"spec-ngram-mod-n-match": 24, "spec-ngram-mod-n-min": 48, "spec-ngram-mod-n-max": 64}
    assert any(defaults.items() <= options.items() for options in tried["llama-server-ngram"])


def test_only_what_is_wanted_is_tuned() -> None:
    assert [*tune(["llama-server-both"], lambda _, grid: grid[0])] == ["llama-server-both"]
    assert [*tune(["openvino-lookup"], lambda _, grid: grid[0])] == ["openvino-lookup"]
