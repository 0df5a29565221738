"""The boundary to LangChain: errors leave as LangChain's own kinds, and a call may name another model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar, cast

from langchain_core import exceptions as core
from typing_extensions import Self

from langchain_card import errors
from langchain_card.errors import CARDError, restored

F = TypeVar("F", bound=Callable[..., Any])


_CORE_KINDS: Mapping[type[CARDError], type[Exception]] = {
    CARDError: core.ModelError,
    errors.InvalidInputError: core.ModelInvalidRequestError,
    errors.ContextOverflowError: core.ContextOverflowError,
    errors.UnknownModelError: core.ModelNotFoundError,
    errors.DownloadError: core.ModelConnectionError,
    errors.EngineError: core.ModelAPIError,
    errors.EngineBusyError: core.ModelRateLimitError,
    errors.EngineWaitError: core.ModelTimeoutError,
    errors.EngineClosedError: core.ModelError,
    errors.DeviceLostError: core.ModelError,
    errors.GenerationAbortedError: core.ModelError,
    errors.GenerationTimeoutError: core.ModelTimeoutError,
}
"""LangChain's class for each error; an error that is not listed has the class of its base."""


class Callee(Protocol):
    """The method of a chat model that `answering` needs."""

    def _for_call(self, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]: ...


def langchain_kind(kind: type[CARDError]) -> type[CARDError]:
    """Return a picklable subclass of `kind` and of its class in `_CORE_KINDS`, with the name of `kind`."""
    if kind not in _combined:
        _combined.setdefault(kind, kind if issubclass(kind, core.ModelError) else _combine(kind))
    return _combined[kind]


_combined: dict[type[CARDError], type[CARDError]] = {}


def _combine(kind: type[CARDError]) -> type[CARDError]:
    core_kind = next(_CORE_KINDS[base] for base in kind.__mro__ if base in _CORE_KINDS)

    def reduce(error: CARDError) -> tuple[Callable[..., CARDError], tuple[Any, ...]]:
        return _unpickled, (kind, error.args, error.__dict__)

    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": reduce}
    return type(kind.__name__, (kind, core_kind), namespace)


def _unpickled(kind: type[CARDError], args: tuple[Any, ...], state: Mapping[str, Any]) -> CARDError:
    return restored(langchain_kind(kind), args, state)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise this package's errors as instances of LangChain's kinds, too; traceback and cause stay."""
    try:
        yield
    except CARDError as error:
        raised = restored(langchain_kind(type(error)), error.args, error.__dict__)
        raise raised.with_traceback(error.__traceback__) from error.__cause__


def answering(method: F) -> F:
    """Wrap `_generate`, `_stream` or one of their async forms for LangChain.

    Errors pass through `langchain_errors`, and the method runs on the model that the call's options name (`_for_call`).
    """
    wrapped = next(wrap for matches, wrap in _WRAPPERS if matches(method))(method)
    return cast("F", functools.wraps(method)(wrapped))


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Callee, *args: Any, **options: Any) -> Any:
        with langchain_errors():
            model, rest = self._for_call(options)
            return method(model, *args, **rest)

    return call


def _coroutine(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: Callee, *args: Any, **options: Any) -> Any:
        with langchain_errors():
            model, rest = self._for_call(options)
            return await method(model, *args, **rest)

    return call


def _generator(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Callee, *args: Any, **options: Any) -> Iterator[Any]:
        with langchain_errors():
            model, rest = self._for_call(options)
            yield from method(model, *args, **rest)

    return call


def _async_generator(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: Callee, *args: Any, **options: Any) -> AsyncIterator[Any]:
        with langchain_errors():
            model, rest = self._for_call(options)
            async with aclosing(method(model, *args, **rest)) as items:
                async for item in items:
                    yield item

    return call


_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_WRAPPERS: tuple[tuple[Callable[[Any], bool], _Wrapper], ...] = (
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isgeneratorfunction, _generator),
    (callable, _plain),
)
