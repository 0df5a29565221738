"""Teams of threads that share the work of compiled code.

Each thread that calls compiled code has helpers, which run the same function on their shares. During a call they wait
for each other awake, at first without giving their core away, and sleep only between calls. GNU OpenMP's threads either
keep a core for milliseconds while they wait, so that two processes side by side were up to 90 times slower than one; or
they sleep after microseconds, which took a third of a step (docs/LOG.md).
"""

from __future__ import annotations

import os
import platform
import threading
import weakref
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from langchain_card.runtime.cpu.compiled import Slots, compiled
from langchain_card.runtime.cpu.vectors import I32, I64, Builder, intrinsic
from langchain_card.runtime.threads import used_threads

_SPINS = 200
"""Looks at a place in memory, some 5 microseconds, before a thread that waits gives its core to others each time."""

_PATIENCE = 20_000
"""Looks after which a helper sleeps until the next call."""

_JOB, _FUNCTION, _ARGUMENTS, _THREADS, _DONE, _STATE, _FAILED, _SIZE = 0, 1, 2, 3, 8, 9, 10, 16
"""A helper's integers: what its caller writes, and in a cache line of their own what both write.

Number of its job; address of the function, and of its arguments; number of threads; number of the job that it has done;
its state; and whether that job failed."""

_ASLEEP, _FREE, _HELD = 0, 1, 2
"""States: it sleeps; it may go to sleep; it must stay awake until the call ends."""

Team: TypeAlias = Slots
"""The integers of the helpers that a call may use: [helpers, `_SIZE`]."""

_ALONE = np.zeros((0, _SIZE), np.int64)
_own = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _own.__dict__.clear())  # a fork has no helpers


class _Helpers:
    """The helpers of one thread; they end with it.

    Attributes:
        slots: their integers, [helpers, `_SIZE`].
        held: whether a call uses them.
    """

    def __init__(self, count: int) -> None:
        raw = np.zeros(count * _SIZE + 8, np.int64)
        skip = -raw.ctypes.data // 8 % 8
        self.slots: Slots = raw[skip : skip + count * _SIZE].reshape(count, _SIZE)
        self.held = False
        self._wake = [threading.Semaphore(0) for _ in range(count)]
        over = threading.Event()
        for number, (slot, wake) in enumerate(zip(self.slots, self._wake, strict=True), start=1):
            given = slot, number, wake, over
            threading.Thread(target=_serve, args=given, name=f"card-helper-{number}", daemon=True).start()
        weakref.finalize(self, _end, os.getpid(), over, self._wake)

    def hold(self, count: int) -> Slots:
        """Keep some helpers awake; return their integers."""
        slots = self.slots[:count]
        for i in range(count):
            if _hold(slots, i) == _ASLEEP:
                self._wake[i].release()
        return slots


def _serve(slot: Slots, number: int, wake: threading.Semaphore, over: threading.Event) -> None:
    while True:
        wake.acquire()
        if over.is_set():
            return
        _help(slot, number)


def _end(process: int, over: threading.Event, wake: list[threading.Semaphore]) -> None:
    if os.getpid() != process:
        return  # a fork has no helpers, and one may have held a lock
    over.set()
    for each in wake:
        each.release()


class cores:
    """A context that gives compiled code a team of the calling thread's number of threads (`threads.use_threads`).

    The value is the team for functions of `together`: [helpers, `_SIZE`].
    """

    def __enter__(self) -> Slots:
        count = used_threads() - 1
        if not count:
            self._slots = _ALONE
            return _ALONE
        helpers: _Helpers | None = getattr(_own, "helpers", None)
        if helpers is None or len(helpers.slots) < count:
            helpers = _own.helpers = _Helpers(count)
        assert not helpers.held, "a call within a call would let helpers of the outer one sleep"
        helpers.held = True
        self._slots = helpers.hold(count)
        return self._slots

    def __exit__(self, *_: object) -> None:
        if len(self._slots):
            _own.helpers.held = False
            _free(self._slots)


