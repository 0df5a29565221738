"""The planner: as good as trying everything, and its figures come true on a virtual clock."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from langchain_card.bench import measure_stacks
from langchain_card.bench.bounds import Measured
from langchain_card.bench.measure_stacks import verdict
from langchain_card.bench.plan import Case, Edge, Plan, best_plans, rank_stacks, refined
from langchain_card.cli import main
from langchain_card.config import EngineConfig
from langchain_card.core.controller import Controller
from langchain_card.core.request import Request, SamplingParams
from langchain_card.drafters.lower_level import LowerLevel
from langchain_card.limits import Limits, Pins
from tests.simulation import ToyDrafter, ToyTarget
from tests.simulation.simulated import simulate
from tests.support import tiny


def rising(first: float, more: float) -> Callable[[float], float]:
    return lambda rows: first * (1 + more * (rows - 1))


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    count = draw.choice((3, 4))
    costs = [*sorted(draw.uniform(0.0, 1.0) ** 2 for _ in range(count - 1)), 1.0]
    curves = [rising(cost, draw.choice((0.0, 0.05, 0.3))) for cost in costs]
    edges = {}
    for pair in itertools.combinations(range(count), 2):
        chances = [draw.uniform(0.1, 0.98) for _ in range(9)]
        edges[pair] = Edge(tuple(itertools.accumulate(chances, lambda a, b: a * b)))
    return Case([f"m{i}" for i in range(count)], curves, edges, max_block=draw.randint(1, 8))


def brute_force(case: Case) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Every stack, every block size, by the formula as it is written in the paper."""
    found = []
    for count in range(case.target + 1):
        for lower in itertools.combinations(range(case.target), count):
            levels = (*lower, case.target)
            for blocks in itertools.product(range(1, case.max_block + 1), repeat=count):
                seconds = case.costs[levels[0]](1)
                for i, n in enumerate(blocks):
                    edge = case.edges[levels[i], levels[i + 1]]
                    expected = 1 + sum(edge.reach[k] for k in range(n))
                    seconds = (n * seconds + case.costs[levels[i + 1]](n + 1)) / expected
                found.append((seconds, levels, blocks))
    return sorted(found)


def test_planner_equals_brute_force() -> None:
    kinds = set[int]()
    for seed in range(1000):
        case = random_case(seed)
        wanted, got = brute_force(case), best_plans(case)
        assert [plan.seconds for plan in got] == pytest.approx(
            [seconds for seconds, *_ in wanted[: len(got)]], rel=1e-12
        )
        assert (got[0].levels, got[0].blocks) == wanted[0][1:] or wanted[1][0] == pytest.approx(wanted[0][0], rel=1e-9)
        kinds.add(len(got[0].levels))
    assert kinds >= {1, 2, 3, 4}, "some speculate, some do not, some have several levels"


def test_the_choice_is_the_best_of_all_by_whole_steps() -> None:
    """What is counted is what the engine does, and blocks are looked for by the formula: that costs little."""
    worse = []
    for seed in range(0, 60, 2):
        case = replace(random_case(seed), max_block=4)
        every = [refined(case, Plan(0.0, levels, blocks)) for _, levels, blocks in brute_force(case)]
        worse.append(rank_stacks(case)[0].seconds / min(every).seconds)
    assert min(worse) > 1 - 1e-9 and max(worse) < 1.03
    assert sum(each < 1.0001 for each in worse) > 0.9 * len(worse)


def test_the_verdict_is_what_was_measured() -> None:
    slow, fast, faster = Measured(0.8, 0.7, 0.9), Measured(1.5, 1.4, 1.6), Measured(1.8, 1.7, 1.9)
    assert verdict({"a": slow}).startswith("Do not speculate")
    assert verdict({"a": fast, "b": faster}) == "The fastest: b."
    assert "too close to tell from a " in verdict({"a": replace(fast, high=1.75), "b": faster})
    assert "from plain decoding" in verdict({"a": Measured(1.1, 0.9, 1.3)})
    unsure = verdict({"a": Measured(0.95, 0.8, 1.1), "b": slow})
    assert unsure == "The fastest: plain decoding; but too close to tell from a with so few prompts."


