"""What tests do first in an engine's process on simulated devices (`simulated_cuda(prepare=...)`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from langchain_card.engine import build
from langchain_card.engine.target_worker import TargetWorker
from langchain_card.runtime.kv_cache import KVCache
from tests.support.placed import policy

MARK = "CARD_TEST_MARK"
"""Variable that names a file: while it exists, `lose_the_device` applies."""

PASSES = 4
"""Passes that a target has before it loses its device."""


def draft_always() -> None:
    """Draft at any price, in an isolated engine."""
    build.Controller = policy  # type: ignore[assignment, misc]


def keep_on_another_stream() -> None:
    """Plant a copy of kept rows that does not wait for the step that computed them."""
    keep = KVCache.keep

    def early(cache: KVCache, *rows: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            keep(cache, *rows)

    KVCache.keep = early  # type: ignore[method-assign]


def lose_the_device() -> None:
    """Let all passes of an isolated engine fail after the first few, as after an illegal access; draft always."""
    draft_always()
    mark, passes, verify = Path(os.environ[MARK]), list[int](), TargetWorker._verify

    def fails(worker: TargetWorker) -> Any:
        passes.append(len(passes))
        if len(passes) > PASSES and mark.exists():
            mark.write_text(str(len(passes)))
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return verify(worker)

    TargetWorker._verify = fails  # type: ignore[method-assign]
