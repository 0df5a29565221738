"""One pass of the target over several requests, put together from its verdicts: what the policy learns from."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Self

from langchain_card.core.controller import Load, Policy
from langchain_card.core.messages import Window


class Pass:
    """A pass under way.

    Args:
        windows: what is verified.
        load: what runs; None when the requests run under several schedules, of which nothing is learnt.
    """

    def __init__(self, windows: Sequence[Window] = (), load: Load | None = None) -> None:
        self._rows = sum(len(window.token_ids) for window in windows)
        self._open = {window.step_id for window in windows}
        self._load = load
        self._tokens, self._elapsed = 0, 0.0
        self._since: float | None = None
        self._apart = False

    def add(self, step_id: int, tokens: int, elapsed: float, since: float | None) -> Self:
        """One verdict committed `tokens` tokens; `since` is when its request's last one did."""
        if step_id in self._open:
            self._apart |= since is None or self._since not in (None, since)
            self._open.discard(step_id)
            self._since = since
            self._tokens, self._elapsed = self._tokens + tokens, self._elapsed + elapsed
        return self

    def tell(self, policy: Policy, now: float) -> None:
        """Tells the policy once all verdicts are there. A pass of which one was lost teaches nothing."""
        if self._open or self._load is None:
            return
        since_last = None if self._apart or self._since is None else now - self._since
        policy.saw_pass(self._load, self._rows, self._tokens, self._elapsed, since_last)
        self._load = None
