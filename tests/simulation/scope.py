"""`Scope`: the parameters of a simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from langchain_card.config import Schedule
from langchain_card.limits import Limits


@dataclass(frozen=True)
class Scope:
    """The contents of a world, and the faults in it.

    Attributes:
        name: of the scope.
        requests: number of requests.
        max_tokens: tokens of each answer, at most.
        drafters: number of drafters.
        schedule: of every request; `"auto"` changes whenever a request comes or goes (`toy.FixedPolicy`).
        turns: True if "auto" also changes after each pass of a request that runs alone.
        vocab_size: of the toy model.
        top: chance that the toy drafter's first candidate is right.
        seed: of the toy model.
        limits: bounds.
        widths: draft steps granted with a correction.
        eos: token that ends a text; -1 for none.
        begun: tokens of each answer that come with its request.
        reads_target: True if the last drafter reads the target, so that its steps are on the target's thread.
        last_paced: False if the last drafter is not paced, so that it works in every round, as prompt lookup does.
        last_from_model: False if the last drafter's scores are not a model's.
        text: tokens that each drafter reads before it drafts, one a step.
        may_fail: True if faults may end a request with an error.
        one_reader: True if a paused consumer resumes only when all other requests are paused or ended.
        faults: number of times each fault may occur: "kill", "kill target", "out of memory", "target out of memory",
            "lose", "repeat", "abort", "stop" (a stop string removes the last token), "pause", "drain", "read on" (the
            target reads a part of one text and verifies the other windows).
    """

    name: str
    requests: int = 1
    max_tokens: int = 3
    drafters: int = 1
    schedule: Schedule = "parallel"
    turns: bool = False
    vocab_size: int = 3
    top: float = 0.6
    seed: int = 0
    limits: Limits = field(
        default_factory=lambda: Limits(max_num_seqs=2, max_window=3, max_lead=3, max_tree_nodes=4, max_queue=2)
    )
    widths: tuple[int, ...] = (1,)
    eos: int = -1
    begun: int = 0
    reads_target: bool = False
    last_paced: bool = True
    last_from_model: bool = True
    text: int = 0
    may_fail: bool = False
    one_reader: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)
