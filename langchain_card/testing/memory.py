"""How much Python objects hold: their number, what lies in them, and all that can be reached from there."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from typing import Any

import torch

_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytes, bytearray, str)
_SHARED = (types.ModuleType, type, types.CodeType, types.FrameType)


def held(drafter: Any) -> int:
    """Objects, entries of containers, numbers in tensors and bytes of arrays that a drafter can reach.

    It is asked itself, and so are its classes and its module's globals.

    It is a count, not bytes: the same calls give the same number, whatever the allocator does.
    """
    classes = [vars(each) for each in type(drafter).__mro__ if each is not object]
    seen, count, todo = set[int](), 0, [drafter, *classes, vars(sys.modules[type(drafter).__module__])]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        count += 1
        if isinstance(one, torch.Tensor):
            count += one.numel()
        elif isinstance(one, _CONTAINERS):
            count += len(one)
        else:
            count += _num_bytes(one)
        if isinstance(one, types.FunctionType):
            todo += one.__closure__ or ()
        else:
            todo += gc.get_referents(one)
    return count


def _num_bytes(one: Any) -> int:
    """Of what keeps numbers side by side, as arrays do."""
    try:
        with memoryview(one) as view:
            return view.nbytes
    except (TypeError, BufferError, ValueError):
        return 0
