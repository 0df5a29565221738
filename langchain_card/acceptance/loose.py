"""Loosely speculative decoding (FLy, arXiv 2511.22972): a lossy acceptance rule.

Suppose that the target would have chosen another token than the draft, but was in doubt, and agrees with all that the
draft proposes next. Then the draft's token is *rescued*: it stays in the answer instead of the target's own. Such an
answer is not what the target would have written. It reads well, but may have another meaning: type hints that the user
wanted are dropped where the code around them is the same (tests/acceptance/test_loose_real.py).

The paper and its released code differ, so both readings are here:

| | `paper` | `released` |
| --- | --- | --- |
| doubt | entropy divided by the logarithm of the vocabulary's size, 0 to 1 | in nats, of the three likeliest tokens |
| a window of W | W tokens after the mismatch | W - 1 tokens after it |

Nothing is rescued within the last W candidates of a path (j + W <= K). The authors' code samples two tokens at a time;
here a candidate must equal the target's one draw, keyed by seed and position. Three limits are additions of this
package:

- End-of-text tokens, control tokens, banned tokens and those with a negative bias are neither rescued nor replaced.
- Requests with a grammar, with stop strings or with log-probabilities are answered exactly.
- `top_k`, `top_p` and `min_p` restrict the target's choices only: a rescued token may be outside them.
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
"""Default doubt from which on a mismatch may be rescued."""

MEMORY = 512
"""Latest mismatches that the quantile is computed from; chosen to follow the text, and to be sorted quickly."""

FEWEST = 16
"""Mismatches before the first rescue by quantile; chosen so that a quantile has a meaning."""


class LooseRule:
    """Rescues candidates where the target was in doubt and agreed with the tokens after them.

    Args:
        setting: of the engine; its end-of-text and control tokens are never rescued or replaced.
        reading: `"released"` or `"paper"`.
        threshold: doubt from which on a candidate may be rescued; 0.3 by default. `Infinity` makes the rule exact.
        window: W, in tokens.
        quantile: instead of a threshold, the share of the latest mismatches with too little doubt, 0 to 1; 1 makes the
            rule exact.
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
        self._doubts: deque[float] = deque(maxlen=MEMORY)

    def copy(self) -> Self:
        """Return an independent copy."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._doubts = self._doubts.copy()
        return copied

    def measure(self, logits: Tensor) -> list[float]:
        """Return the target's doubt for each row, as the table above defines it.

        Args:
            logits: [rows, vocabulary], before penalties and temperature.
        """
        logprobs = logits.double().log_softmax(dim=-1)
        if self._reading == "released":
            logprobs = logprobs.topk(min(3, logits.shape[-1])).values
        doubt = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(dim=-1)  # tokens without a chance add nothing
        if self._reading == "paper":
            doubt /= math.log(logits.shape[-1])
        return list(doubt.tolist())

    def is_exact(self, request: Request) -> bool:
        """Return True for requests with a grammar, stop strings (none may be skipped) or log-probabilities."""
        params = request.params
        return bool(params.grammar or params.stop) or params.logprobs is not None

    def walk(self, window: Window, verdict: Verdict, request: Request) -> tuple[list[int], list[int]]:
        """Follow the candidates that the target chose, and rescued ones where it chose another token."""
        child, target_ids = children(window), verdict.target_ids
        agreed = {row: child[row, token] for row, token in enumerate(target_ids) if (row, token) in child}
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
        """Return the row of the likeliest candidate that may be rescued after a row; None if there is none."""
        disfavored = (token for token, bias in request.params.logit_bias if bias < 0)
        protected = self._special.union(request.eos_ids, request.params.banned_ids, disfavored)
        if not self._is_doubtful(verdict.measured[row]) or verdict.target_ids[row] in protected:
            return None
        candidates = (child for child, parent in enumerate(window.parents) if parent == row)
        free = (child for child in candidates if window.token_ids[child] not in protected)
        return next((child for child in free if self._agrees_after(window, child, agreed)), None)

    def _agrees_after(self, window: Window, row: int, agreed: dict[int, int]) -> bool:
        """Return True if W candidates follow on one path and the target chose them; `released` leaves the last open."""
        for _ in range(self._window - (self._reading == "released")):
            if row not in agreed:
                return False
            row = agreed[row]
        return self._reading == "paper" or row in window.parents

    def _is_doubtful(self, doubt: float) -> bool:
        """Return True if a mismatch has enough doubt: by threshold, or in comparison with the mismatches before it."""
        if self._quantile is None:
            return doubt >= self._threshold
        ordered = sorted(self._doubts)
        rank = int(self._quantile * len(ordered))
        self._doubts.append(doubt)
        return len(ordered) >= FEWEST and rank < len(ordered) and doubt >= ordered[rank]
