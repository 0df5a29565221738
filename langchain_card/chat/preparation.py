"""`prepared`: prompts become token ids on threads, and short ones never wait for long ones.

Only the count of their characters, which decides about that, is made on the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from langchain_card.text.prompt import PIECE_CHARS

T = TypeVar("T")

Lane = Literal["load", "short", "long"]
_NUM_THREADS: dict[Lane, int] = {"load": 4, "short": 4, "long": 1}


@functools.cache
def _threads(lane: Lane, process_id: int) -> ThreadPoolExecutor:
    """Return the threads of a lane; a forked process has its own."""
    return ThreadPoolExecutor(max_workers=_NUM_THREADS[lane], thread_name_prefix=f"card-{lane}")


async def prepared(call: Callable[[], T], num_chars: int, *, is_loaded: bool = True) -> T:
    """Run a call that prepares a prompt on a thread, in the caller's context.

    Args:
        call: tokenizes, among other things.
        num_chars: characters of the text, counted by the caller; long texts are tokenized one at a time.
        is_loaded: False if the call will load a model; calls do not wait for other models to load.
    """
    lane: Lane = "load" if not is_loaded else "long" if num_chars > PIECE_CHARS else "short"
    run = functools.partial(contextvars.copy_context().run, call)
    return await asyncio.get_running_loop().run_in_executor(_threads(lane, os.getpid()), run)
