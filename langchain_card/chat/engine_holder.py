"""`EngineHolder`: a LangChain model that shares an engine with the others of the same configuration."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, PrivateAttr, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self, override

from langchain_card.chat.engine_options import EngineOptions
from langchain_card.chat.error_mapping import langchain_errors
from langchain_card.chat.field_docs import fields_section
from langchain_card.chat.progress import ConsoleProgress
from langchain_card.chat.sampling_options import unknown_name
from langchain_card.engine.shared import EngineLease
from langchain_card.errors import InvalidInputError

if TYPE_CHECKING:
    from langchain_card.engine.engine import Engine
    from langchain_card.models.files import Progress


class EngineHolder(EngineOptions):
    """A model that holds the engine of its fields from its first use until `close()` or the end of a `with` block.

    Garbage collection releases the engine, too.
    """

    _lease: EngineLease = PrivateAttr()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{fields_section(cls)}\n"

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """Check that each name is that of a field, and that no field is given under two names."""
        if not isinstance(values, dict):
            return values
        names = {name: names_of(name, info) for name, info in cls.model_fields.items()}
        known = sorted(set().union(*names.values()))
        for name in values if cls.model_config.get("extra") == "forbid" else ():
            if name not in known:
                limit, hint = f"is not a field of {cls.__name__}", f"help({cls.__name__}) lists its fields"
                raise unknown_name(name, values[name], limit, known, hint)
        for name, others in names.items():
            if len(given := [each for each in others if each in values]) > 1:
                limit = f"is given as {' and as '.join(given)}, which are one option"
                raise InvalidInputError(name, [values[each] for each in given], limit, "give one of them")
        return values

    @override
    def __repr_args__(self) -> list[tuple[str, Any]]:
        """Return the models and the fields that were set: the others have their defaults."""
        set_by_user = (name for name in type(self).model_fields if name in self.model_fields_set)
        names = dict.fromkeys(("model", "draft_model", *set_by_user))
        return [(name, getattr(self, name)) for name in names if name not in ("metadata", "profile")]

    def _hold(self) -> None:
        """Check the names of the models and prepare the lease. Pydantic calls it again when a model becomes a field."""
        self._check_models()
        if getattr(self, "_lease", None) is None:
            self._lease = EngineLease(self.engine_config())

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
        config = self.engine_config()
        if self._lease.config != config:  # fields were assigned, or changed in a copy
            self._lease = EngineLease(config)
        if self._lease.held is not None:
            return self._lease.engine()
        with ConsoleProgress() as console:
            engine = self._lease.engine(progress or console)
            engine.warm_up(progress or console)
            return engine


def names_of(name: str, info: FieldInfo) -> list[str]:
    """Return the names under which a field may be given."""
    alias = info.validation_alias
    others = alias.choices if isinstance(alias, AliasChoices) else (alias, info.alias)
    return [*dict.fromkeys([name, *(other for other in others if isinstance(other, str))])]
