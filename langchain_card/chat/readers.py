"""Event streams that are simply dropped: `stream_events(version="v3")` and its async twin, read in part.

LangChain's stream, what produces it and its projections (`.text`, `.output`, ...) refer to one another: dropped, they
live until a garbage collection, and an async one goes on to the end. What a caller gets here are doubles of them, to
which nothing refers but the caller. With the last of them the consumer is gone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.language_models.chat_model_stream import AsyncChatModelStream, ChatModelStream
from langchain_core.language_models.chat_models import BaseChatModel
from typing_extensions import Self, override

from langchain_card.engine.generation import Generation
from langchain_card.errors import GenerationAbortedError

if TYPE_CHECKING:
    from langchain_core.language_models.chat_model_stream import (
        AsyncProjection,
        AsyncTextProjection,
        SyncProjection,
        SyncTextProjection,
    )

T = TypeVar("T")


class Consumer:
    """Whoever reads an answer, or those of a batch; `leave` ends them.

    Attributes:
        generations: which write the answers, each from when it is one of the engine's requests.
    """

    def __init__(self) -> None:
        self._left = False
        self.generations: list[Generation] = []

    def reads(self, generation: Generation) -> None:
        """An answer begins; at once ended when its consumer left before."""
        self.generations.append(generation)
        if self._left:
            self.leave()

    def leave(self) -> None:
        """Called on any thread, when nothing of the stream is left."""
        self._left = True
        for generation in [*self.generations]:
            generation.abort(GenerationAbortedError("request", generation.request.request_id, "its reader has left"))


class EventStreams(BaseChatModel):
    """Streams of `v3` events whose answer ends when they are dropped."""

    def for_consumer(self, consumer: Consumer) -> Self:
        """This model, as one consumer reads it: it tells the consumer of the answer that it begins."""
        raise NotImplementedError

    @override
    def stream_events(self, input: Any, config: Any = None, *, version: Any = "v2", **kwargs: Any) -> Any:
        if version != "v3":
            return super().stream_events(input, config, version=version, **kwargs)
        reader = self.for_consumer(consumer := Consumer())
        return _watched(super(EventStreams, reader).stream_events(input, config, version="v3", **kwargs), consumer)

    @override
    def astream_events(self, input: Any, config: Any = None, *, version: Any = "v2", **kwargs: Any) -> Any:
        if version != "v3":
            return super().astream_events(input, config, version=version, **kwargs)
        reader = self.for_consumer(consumer := Consumer())
        events = super(EventStreams, reader).astream_events(input, config, version="v3", **kwargs)

        async def stream() -> AsyncChatModelStream:
            return _watched(await events, consumer)

        return stream()


def _watched(stream: T, consumer: Consumer) -> T:
    """The stream's double: the consumer leaves when it and all that came of it are gone."""
    kind: Any = _AsyncStream if isinstance(stream, AsyncChatModelStream) else _Stream
    handle = kind.__new__(kind)
    handle.__dict__ = stream.__dict__
    weakref.finalize(handle, consumer.leave).atexit = False
    whole: T = handle
    return whole


class _Stream(ChatModelStream):
    __slots__ = ()

    @property
    @override
    def text(self) -> SyncTextProjection:
        part: SyncTextProjection = _part(super().text, self)
        return part

    @property
    @override
    def reasoning(self) -> SyncTextProjection:
        part: SyncTextProjection = _part(super().reasoning, self)
        return part

    @property
    @override
    def tool_calls(self) -> SyncProjection:
        part: SyncProjection = _part(super().tool_calls, self)
        return part


class _AsyncStream(AsyncChatModelStream):
    __slots__ = ()

    @property
    @override
    def text(self) -> AsyncTextProjection:
        part: AsyncTextProjection = _part(super().text, self)
        return part

    @property
    @override
    def reasoning(self) -> AsyncTextProjection:
        part: AsyncTextProjection = _part(super().reasoning, self)
        return part

    @property
    @override
    def tool_calls(self) -> AsyncProjection:
        part: AsyncProjection = _part(super().tool_calls, self)
        return part

    @property
    @override
    def output(self) -> AsyncProjection:
        part: AsyncProjection = _part(super().output, self)
        return part

    @override
    def __aiter__(self) -> Any:
        return aiter(_part(self._events_proj, self))


class _Part:
    """A projection's double hands everything to the original. It and its iterators keep the stream's double alive."""

    __slots__ = ()
    _part: Any
    _owner: object

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__
        return found(self, name) if name in ("_part", "_owner", "__class__") else getattr(found(self, "_part"), name)

    def __iter__(self) -> Iterator[Any]:
        yield from self._part

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for item in self._part:
            yield item

    def __await__(self) -> Generator[Any, None, Any]:
        whole = yield from self._part.__await__()
        return whole

    def __str__(self) -> str:
        return str(self._part)

    def __bool__(self) -> bool:
        return bool(self._part)

    def __repr__(self) -> str:
        return repr(self._part)


def _part(original: Any, owner: object) -> Any:
    of: Any = type(original)
    kind = _kind(of)
    double = kind.__new__(kind)
    double._part, double._owner = original, owner
    return double


@functools.cache
def _kind(kind: Any) -> Any:
    return type(kind.__name__, (_Part, kind), {"__slots__": ("_part", "_owner")})