def test_intervals_hold_the_mean() -> None:
    seen = Measured.of([0.9, 1.0, 1.1, 1.2, 1.8])
    assert seen.low < seen.value == pytest.approx(1.2) and 1.2 < seen.high < 1.8
    assert Measured.of([1.5, 1.5]) == Measured(1.5, 1.5, 1.5)


class Chain:
    """Each level says what the one above says, with its own chance, after every prefix."""

    def __init__(self, chances: Sequence[float], seed: int = 0) -> None:
        self._chances, self._seed = chances, seed
        self.token = functools.lru_cache(maxsize=1 << 18)(self._token)

    def _token(self, prefix: tuple[int, ...], level: int) -> int:
        draw = random.Random(hash((self._seed, level, *prefix[-12:], len(prefix))))
        if level == len(self._chances):
            return draw.randrange(1000)
        above = self.token(prefix, level + 1)
        return above if draw.random() < self._chances[level] else (above + 1 + draw.randrange(998)) % 1000

    def target_token(self, prefix: tuple[int, ...]) -> int:
        return self.token(prefix, len(self._chances))

    def candidates(self, prefix: tuple[int, ...], source: int = 1) -> tuple[tuple[int, float], ...]:
        return ((self.token(prefix, source), -0.01),)


def played(chances: Sequence[float], curves: Sequence[Callable[[float], float]], blocks: Sequence[int]) -> float:
    """Seconds per token of the real coordinator over the real stack, on a virtual clock."""
    script, lower = Chain(chances), None
    for level, (curve, block) in enumerate(zip(curves[:-1], blocks, strict=True)):
        drafter = ToyDrafter(script, number=level, step_time=curve, lower=lower, num_slots=64)
        lower = LowerLevel(drafter, block)
    lead = blocks[-1]
    policy = Controller(True, Limits(), Pins(draft_width=1, lead=lead, window=lead + 1))
    params = SamplingParams(max_tokens=1500, schedule="sequential")
    tokens, stats = simulate(Request(0, (1,), params, ()), ToyTarget(script, curves[-1]), drafter, policy, Limits())
    return (stats.ended - stats.started) / len(tokens)


GRID = [
    (chances, costs, more, blocks)
    for chances, costs, blocks in [
        ((0.5,), (0.2, 1.0), (2,)),
        ((0.9,), (0.1, 1.0), (6,)),
        ((0.8,), (0.001, 1.0), (8,)),
        ((0.6, 0.8), (0.001, 0.3, 1.0), (4, 4)),
        ((0.9, 0.9), (0.001, 0.2, 1.0), (6, 8)),
        ((0.4, 0.7), (0.001, 0.3, 1.0), (3, 2)),
        ((0.8, 0.9), (0.1, 0.3, 1.0), (3, 6)),
        ((0.7, 0.8, 0.9), (0.001, 0.1, 0.3, 1.0), (4, 3, 6)),
        ((0.5, 0.9, 0.7), (0.001, 0.05, 0.2, 1.0), (2, 4, 4)),
    ]
    for more in (0.0, 0.1)
]


@pytest.mark.parametrize(("chances", "costs", "more", "blocks"), GRID)
def test_figures_come_true_on_a_virtual_clock(
    chances: tuple[float, ...], costs: tuple[float, ...], more: float, blocks: tuple[int, ...]
) -> None:
    curves = [rising(cost, more) for cost in costs]
    levels = tuple(range(len(costs)))
    edges = {(i, i + 1): Edge.of(chance) for i, chance in enumerate(chances)}
    plan = refined(Case([*map(str, levels)], curves, edges), Plan(0.0, levels, blocks))
    seen = played(chances, curves, blocks)
    assert plan.seconds == pytest.approx(seen, rel=0.1)


