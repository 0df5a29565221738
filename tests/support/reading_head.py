"""`ReadingHead`: a head beside a target of its own, which reads what the head is corrected with, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from langchain_card.core.messages import ROOT, Window
from langchain_card.core.request import Request
from langchain_card.drafters.head import HeadDrafter
from langchain_card.ports import Setting
from langchain_card.runtime.heads import ObservedRows, TargetView
from langchain_card.runtime.kv_cache import KVCache
from langchain_card.runtime.rows import Rows
from langchain_card.runtime.runner import ModelRunner
from langchain_card.runtime.taps import Taps

NUM_SCRATCH = 16


class ReadingHead(HeadDrafter):
    """A head whose target has chosen the last token of every text: as in an engine after a pass.

    Args:
        setting: without a target.
        model: the target.
        file: folder of the head.
    """

    def __init__(self, setting: Setting, model: Any, file: str) -> None:
        view = TargetView()
        view.model = model
        super().__init__(replace(setting, target=view), file=file)
        observer = view.observer
        assert observer is not None
        self._taps = Taps(model, observer.taps)
        self._target = ModelRunner(
            model,
            max_len=setting.max_len,
            num_scratch=NUM_SCRATCH + observer.num_scratch,
            num_seqs=setting.num_seqs,
            taps=self._taps,
            more_layers=observer.num_layers,
        )
        self._observer = observer
        observer.bind(self._target)
        self._texts: dict[int, tuple[KVCache, list[int], int]] = {}

    def begin(self, request: Request, output_ids: Sequence[int]) -> None:
        self.end(request.request_id)
        text, cache = [*request.prompt_ids, *output_ids], self._target.open()
        self._texts[request.request_id] = cache, text, len(request.prompt_ids)
        if len(text) > 2:
            rows = Rows(cache, text[:-2], 0)
            self._target.step([rows])
            self._observer.observe([ObservedRows(request.request_id, rows, text[1:-1])])
        self._read_window(request.request_id, text[-2:-1], text[-1:])
        super().begin(request, output_ids)

    def correct(self, request_id: int, start: int, token_ids: Sequence[int]) -> None:
        if request_id in self._texts:
            _, text, num_prompt = self._texts[request_id]
            new = token_ids[len(text) - num_prompt - start :]
            if new:
                self._read_window(request_id, [text[-1], *new[:-1]], new)
                text += new
        super().correct(request_id, start, token_ids)

    def _read_window(self, request_id: int, token_ids: Sequence[int], chosen: Sequence[int]) -> None:
        """Read a window that is a chain, of which the target chose everything."""
        cache, count = self._texts[request_id][0], len(token_ids)
        last = self._observer.windows.get(request_id)  # type: ignore[attr-defined]
        if last is not None:
            window = last.observed.window
            cache.keep([*range(len(window.token_ids))], window.token_ids)
        parents = (ROOT, *range(count - 1))
        window = Window(request_id, 0, cache.length, (*token_ids,), parents)
        rows = Rows(cache, token_ids, cache.length, [(*range(row + 1),) for row in range(count)])
        self._target.step([rows])
        self._observer.observe([ObservedRows(request_id, rows, chosen, window)])

    def end(self, request_id: int) -> None:
        self._observer.end(request_id)
        if request_id in self._texts:
            self._target.close(self._texts.pop(request_id)[0])
        super().end(request_id)

    def close(self) -> None:
        for request_id in [*self._texts]:
            self.end(request_id)
        self._taps.remove()
        super().close()
