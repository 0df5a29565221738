"""`count_reachable`: a deterministic count of what Python objects keep alive, to find leaks with."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from typing import Any

import torch

_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytes, bytearray, str)
_SHARED = (types.ModuleType, type, types.CodeType, types.FrameType)


def count_reachable(drafter: Any) -> int:
    """Count the objects, entries of containers, numbers in tensors and bytes of arrays that a drafter can reach.

    Its classes and the globals of its module are included. The same calls give the same count, whatever the allocator
    does, which is not true of bytes.
    """
    classes = [vars(each) for each in type(drafter).__mro__ if each is not object]
    seen, count, todo = set[int](), 0, [drafter, *classes, vars(sys.modules[type(drafter).__module__])]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _SHARED):
            continue
        seen.add(id(value))
        count += 1
        if isinstance(value, torch.Tensor):
            count += value.numel()
        elif isinstance(value, _CONTAINERS):
            count += len(value)
        else:
            count += _num_bytes(value)
        if isinstance(value, types.FunctionType):
            todo += value.__closure__ or ()
        else:
            todo += gc.get_referents(value)
    return count


def _num_bytes(value: Any) -> int:
    """Return the bytes of an object with a buffer, such as an array; 0 for others."""
    try:
        with memoryview(value) as view:
            return view.nbytes
    except (TypeError, BufferError, ValueError):
        return 0