def together(body: Any) -> Any:
    """Return a function for compiled code that runs a compiled function on all threads of a team.

    Args:
        body: its last two arguments are the number of the thread, from 0, and of all threads.

    Returns:
        A function of a team and a tuple of the other arguments.
    """

    @intrinsic
    def run(context: Any, team: Any, arguments: Any) -> Any:
        def call(arguments: Any, thread: int, threads: int) -> None:
            body(*(arguments + (thread, threads)))  # noqa: RUF005 - what numba understands

        def generate(context: Any, b: Any, signature: Any, given: Any) -> Any:
            kinds = types.void(arguments, types.int64, types.int64)
            name = b.module.get_unique_name(f"card.{body.__name__}")
            share = ir.Function(b.module, ir.FunctionType(I64, [I64] * 3), name)
            share.linkage = "internal"
            own = ir.IRBuilder(share.append_basic_block())
            pointer = own.inttoptr(share.args[0], context.get_value_type(arguments).as_pointer())
            callee = context.compile_subroutine(own, call, kinds).fndesc
            given_share = [own.load(pointer), *share.args[1:]]
            status, _ = context.call_internal_no_propagate(own, callee, kinds, given_share)
            own.ret(own.zext(status.is_error, I64))
            keep: Any = cgutils.alloca_once_value
            place = keep(b, _borrow(context, b, arguments, given[1]))
            addresses = (b.ptrtoint(pointed, I64) for pointed in (share, place))
            whole = types.void(team, types.int64, types.int64)
            context.compile_internal(b, _share, whole, [given[0], *addresses])
            return context.get_dummy_value()

        return types.void(team, arguments), generate

    return run


def _borrow(context: Any, b: Any, kind: Any, value: Any) -> Any:
    """Return a value with arrays whose users are not counted: those of the caller live longer than a call.

    All threads would write to the same counters at each look at a row of a matrix, which took a tenth of a step.
    """
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, b, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        unpack: Any = cgutils.unpack_tuple
        kinds: Any = kind
        parts = unpack(b, value, len(kinds))
        return context.make_tuple(b, kind, [_borrow(context, b, *own) for own in zip(kinds, parts, strict=True)])
    return value


def _share(team: Slots, function: int, arguments: int) -> None:
    """Run a function on all threads; raise MemoryError if one of them raised an error.

    What compiled code allocates is all that can fail in it.
    """
    threads = len(team) + 1
    for i in range(len(team)):
        team[i, _FUNCTION], team[i, _ARGUMENTS], team[i, _THREADS] = function, arguments, threads
        _store(team[i].ctypes.data + 8 * _JOB, team[i, _JOB] + 1)
    failed = _call(function, arguments, 0, threads)
    for i in range(len(team)):
        waited = 0
        while _load(team[i].ctypes.data + 8 * _DONE) != team[i, _JOB]:
            waited += 1
            _pause(waited)
        failed |= team[i, _FAILED]
    if failed:
        raise MemoryError("compiled code found no memory for its scratch")


@compiled()
def _help(slot: Slots, thread: int) -> None:
    """Run functions until none has come for a while and none is announced."""
    place, done, waited = slot.ctypes.data, slot[_DONE], 0
    while True:
        if _load(place + 8 * _JOB) != done:
            slot[_FAILED] = _call(slot[_FUNCTION], slot[_ARGUMENTS], thread, slot[_THREADS])
            done, waited = done + 1, 0
            _store(place + 8 * _DONE, done)
        else:
            waited += 1
            _pause(waited)
            if waited > _PATIENCE and _replace(place + 8 * _STATE, _FREE, _ASLEEP):
                return


@compiled()
def _hold(team: Slots, i: int) -> int:
    """Announce functions to a helper; return its state before."""
    before: int = _swap(team[i].ctypes.data + 8 * _STATE, _HELD)
    return before


@compiled()
def _free(team: Slots) -> None:
    for i in range(len(team)):
        _store(team[i].ctypes.data + 8 * _STATE, _FREE)


@intrinsic
def _load(context: Any, address: Any) -> Any:
    """Load an integer that another thread writes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(context: Any, address: Any, value: Any) -> Any:
    """Store an integer after all that was written before."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _replace(context: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace an integer if it has a value; return whether it had."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(place, args[1], args[2], "acq_rel", "monotonic"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _swap(context: Any, address: Any, new: Any) -> Any:
    """Replace an integer; return what it was."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(context: Any, function: Any, arguments: Any, thread: Any, threads: Any) -> Any:
    """Call a function that `together` wrote by its address; return 1 if it raised an error, else 0."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 3)
        return b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def _pause(context: Any, waited: Any) -> Any:
    """Let the core's other hardware thread work or, after a while, other threads of the machine."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        with b.if_else(b.icmp_signed("<", args[0], I64(_SPINS))) as (soon, later):
            with soon:
                if platform.machine() in ("x86_64", "AMD64"):
                    Builder(b).call("llvm.x86.sse2.pause", ir.VoidType())
            with later:
                if os.name == "posix":
                    Builder(b).call("sched_yield", I32)
        return context.get_dummy_value()

    return types.void(types.int64), generate
