"""`NgramDrafter`: proposes what followed the same tokens before.

It is Cacheback (arXiv 2511.21699) with the long matches of prompt lookup decoding. All prompts and answers of a tenant
go into the tenant's table, and stay there for later requests. What followed the last tokens of a request becomes a
trie. The chances of its nodes are learnt from the tenant's requests, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_card.core.messages import Proposal
from langchain_card.core.request import Request
from langchain_card.drafters.ngram.frozen import FrozenTable
from langchain_card.drafters.ngram.table import MAX_MATCH, Tenants, TextCursor
from langchain_card.drafters.ngram.trie import Trie
from langchain_card.errors import InvalidInputError, check_range
from langchain_card.ports import Budget, Setting


@dataclass(slots=True)
class _OpenRequest:
    """The state of a request.

    Attributes:
        tenant: of the request.
        text: its text in the tenant's table.
        num_output: tokens of the answer so far.
        place: of the last token in the text that is followed; negative if none is.
        epoch: of the last proposal.
        trie: the last proposal's, until the next tokens are known.
        ahead: tokens that the trie assumes before it.
    """

    tenant: str
    text: TextCursor = field(default_factory=TextCursor)
    num_output: int = 0
    place: int = -1
    epoch: int = -1
    trie: Trie | None = None
    ahead: tuple[int, ...] = ()


class NgramDrafter:
    """Drafts from the text of earlier requests. A step costs microseconds, so it works in every round.

    Args:
        setting: of the engine; `limits.max_ngram_bytes` bounds all tenants' tables together.
        table: file of a frozen table (`langchain-card ngrams`), used where it is surer than the tenant's own text.
        max_nodes: nodes of a proposal at most.
        min_chance: nodes with a smaller chance of being reached are not proposed.

    Raises:
        InvalidInputError: an option is out of bounds, or the file cannot be used with this target.
    """

    name = "ngram"
    paced = False
    trusted = True
    looks_ahead = True

    def __init__(self, setting: Setting, *, table: str = "", max_nodes: int = 16, min_chance: float = 0.08) -> None:
        check_range("max_nodes", max_nodes, 1, 1024)
        check_range("min_chance", min_chance, 0.001, 1.0)
        if not isinstance(table, str):
            raise InvalidInputError("table", table, "must be the path of a file", f"write ./{table}")
        self._max_nodes, self._min_chance = max_nodes, min_chance
        self._frozen = FrozenTable(table, setting) if table else None
        self._tenants = Tenants(setting.limits.max_ngram_bytes)
        self._requests: dict[int, _OpenRequest] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants' tables."""
        return self._tenants.num_bytes

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        """Enter the text so far into the tenant's table."""
        opened = self._requests[request.request_id] = _OpenRequest(request.params.tenant)
        opened.num_output = len(output_ids)
        self._tenants.table(opened.tenant).write(opened.text, [*request.prompt_ids, *output_ids])

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        """Learn from the last trie, and enter the new tokens."""
        opened = self._requests.get(request_id)
        if opened is None or opened.num_output < start:
            return  # unknown, or an earlier correction was lost: the next one repeats it
        if new := token_ids[opened.num_output - start :]:
            opened.num_output += len(new)
            self._learn(opened, tuple(new))
            self._tenants.table(opened.tenant).write(opened.text, new)

    def step(self, budgets: Sequence[Budget]) -> list[Proposal]:
        """Propose a new trie for each known request; nodes of earlier ones are repeated."""
        return [self._propose(budget) for budget in budgets if budget.request_id in self._requests]

    def end(self, request_id: int) -> None:
        """Free the request; its text stays in the tenant's table."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """Free everything."""
        self._requests.clear()
        self._tenants.clear()

    def _propose(self, budget: Budget) -> Proposal:
        opened = self._requests[budget.request_id]
        tail = [*opened.text.tail, *budget.ahead][-MAX_MATCH:]
        place = opened.place + len(budget.ahead) if opened.place >= 0 else -1
        table = self._tenants.table(opened.tenant)
        trie = Trie(table.chances, place)
        trie.grow(table, self._frozen, tail, self._max_nodes, max(self._min_chance, budget.min_chance))
        opened.trie, opened.ahead = trie, budget.ahead
        opened.epoch += 1
        return Proposal(
            source=self.name,
            request_id=budget.request_id,
            epoch=opened.epoch,
            root=0,
            applied_len=opened.num_output,
            first=1,
            parents=tuple(trie.parents),
            token_ids=tuple(trie.tokens),
            scores=tuple(map(math.log, trie.chances)),
        )

    def _learn(self, opened: _OpenRequest, token_ids: tuple[int, ...]) -> None:
        trie, ahead = opened.trie, opened.ahead
        opened.trie = None
        if trie is not None and token_ids[: len(ahead)] == ahead:
            opened.place = trie.learn(token_ids[len(ahead) :])
        elif opened.place >= 0:
            opened.place += len(token_ids)
