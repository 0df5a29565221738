"""Passes of the target over several requests, put together from their verdicts: what the policy learns from."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_card.core.messages import Verdict, Window
from langchain_card.core.policy import Load, Policy


class Passes:
    """One pass after another.

    Args:
        policy: told of each.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._load: Load | None = None
        self._requests = self._rows = self._tokens = 0
        self._elapsed = 0.0
        self._open: set[int] = set()
        self._last_end: float | None = None

    def begin(self, windows: Sequence[Window], load: Load | None) -> None:
        """A pass over `windows`; of one under several schedules, which is no single load, nothing is learnt.

        Nor is anything of a pass before it of which a verdict was lost.
        """
        if self._open:
            self.interrupt()
        self._load, self._requests = load, len(windows)
        self._rows = sum(len(window.token_ids) for window in windows)
        self._open = {window.step_id for window in windows}
        self._tokens, self._elapsed = 0, 0.0

    def interrupt(self) -> None:
        """Something that is no decoding lies between the last pass and the end of the next: idleness."""
        self._last_end = None

    def add(self, verdict: Verdict, tokens: int, now: float) -> None:
        """One verdict committed `tokens` tokens; the last one ends the pass. One that read a text teaches nothing."""
        if verdict.step_id not in self._open:
            return
        self._open.discard(verdict.step_id)
        self._tokens, self._elapsed = self._tokens + tokens, self._elapsed + verdict.elapsed
        if self._open:
            return
        if self._load is not None and not verdict.read:
            since_last = None if self._last_end is None else now - self._last_end
            self._policy.saw_pass(self._load, self._requests, self._rows, self._tokens, self._elapsed, since_last)
        self._last_end = now
