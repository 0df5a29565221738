"""The explored worlds: small enough for all their states, and large enough for every pair of events."""

from __future__ import annotations

from dataclasses import replace

from langchain_card.limits import Limits
from tests.simulation import FixedPolicy, Scope

SMALL = Limits(max_num_seqs=2, max_window=3, max_lead=2, max_tree_nodes=3, max_queue=2)
POLICY = FixedPolicy()
PATIENT = replace(SMALL, max_failures=9)
WIDE = Limits(max_num_seqs=2, max_window=4, max_lead=3, max_tree_nodes=5, max_queue=2)

EXHAUSTIVE = [
    Scope("two requests", requests=2, max_tokens=3, limits=SMALL),
    Scope("two drafters", drafters=2, limits=SMALL),
    Scope("a draft dies and comes back", max_tokens=5, faults={"kill": 2}, limits=WIDE),
    Scope("a draft dies between two steps", max_tokens=5, top=0.9, widths=(1, 1), faults={"kill": 1}, limits=WIDE),
    Scope("the target dies and comes back", max_tokens=4, faults={"kill target": 2}, limits=PATIENT),
    Scope("answers that were begun elsewhere", requests=2, max_tokens=4, begun=2, faults={"kill": 1}, limits=SMALL),
    Scope("end of text", requests=2, max_tokens=3, eos=0, limits=SMALL, last_paced=False, last_from_model=False),
    Scope("scores of a model at no cost", drafters=2, max_tokens=2, last_paced=False, limits=SMALL),
    Scope("steps that cost, scores of no model", drafters=2, max_tokens=2, last_from_model=False, limits=SMALL),
    Scope("a stop string", max_tokens=4, faults={"stop": 1, "kill": 1}, limits=SMALL),
    Scope("a consumer leaves", requests=2, max_tokens=2, faults={"abort": 1}, limits=SMALL),
    Scope("long texts", requests=2, max_tokens=2, faults={"read on": 2}, limits=SMALL),
    Scope("drafts read a text", requests=2, max_tokens=2, text=1, faults={"lose": 1}, limits=SMALL),
    Scope("drafts read a text, one round at a time", max_tokens=5, text=2, schedule="sequential", faults={"kill": 1}),
    Scope("a long text is left", requests=2, max_tokens=2, faults={"read on": 1, "abort": 1}, limits=SMALL),
    Scope("a slow consumer", requests=2, max_tokens=2, faults={"pause": 1}, limits=SMALL),
    Scope(
        "out of memory",
        requests=2,
        max_tokens=2,
        faults={"target out of memory": 2, "out of memory": 1},
        may_fail=True,
        limits=SMALL,
    ),
    Scope("lost and repeated messages", max_tokens=5, faults={"lose": 1, "repeat": 1}, limits=SMALL),
    Scope("one after the other", max_tokens=6, schedule="sequential", faults={"kill": 1, "lose": 1}, limits=WIDE),
    Scope("schedules change", requests=2, max_tokens=3, schedule="auto", faults={"kill": 1}, limits=SMALL),
    Scope("a schedule changes within an answer", max_tokens=5, schedule="auto", turns=True, limits=WIDE),
    Scope("it changes, and messages are lost", schedule="auto", turns=True, faults={"lose": 1}),
    Scope("it changes, and a draft dies", max_tokens=4, schedule="auto", turns=True, faults={"kill": 1}, limits=SMALL),
    Scope(
        "schedules change and messages are lost",
        requests=2,
        max_tokens=2,
        schedule="auto",
        faults={"lose": 1, "repeat": 1},
        limits=SMALL,
    ),
    Scope(
        "one reader for two answers",
        requests=2,
        max_tokens=2,
        faults={"pause": 2},
        one_reader=True,
        limits=Limits(max_num_seqs=1, max_window=2, max_lead=2, max_tree_nodes=3, max_queue=2),
    ),
    Scope(
        "workers that are given up",
        requests=2,
        max_tokens=2,
        faults={"kill": 2, "kill target": 2},
        may_fail=True,
        limits=Limits(max_num_seqs=1, max_window=2, max_lead=1, max_tree_nodes=2, max_queue=2, max_deaths=1),
    ),
    Scope("a drafter reads the target", max_tokens=5, reads_target=True, faults={"kill": 1, "lose": 1}, limits=WIDE),
    Scope("two requests, it reads the target", requests=2, max_tokens=3, reads_target=True, limits=SMALL),
    Scope("it reads the target, schedules change", schedule="auto", turns=True, reads_target=True, limits=SMALL),
    Scope("draining", requests=2, max_tokens=2, faults={"drain": 1, "kill": 1}, may_fail=True, limits=SMALL),
]

LARGE = (
    "two drafters",
    "a draft dies between two steps",
    "the target dies and comes back",
    "a long text is left",
    "out of memory",
    "lost and repeated messages",
    "one after the other",
    "schedules change and messages are lost",
    "workers that are given up",
)
"""Names of the exhaustive worlds that have more than 12,000 states: two minutes together."""


def named(name: str) -> Scope:
    """Return the exhaustive world of this name."""
    return next(scope for scope in EXHAUSTIVE if scope.name == name)


BIG = [
    Scope("two requests, longer", requests=2, max_tokens=4, limits=SMALL),
    Scope("two drafters, one dies", drafters=2, max_tokens=3, faults={"kill": 1}, limits=SMALL),
    Scope("two requests, the target dies", requests=2, max_tokens=3, faults={"kill target": 1}, limits=PATIENT),
    Scope(
        "long texts, the target dies", requests=2, max_tokens=2, faults={"read on": 2, "kill target": 1}, limits=SMALL
    ),
    Scope("all at once", max_tokens=4, faults={"kill": 1, "kill target": 1, "lose": 1, "abort": 1}, limits=SMALL),
    Scope("two requests, messages lost", requests=2, max_tokens=2, faults={"lose": 1, "repeat": 1}, limits=SMALL),
    *(
        replace(named(name), name=f"{name}, one dies", max_tokens=3, faults={"kill": 1})
        for name in ("scores of a model at no cost", "steps that cost, scores of no model")
    ),
]

LONG = [
    *(replace(scope, name=f"{scope.name}, text {seed}", seed=seed) for scope in EXHAUSTIVE for seed in (1, 2)),
    *(replace(scope, name=f"{scope.name}, text {seed}", seed=seed) for scope in BIG for seed in (0, 1, 2)),
]


def long_text(seed: int, *, schedule: str = "parallel") -> Scope:
    """Return a world for one random run: several requests, two drafters, every fault several times."""
    faults = dict.fromkeys(("kill", "kill target", "out of memory", "pause", "read on"), 3)
    faults |= {"target out of memory": 1, "lose": 10, "repeat": 10, "abort": seed % 2, "drain": 0}
    limits = Limits(max_num_seqs=2, max_window=6, max_lead=6, max_tree_nodes=24, max_queue=4, max_failures=9)
    return Scope(
        f"long text {seed}", requests=3, max_tokens=60, drafters=2, schedule=schedule,  # type: ignore[arg-type]
        vocab_size=5, top=(0.3, 0.6, 0.9)[seed % 3], seed=seed, limits=limits, widths=(1, 1, 2, 2), faults=faults,
        turns=schedule == "auto",
    )  # fmt: skip
