"""Loosely speculative decoding (FLy, arXiv 2511.22972): a lossy rule.

Where the target would have said another token than the draft, but was in doubt, and agrees with all that the draft
says next, the draft's token is *rescued*: it stays in the answer, in the place of the target's own. What comes of it
reads well and may say something else: type hints that were asked for are dropped where the code around them is the
same (tests/acceptance/test_loose_real.py). The answer is not what the target would have written.

Paper and released code differ, so both readings are here:

| | `paper` | `released` |
| --- | --- | --- |
| doubt | entropy over the logarithm of the vocabulary's size, 0 to 1 | in nats, of the three likeliest tokens alone |
| a window of W | W tokens after the mismatch | W - 1 tokens after it |

Nothing is rescued within the last W candidates of a path (j + W <= K). The authors' code draws two tokens where it
samples; here the target's own draw, keyed by seed and position, is what a candidate must equal. Ours, too: end of text
and control tokens, those that are banned and those with a negative bias are never rescued nor passed over, and requests
with a grammar or stop strings, and those that want log-probabilities, are answered exactly. `top_k`, `top_p` and
`min_p` bind the target's choices and no rescue: it may be a token that they rule out.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from typing_extensions import Self

from langchain_card.core.messages import Verdict, Window
from langchain_card.core.request import Request
from langchain_card.core.walk import children
from langchain_card.errors import InvalidInputError, check_choice, check_range
from langchain_card.ports import Setting
from langchain_card.text.control_tokens import control_tokens

if TYPE_CHECKING:
    from torch import Tensor

READINGS = ("paper", "released")
THRESHOLD = 0.3
MEMORY = 512
"""Mismatches that a quantile is taken of, the latest ones."""
FEWEST = 16
"""Mismatches before a quantile is known: until then the gate stays shut."""


class LooseRule:
    """Rescues candidates where the target was in doubt and then went along.

    Args:
        setting: whose end-of-text and control tokens are never touched.
        reading: `"released"` or `"paper"`.
        threshold: doubt from which on the gate is open; 0.3 by default. `Infinity` makes the rule exact.
        quantile: in its place, the share of the latest mismatches at which the gate stays shut, 0 to 1; 1 makes the
            rule exact.
        window: W, tokens.
    """

    name, lossy = "loose", True

    def __init__(
        self,
        setting: Setting,
        reading: str = "released",
        threshold: float | None = None,
        window: int = 6,
        quantile: float | None = None,
    ) -> None:
        check_choice("reading", reading, READINGS)
        check_range("window", window, 1, 1024, "tokens")
        if quantile is not None:
            check_range("quantile", quantile, 0.0, 1.0)
            if threshold is not None:
                raise InvalidInputError("threshold", threshold, "quantile says it already", "give one of the two")
        self._threshold = THRESHOLD if threshold is None else threshold
        check_range("threshold", self._threshold, 0.0, math.inf)
        self._reading, self._window, self._quantile = reading, window, quantile
        special = control_tokens(setting.tokenizer).ids if setting.tokenizer is not None else ()
        self._special = frozenset((*setting.eos_ids, *special))
        self._seen: deque[float] = deque(maxlen=MEMORY)

    def copy(self) -> Self:
        """An independent copy."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._seen = self._seen.copy()
        return copied

    def measure(self, logits: Tensor) -> list[float]:
        """How much in doubt the target is, by row: see the table above. Of the logits before penalties and temperature.

        Args:
            logits: [rows, vocabulary].
        """
        logprobs = logits.double().log_softmax(dim=-1)
        if self._reading == "released":
            logprobs = logprobs.topk(min(3, logits.shape[-1])).values
        doubt = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(dim=-1)  # what cannot be said adds nothing
        if self._reading == "paper":
            doubt /= math.log(logits.shape[-1])
        return list(doubt.tolist())

    def is_exact(self, request: Request) -> bool:
        """With a grammar, stop strings (none may be passed by) or log-probabilities."""
        params = request.params
        return bool(params.grammar or params.stop) or params.logprobs is not None

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """Follows the target's own tokens as far as they go, and a rescued candidate from there."""
        child, target_ids = children(window), verdict.target_ids
        agreed = {row: found for row, own in enumerate(target_ids) if (found := child.get((row, own))) is not None}
        exact = not verdict.measured or self.is_exact(request)
        row: int | None = 0
        rows: list[int] = []
        while row is not None:
            rows.append(row)
            here, row = row, agreed.get(row)
            if row is None and not exact and here in window.parents:
                row = self._rescued(window, verdict, request, here, agreed)
        return rows, [*(window.token_ids[row] for row in rows[1:]), target_ids[rows[-1]]]

    def _rescued(
        self, window: Window, verdict: Verdict, request: Request, row: int, agreed: dict[int, int]
    ) -> int | None:
        """The likeliest candidate after a row that may stay although the target chose another token; None for none."""
        unwanted = (token for token, bias in request.params.logit_bias if bias < 0)
        untouchable = self._special.union(request.eos_ids, request.params.banned_ids, unwanted)
        if not self._opens(verdict.measured[row]) or verdict.target_ids[row] in untouchable:
            return None
        candidates = (found for found, parent in enumerate(window.parents) if parent == row)
        free = (found for found in candidates if window.token_ids[found] not in untouchable)
        return next((found for found in free if self._goes_along(window, found, agreed)), None)

    def _goes_along(self, window: Window, row: int, agreed: dict[int, int]) -> bool:
        """Whether W candidates stand below a row on one path, and the target chose them all: the last perhaps not."""
        for _ in range(self._window - (self._reading == "released")):
            if row not in agreed:
                return False
            row = agreed[row]
        return self._reading == "paper" or row in window.parents

    def _opens(self, doubt: float) -> bool:
        """Whether a mismatch's doubt is large enough; by quantile, in comparison with those seen before it."""
        if self._quantile is None:
            return doubt >= self._threshold
        ordered = sorted(self._seen)
        rank = int(self._quantile * len(ordered))
        self._seen.append(doubt)
        return len(ordered) >= FEWEST and rank < len(ordered) and doubt >= ordered[rank]
