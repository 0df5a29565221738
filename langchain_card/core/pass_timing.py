"""Target passes over several requests, put together from their verdicts, for the policy to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_card.core.messages import Verdict, Window
from langchain_card.core.policy import Load, Policy, TextStats


class Passes:
    """The target's passes, one after another.

    Args:
        policy: observes each pass.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._load: Load | None = None
        self._texts: Sequence[TextStats] = ()
        self._rows = self._tokens = 0
        self._elapsed = 0.0
        self._open: set[int] = set()
        self._last_end: float | None = None

    def begin(self, windows: Sequence[Window], texts: Sequence[TextStats], load: Load | None) -> None:
        """Begin a pass over `windows`, those of `texts`.

        Nothing is learned from a pass under several schedules (`load=None`: it is no single load), nor from an earlier
        pass that lost a verdict.
        """
        if self._open:
            self.interrupt()
        self._load, self._texts = load, texts
        self._rows = sum(len(window.token_ids) for window in windows)
        self._open = {window.step_id for window in windows}
        self._tokens, self._elapsed = 0, 0.0

    def interrupt(self) -> None:
        """Note that idle time, or work that is no decoding, lies between the last pass and the next one."""
        self._last_end = None

    def add(self, verdict: Verdict, tokens: int, now: float) -> None:
        """Add a verdict that committed `tokens` tokens. The last one ends the pass.

        A pass that also read a prompt is not observed.
        """
        if verdict.step_id not in self._open:
            return
        self._open.discard(verdict.step_id)
        self._tokens, self._elapsed = self._tokens + tokens, self._elapsed + verdict.elapsed
        if self._open:
            return
        if self._load is not None and not verdict.read:
            since_last = None if self._last_end is None else now - self._last_end
            self._policy.observe_pass(self._load, self._texts, self._rows, self._tokens, self._elapsed, since_last)
        self._last_end = now
