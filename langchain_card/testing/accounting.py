"""`Ledger`: an independent count of what an engine proposes, verifies and accepts, to compare its statistics with."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import Self

from langchain_card.core import messages as m
from langchain_card.core.request import RequestStats
from langchain_card.engine.driver import Driver
from langchain_card.engine.engine import Engine
from langchain_card.testing.proposal_checks import Prefix, ProposalLog


@dataclass
class Account:
    """The counts of one request.

    Attributes:
        answer: tokens committed so far.
        proposed: proposed tokens by drafter, and by the text that they follow; restarts of a drafter included.
        logs: the present incarnation of each drafter, and its proposals.
        candidates: candidates received.
        rounds: windows with a verdict.
        verified: candidates in windows.
        accepted: accepted candidates by drafter.
    """

    answer: list[int] = field(default_factory=list)
    proposed: dict[str, dict[Prefix, set[int]]] = field(default_factory=dict)
    logs: dict[str, tuple[int, ProposalLog]] = field(default_factory=dict)
    candidates: int = 0
    rounds: int = 0
    verified: int = 0
    accepted: Counter[str] = field(default_factory=Counter)

    def was_proposed(self, prefix: Prefix, token: int, by: str | None = None) -> bool:
        """Return True if any drafter, or the drafter `by`, proposed the token after this very answer."""
        return any(token in tokens.get(prefix, ()) for name, tokens in self.proposed.items() if by in (None, name))


class Ledger:
    """Watches an engine and counts; `check` compares the counts with the engine's statistics.

    Args:
        vocab_size: of the target.

    Attributes:
        accounts: by request id.
        errors: what contradicts itself.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.accounts: dict[int, Account] = {}
        self.errors: list[str] = []

    @contextlib.contextmanager
    def watching(self, engine: Engine) -> Iterator[Self]:
        """Watch an engine that runs in this process, while the block runs."""
        driver = engine.backend
        assert isinstance(driver, Driver), "an isolated engine cannot be watched: its events are in another process"
        handle = driver.coordinator.handle

        def watched(event: m.Event) -> list[m.Effect]:
            if isinstance(event, m.Proposed):
                self._enter(event.proposal)
            effects = handle(event)
            for effect in effects:
                self._note(effect)
            return effects

        driver.coordinator.handle = watched  # type: ignore[method-assign]
        try:
            yield self
        finally:
            driver.coordinator.handle = handle  # type: ignore[method-assign]

    def check(self, request_id: int, stats: RequestStats) -> None:
        """Raise AssertionError if the statistics of a request that has ended differ from the counts."""
        assert not self.errors, "; ".join(self.errors[:3])
        account = self.accounts[request_id]
        counted = {
            "output_tokens": len(account.answer),
            "rounds": account.rounds,
            "verified": account.verified,
            "accepted": account.accepted.total(),
            "accepted_by_source": dict(account.accepted),
        }
        reported = {name: getattr(stats, name) for name in counted}
        assert reported == counted, f"the engine reports {reported}, but the ledger counted {counted}"
        assert stats.accepted <= stats.verified, f"accepted = {stats.accepted}, but verified = {stats.verified}"
        assert stats.accepted <= stats.output_tokens <= stats.accepted + stats.rounds, (
            f"output_tokens = {stats.output_tokens}: must be from accepted = {stats.accepted} to accepted + rounds = "
            f"{stats.accepted + stats.rounds}, because a round adds one token of the target's own at most"
        )
        assert 0 <= stats.dropped <= account.candidates, (
            f"dropped = {stats.dropped}, but only {account.candidates} candidates were proposed"
        )
        assert 0 <= stats.hits <= stats.rounds, f"hits = {stats.hits}, but rounds = {stats.rounds}"

    def _note(self, effect: m.Effect) -> None:
        match effect:
            case m.Begin(worker, request, _, output_ids, incarnation) if worker != m.TARGET:
                account = self.accounts.setdefault(request.request_id, Account(answer=[*output_ids]))
                log = ProposalLog(worker, request.request_id, self.vocab_size, output_ids)
                account.logs[worker] = incarnation, log
            case m.Verify(windows):
                for window in windows:
                    self._check_window(window)
            case m.Emit():
                self._commit(effect)

    def _enter(self, p: m.Proposal) -> None:
        account = self.accounts.get(p.request_id)
        incarnation, log = account.logs.get(p.source, (-1, None)) if account is not None else (-1, None)
        if account is None or log is None or incarnation != p.incarnation:
            return  # the request has ended, or the drafter was started again
        log.answer = account.answer
        before = log.count
        try:
            log.receive(p)
        except AssertionError as error:
            self.errors.append(f"{p.source} sent an invalid proposal: {error}")
        account.candidates += log.count - before
        proposed = account.proposed.setdefault(p.source, {})
        for prefix, children in log.children.items():
            proposed.setdefault(prefix, set()).update(children)

    def _check_window(self, window: m.Window) -> None:
        account = self.accounts[window.request_id]
        texts: list[Prefix] = [tuple(account.answer)]
        for parent, token in zip(window.parents[1:], window.token_ids[1:], strict=True):
            if not account.was_proposed(texts[parent], token):
                self.errors.append(f"token {token} is verified after {texts[parent]}, where no drafter proposed it")
            texts.append((*texts[parent], token))
        account.verified += len(texts) - 1

    def _commit(self, emit: m.Emit) -> None:
        account = self.accounts[emit.request_id]
        for token, source in zip(emit.token_ids, emit.sources, strict=True):
            if source:
                account.accepted[source] += 1
                if not account.was_proposed(tuple(account.answer), token, source):
                    self.errors.append(
                        f"token {token} after {account.answer} is attributed to {source}, which never proposed it there"
                    )
            account.answer.append(token)
        account.rounds += 1
