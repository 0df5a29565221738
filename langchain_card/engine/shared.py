"""`EngineLease`: a use of a shared engine, acquired at first use, released on `close` or by garbage collection."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import weakref
from typing import TYPE_CHECKING

from langchain_card.config import EngineConfig
from langchain_card.engine.garbage import rare_collections
from langchain_card.errors import EngineClosedError

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.models.files import Progress

log = logging.getLogger(__name__)

_to_release: queue.SimpleQueue[EngineConfig] = queue.SimpleQueue()
"""Leases that became garbage. A collection may run on any thread and under any lock; only `put` is safe there."""


class EngineLease:
    """A use of the process's engine of a configuration. A pickled or deep copy is a new lease.

    Args:
        config: which weights run where.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._finalizer: weakref.finalize[..., EngineLease] | None = None
        self._closed = False
        self._announced = 0

    def engine(self, progress: Progress | None = None) -> Engine:
        """Return the engine. The first use in the process builds it, which blocks while weights are loaded.

        Args:
            progress: receives the progress of downloads and conversions.

        Raises:
            EngineClosedError: the lease was closed.
            CARDError: loading failed.
        """
        with self._lock:
            if self._closed:
                hint = "make a new one; equal configurations share their weights"
                raise EngineClosedError("model", self.config.model, "this model object was closed", hint)
            if self._engine is None:
                with rare_collections:
                    from langchain_card.engine.engine import acquire_engine

                    self._engine = acquire_engine(self.config, progress)
                if self._announced:
                    self._engine.announce(self._announced)
                self._finalizer = weakref.finalize(self, _to_release.put, self.config)
                self._finalizer.atexit = False
                _start_releasing()
            return self._engine

    @property
    def held(self) -> Engine | None:
        """The engine, if this lease has acquired it."""
        return self._engine

    def announce(self, count: int) -> None:
        """Announce `count` requests to the engine, now or when it is built."""
        if self._engine is not None:
            self._engine.announce(count)
        else:
            self._announced = count

    def close(self) -> None:
        """Release the engine; its last user frees the weights. May be called twice."""
        from langchain_card.engine.engine import release_engine

        with self._lock:
            self._closed, self._engine = True, None
            acquired = self._finalizer is not None and self._finalizer.detach() is not None
        if acquired:
            release_engine(self.config)

    def __reduce__(self) -> tuple[type[EngineLease], tuple[EngineConfig]]:
        return EngineLease, (self.config,)


class EngineLeases:
    """Leases by configuration, held until `close`: the engines that calls of one chat model named besides its own.

    Copied or pickled it is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[EngineConfig, EngineLease] = {}
        self._closed = False

    def lease(self, config: EngineConfig) -> EngineLease:
        """Return the lease of a configuration, the same at each call; after `close`, a closed one."""
        with self._lock:
            lease = self._leases.setdefault(config, EngineLease(config))
        if self._closed:
            lease.close()
        return lease

    def close(self) -> None:
        """Close all leases. It may be called twice."""
        with self._lock:
            self._closed = True
        for lease in list(self._leases.values()):
            lease.close()

    def __reduce__(self) -> tuple[type[EngineLeases], tuple[()]]:
        return EngineLeases, ()


@functools.cache
def _start_releasing() -> None:
    threading.Thread(target=_release_engines, name="card-janitor", daemon=True).start()


def _release_engines() -> None:
    from langchain_card.engine.engine import release_engine

    while True:
        config = _to_release.get()
        try:
            release_engine(config)
        except Exception:
            log.exception("closing the engine of %s failed", config.model)
