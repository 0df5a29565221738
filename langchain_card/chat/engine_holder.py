"""`EngineHolder`: a LangChain model that shares an engine with the others of the same configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PrivateAttr
from typing_extensions import Self

from langchain_card.chat.engine_options import EngineOptions
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.progress import ConsoleProgress
from langchain_card.engine.shared import EngineLease

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.models.files import Progress


class EngineHolder(EngineOptions):
    """A model that holds the engine of its fields from its first use until `close()` or the end of a `with` block.

    Garbage collection releases the engine, too.
    """

    _lease: EngineLease = PrivateAttr()

    def _hold(self) -> None:
        """Check the names of the models and prepare the lease. Pydantic calls it again when a model becomes a field."""
        self._check_models()
        if getattr(self, "_lease", None) is None:
            self._lease = EngineLease(self._engine_config())

    def load(self, progress: Progress | None = None) -> Self:
        """Download, convert and load the models, and keep them until `close()`; return this model.

        With `configurable_fields` LangChain makes a new instance per call: a loaded first one keeps the weights alive.

        Args:
            progress: receives the progress of downloads and conversions; by default it is shown on standard error.
        """
        with langchain_errors():
            self._engine(progress)
        return self

    def close(self) -> None:
        """Release the engine; its last user aborts running answers and frees the memory. It may be called twice."""
        self._lease.close()

    @property
    def engine(self) -> Engine:
        """The engine, loaded if needed, for prompts that are not messages. `close` releases it."""
        with langchain_errors():
            return self._engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._lease = EngineLease(self._lease.config)
        return copied

    def _engine(self, progress: Progress | None = None) -> Engine:
        config = self._engine_config()
        if self._lease.config != config:  # fields were assigned, or changed in a copy
            self._lease = EngineLease(config)
        if self._lease.held is not None:
            return self._lease.engine()
        with ConsoleProgress() as console:
            engine = self._lease.engine(progress or console)
            engine.warm_up(progress or console)
            return engine
