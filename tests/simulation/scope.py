"""What a simulated world holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from langchain_card.config import Limits, Schedule


@dataclass(frozen=True)
class Scope:
    """What a world holds and what may go wrong in it.

    Attributes:
        name: of the scope.
        requests: answers to be written.
        max_tokens: of each.
        drafters: at the tree.
        schedule: of every request; `"auto"` changes whenever one comes or goes (`toy.FixedPolicy`).
        vocab_size, top: of the toy model.
        limits: bounds.
        widths: draft steps granted with a correction.
        eos: token that ends a text; -1 for none.
        begun: tokens of each answer that are there when it arrives.
        unpaced: the last drafter is one that is asked in every round, as prompt lookup is.
        may_fail: whether what goes wrong may end a request with an error.
        one_reader: a consumer that fell behind reads on only when nobody else's answer is still to come.
        faults: how often each fault may strike: "kill", "kill target", "out of memory", "target out of memory", "lose",
            "repeat", "abort", "stop" (a stop string takes the last token back), "pause", "drain", "read on" (the target
            reads a piece of a text and answers the other windows).
    """

    name: str
    requests: int = 1
    max_tokens: int = 3
    drafters: int = 1
    schedule: Schedule = "parallel"
    vocab_size: int = 3
    top: float = 0.6
    seed: int = 0
    limits: Limits = field(
        default_factory=lambda: Limits(max_num_seqs=2, max_window=3, max_lead=3, max_tree_nodes=4, max_queue=2)
    )
    widths: tuple[int, ...] = (1,)
    eos: int = -1
    begun: int = 0
    unpaced: bool = False
    may_fail: bool = False
    one_reader: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)