def test_it_says_when_nothing_pays() -> None:
    for cost, chance in ((0.9, 0.5), (1.0, 0.99)):
        case = Case(["draft", "target"], [rising(cost, 0.0), rising(1.0, 0.0)], {(0, 1): Edge.of(chance)})
        assert rank_stacks(case)[0].levels == (1,)
    case = Case(["draft", "target"], [rising(0.9, 0.0), rising(1.0, 0.0)], {(0, 1): Edge.of(0.99)})
    assert rank_stacks(case)[0].levels == (0, 1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_the_command_measures_plans_and_measures_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.08)
    pair = ["--model", target, "--draft-model", draft, "--lower", "ngram", "--count", "2", "--max-tokens", "48"]
    assert main(["plan", *pair, "--json", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "predicted, times plain decoding" in said and "predicted and measured" in said
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [level["name"] for level in found["inputs"]["levels"]] == ["ngram", draft, target]
    agreed = {(edge["lower"], edge["upper"]): edge["reach"][0] for edge in found["inputs"]["edges"]}
    assert 0.1 < agreed[draft, target] < 1.0
    assert {tuple(row["stack"]) for row in found["stacks"]} == {
        (target,), (draft, target), ("ngram", target), ("ngram", draft, target)
    }  # fmt: skip
    measured = [row["measured"] for row in found["stacks"] if row["measured"] is not None]
    assert len(measured) == 2 and all(each["low"] <= each["value"] <= each["high"] for each in measured)
    assert any(verdict in said for verdict in ("The fastest: ", "Do not speculate: "))
    copied = said[said.index("as run") :].splitlines()[1]
    assert isinstance(eval(f"EngineConfig({copied})", {"EngineConfig": EngineConfig, "Pins": Pins}), EngineConfig)
    assert main(["plan", "--costs", str(tmp_path / "plan.json")]) == 0, "planned again from its own figures"
    again = capsys.readouterr().out
    assert (
        again[again.index("predicted, times") :].splitlines()[:6]
        == said[said.index("predicted, times") :].splitlines()[:6]
    )


@pytest.mark.usefixtures("one_thread")
def test_answers_shorter_than_a_block_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is known then, and that is another thing than that nothing pays."""
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.08)
    pair = ["--model", target, "--draft-model", draft, "--count", "1", "--max-tokens", "16"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure_stacks, "DEPTH", 17)
        assert main(["plan", *pair]) == 2
    error = capsys.readouterr().err
    assert "none has 17 tokens, a block" in error and "Hint" in error


def test_the_command_plans_from_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of 2.8's table: a draft that costs 0.32, candidates taken with 0.91, 0.45 of the lookup's."""
    edges = [
        {"lower": "lookup", "upper": "draft", "chance": 0.45},
        {"lower": "lookup", "upper": "target", "chance": 0.45},
        {"lower": "draft", "upper": "target", "chance": 0.91},
    ]
    rows = [
        {"name": name, "seconds": {"1": seconds}} for name, seconds in (("lookup", 0), ("draft", 0.32), ("target", 1))
    ]
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"levels": rows, "edges": edges}))
    assert main(["plan", "--costs", str(file)]) == 0
    said = capsys.readouterr().out
    assert "1.85  target asks draft for" in said
    assert "Fastest as predicted: target asks draft for 8, which asks lookup for 8." in said
    for edge in edges:
        edge["chance"] = 0.1
    rows[2]["seconds"] = {"1": 1.0, "9": 9.0}
    file.write_text(json.dumps({"levels": rows, "edges": edges}))
    assert main(["plan", "--costs", str(file)]) == 0
    assert "As predicted, do not speculate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("[]", "cannot be read"),
        ('{"levels": [{"name": "a", "seconds": {"2": 1}}], "edges": []}', "begin with one row"),
        ('{"levels": [{"name": "a", "seconds": {"1": 0}}], "edges": []}', "the target the last"),
        (
            '{"levels": [{"name": "a", "seconds": {"1": 1}}, {"name": "b", "seconds": {"1": 1}}],'
            ' "edges": [{"lower": "a", "upper": "b", "chance": 1.5}]}',
            "between 0 and 1",
        ),
    ],
)
def test_figures_that_cannot_be_read_are_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "figures.json").write_text(text)
    assert main(["plan", "--costs", str(tmp_path / "figures.json")]) == 2
    assert said in (error := capsys.readouterr().err) and "figures.json" in error and "Hint" in error


def test_the_command_looks_before_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--count", "0"]) == 2
    assert main(["plan", "--acceptance", "loose"]) == 2
    assert "lossy" in capsys.readouterr().err
    assert main(["plan", "--json", "nowhere/plan.json"]) == 2
    assert "mkdir -p nowhere" in capsys.readouterr().err
    assert main(["plan", "--draft-transport", "process"]) == 2
    assert "has nothing below the draft" in capsys.readouterr().err
    assert main(["plan", "--draft-model", "ngram", "--lower", "smollm2-135m"]) == 2
    assert "works below a draft model" in capsys.readouterr().err
