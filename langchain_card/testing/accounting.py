"""The books of an engine: what was proposed, verified, accepted and counted, entered as it happens."""

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
from langchain_card.testing.proposal_checks import Heard, Prefix


@dataclass
class Account:
    """One request's.

    Attributes:
        answer: committed so far.
        proposed: by drafter, what it has said in all its lives, by the text under which it said so.
        forwarded: candidates that drafts expanded.
        candidates, dropped: that came; that were not entered.
        rounds, verified: windows, and candidates in them.
        accepted: by drafter.
        hits: rounds whose last token was a candidate already.
    """

    answer: list[int] = field(default_factory=list)
    proposed: dict[str, dict[Prefix, set[int]]] = field(default_factory=dict)
    heard: dict[str, tuple[int, Heard]] = field(default_factory=dict)
    candidates: int = 0
    rounds: int = 0
    verified: int = 0
    accepted: Counter[str] = field(default_factory=Counter)

    def was_proposed(self, prefix: Prefix, token: int, by: str | None = None) -> bool:
        """Whether some drafter, or this one, has proposed the token after this very answer."""
        return any(token in said.get(prefix, ()) for name, said in self.proposed.items() if by in (None, name))


class Ledger:
    """Watches an engine while the block runs; `check` compares what it counted with what the engine did.

    Args:
        vocab_size: of the target.

    Attributes:
        accounts: by request id.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.accounts: dict[int, Account] = {}
        self.wrong: list[str] = []

    @contextlib.contextmanager
    def watching(self, engine: Engine) -> Iterator[Self]:
        """Enters all that happens in the engine, which runs in this process."""
        driver = engine.backend
        assert isinstance(driver, Driver), "an isolated engine keeps its books elsewhere"
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
        """Raises AssertionError where the engine's figures of a request that ended are not those of the books."""
        assert not self.wrong, "; ".join(self.wrong[:3])
        own = self.accounts[request_id]
        counted = {
            "output_tokens": len(own.answer),
            "rounds": own.rounds,
            "verified": own.verified,
            "accepted": own.accepted.total(),
            "accepted_by_source": dict(own.accepted),
        }
        told = {name: getattr(stats, name) for name in counted}
        assert told == counted, f"the engine counts {told}, the books say {counted}"
        assert stats.accepted <= stats.verified, f"{stats.accepted} accepted of {stats.verified} verified"
        assert stats.accepted <= stats.output_tokens <= stats.accepted + stats.rounds, (
            f"{stats.output_tokens} tokens: each round gives one of the target's own at most, beside what was accepted"
        )
        assert 0 <= stats.dropped <= own.candidates, f"{stats.dropped} of {own.candidates} candidates dropped"
        assert 0 <= stats.hits <= stats.rounds

    def _note(self, effect: m.Effect) -> None:
        match effect:
            case m.Begin(worker, request, _, output_ids, incarnation) if worker != m.TARGET:
                account = self.accounts.setdefault(request.request_id, Account(answer=[*output_ids]))
                heard = Heard(worker, request.request_id, self.vocab_size, output_ids)
                account.heard[worker] = incarnation, heard
            case m.Verify(windows):
                for window in windows:
                    self._check_window(window)
            case m.Emit():
                self._commit(effect)

    def _enter(self, p: m.Proposal) -> None:
        account = self.accounts.get(p.request_id)
        incarnation, heard = account.heard.get(p.source, (-1, None)) if account is not None else (-1, None)
        if account is None or heard is None or incarnation != p.incarnation:
            return  # of a request that has ended, or began anew
        heard.answer = account.answer
        before = heard.count
        try:
            heard.hear(p)
        except AssertionError as error:
            self.wrong.append(f"{p.source} proposed what makes no sense: {error}")
        account.candidates += heard.count - before
        said = account.proposed.setdefault(p.source, {})
        for prefix, children in heard.children.items():
            said.setdefault(prefix, set()).update(children)

    def _check_window(self, window: m.Window) -> None:
        account = self.accounts[window.request_id]
        texts: list[Prefix] = [tuple(account.answer)]
        for parent, token in zip(window.parents[1:], window.token_ids[1:], strict=True):
            if not account.was_proposed(texts[parent], token):
                self.wrong.append(f"{token} is verified after {texts[parent]}, where no drafter proposed it")
            texts.append((*texts[parent], token))
        account.verified += len(texts) - 1

    def _commit(self, emit: m.Emit) -> None:
        account = self.accounts[emit.request_id]
        for token, source in zip(emit.token_ids, emit.sources, strict=True):
            if source:
                account.accepted[source] += 1
                if not account.was_proposed(tuple(account.answer), token, source):
                    self.wrong.append(
                        f"{token} after {account.answer} is said to be {source}'s, which never proposed it"
                    )
            account.answer.append(token)
        account.rounds += 1
