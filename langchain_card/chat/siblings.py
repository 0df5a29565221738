"""The engines that calls of one chat model asked for beside its own."""

from __future__ import annotations

import threading

from langchain_card.config import EngineConfig
from langchain_card.engine.shared import EngineLease


class Siblings:
    """Leases of other engines, held until the object that asked for them is closed. Copied or pickled it is empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[EngineConfig, EngineLease] = {}
        self._closed = False

    def lease(self, config: EngineConfig) -> EngineLease:
        """The lease of a configuration, the same for each call; a closed one after `close`."""
        with self._lock:
            lease = self._leases.setdefault(config, EngineLease(config))
        if self._closed:
            lease.close()
        return lease

    def close(self) -> None:
        """Gives all engines back. May be called twice."""
        with self._lock:
            self._closed = True
        for lease in list(self._leases.values()):
            lease.close()

    def __reduce__(self) -> tuple[type[Siblings], tuple[()]]:
        return Siblings, ()
