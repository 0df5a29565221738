"""The controller with several requests: whose candidates are verified, and when a draft reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from langchain_card.core.candidates import Frontier
from langchain_card.core.controller import FIRST_READ, Controller
from langchain_card.core.costs import Mean
from langchain_card.core.messages import Proposal
from langchain_card.core.policy import Load, TextStats
from langchain_card.core.request import Request, SamplingParams
from langchain_card.limits import Limits
from langchain_card.ports import Budget
from tests.simulation import ToyDrafter, ToyModel, ToyTarget
from tests.simulation.simulated import Simulation

TEXT = TextStats(hits=Mean(0.8), pace=Mean(1.0))
"""A text that no test changes."""


def in_batch(num_seqs: int, paces: Sequence[float], per_token: float = 0.025) -> tuple[Controller, list[TextStats]]:
    """A policy that saw passes of a batch: 0.1 s for a row each, 0.01 s more for each further row."""
    policy, load = Controller(shared_device=True), Load("sequential", num_seqs)
    texts = [TextStats(hits=Mean(0.9), pace=Mean(pace)) for pace in paces]
    for rows in (num_seqs, 2 * num_seqs):
        tokens = round(sum(paces))
        policy.observe_pass(load, texts, rows, tokens, 0.1 + 0.01 * (rows - num_seqs), tokens * per_token)
    return policy, texts


def test_candidates_of_the_slower_answer_are_worth_more() -> None:
    policy, (fast, slow) = in_batch(2, [4.0, 1.0])
    fast_width, slow_width = policy.windows(Load("sequential", 2), [fast, slow], [[0.4] * 3, [0.4] * 3])
    assert fast_width < slow_width == 3
    policy, texts = in_batch(2, [2.0, 2.0])
    widths = policy.windows(Load("sequential", 2), texts, [[0.9, 0.1], [0.9, 0.1]])
    assert widths == [1, 1], "equal answers have equal windows"


def test_a_token_of_a_batch_is_never_worth_more_than_a_plain_pass_has_for_each() -> None:
    """A batch that drafts at a loss would take its own slow tokens for dear ones, and go on."""
    policy, texts = in_batch(4, [1.0] * 4, per_token=0.2)
    assert policy.windows(Load("sequential", 4), texts, [[0.4]] * 4) == [0] * 4
    assert policy.windows(Load("sequential", 4), texts, [[0.9]] * 4) == [1] * 4


def test_a_draft_reads_in_a_batch_for_what_its_own_answer_saves() -> None:
    """What it saves its own answer is measured against the whole price of reading."""
    for unread, reads in ((20, True), (400, False)):
        policy, texts = in_batch(4, [1.0] * 4)
        load = Load("sequential", 4)
        policy.observe_draft_step(load, TEXT.copy(), 1, 1, 0.01, 1)
        policy.observe_draft_step(load, TEXT.copy(), 1, 4, 0.003, 1)
        for _ in range(2):
            policy.observe_reading(load, 100, 0.2)
        assert bool(policy.read_budget(load, texts[0], unread, 20, 100)) is reads


def test_what_nobody_knows_is_found_out_by_one_answer_alone() -> None:
    """Of sixteen, each would read its text to find out what drafts save."""
    for num_seqs, reads in ((1, True), (16, False)):
        policy, load = Controller(shared_device=True), Load("sequential", num_seqs)
        policy.observe_pass(load, [TEXT] * num_seqs, num_seqs, num_seqs, 0.1, None)
        for _ in range(2):
            policy.observe_reading(load, 100, 0.2)
        assert bool(policy.read_budget(load, TEXT, 60, 20, 100)) is reads


def test_requests_decide_together_on_a_draft_step_that_they_share() -> None:
    """A step of two takes 12 ms, one of one 10, and saves each 8: together it pays, and alone it does not."""
    policy, load = Controller(shared_device=True), Load("sequential", 2)
    for together, elapsed in ((1, 0.010), (2, 0.012)):
        policy.observe_draft_step(load, TEXT.copy(), together, together, elapsed, 1)
    for rows, elapsed in {2: 0.050, 4: 0.050, 8: 0.050}.items():
        policy.observe_pass(load, [TEXT, TEXT], rows, 2, elapsed, 0.050)
    policy.draft_hits = Mean(1.0)
    worth = Frontier([0.4], lead=policy.limits.max_lead)  # 0.4 tokens of 20 ms; no layer follows
    assert policy.draft_pays(load, [TEXT] * 2, [worth] * 2) == [True, True]
    assert policy.draft_pays(load, [TEXT], [worth]) == [False]
    less = worth._replace(chances=[0.05])
    assert policy.draft_pays(load, [TEXT] * 2, [less] * 2) == [False, False]


class SlowReader(ToyDrafter):
    """A drafter whose text is long, and that takes 10 ms to read one of its tokens."""

    tokens_read = 0

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Report what was read, and in which time."""
        proposals = [replace(proposal, reading=0.01 * proposal.read) for proposal in super().step(budgets)]
        self.tokens_read += sum(proposal.read for proposal in proposals)
        return proposals


def test_the_price_of_reading_is_found_out_by_two_answers_of_a_batch() -> None:
    """Reading all texts would take as long as a hundred tokens, before its price is known."""
    model = ToyModel(200)
    drafter = SlowReader(model, text=1000, step_time=lambda _: 0.01)
    target, policy, limits = ToyTarget(model, lambda rows: 0.1), Controller(shared_device=True), Limits(max_num_seqs=8)
    requests = [Request(i, (1, 2 + i), SamplingParams(max_tokens=30, schedule="sequential")) for i in range(8)]
    Simulation(target, drafter, policy, limits).run(requests)
    assert 0 < drafter.tokens_read <= 2 * FIRST_READ, "the first time is left out: it may have been cold"
