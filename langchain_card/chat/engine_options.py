"""The fields of a chat model that select its engine."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from langchain_card.chat.field_docs import attribute_docs
from langchain_card.config import (
    DRAFT_VARIABLE,
    MODEL_VARIABLE,
    DraftTransport,
    Dtype,
    EngineConfig,
    Exactness,
    Execution,
    KVDtype,
    PrefixCache,
    default_draft_model,
    default_model,
)
from langchain_card.limits import Limits, Pins
from langchain_card.models.store import ModelStore

_SETTINGS = {setting.name: setting for setting in fields(EngineConfig)}
_DOCS = attribute_docs(EngineConfig)


def _setting(name: str, more: str = "", **options: Any) -> Any:
    """Return a pydantic field with the default and the description of `EngineConfig.name`; `more` is added to it."""
    setting = _SETTINGS[name]
    if setting.default_factory is not MISSING:
        options["default_factory"] = setting.default_factory
    elif "default_factory" not in options:
        options["default"] = setting.default
    return Field(**options, description=f"{_DOCS.get(name, '')} {more}".strip())


class EngineOptions(BaseModel):
    """The settings of `EngineConfig` as fields; only their types are repeated here, for type checkers and editors."""

    model: str = _setting(
        "model",
        f"`model_name` is another name of this field, the environment variable `{MODEL_VARIABLE}` another default. A "
        "call may name another model.",
        default_factory=default_model,
        validation_alias=AliasChoices("model", "model_name"),
    )
    draft_model: str | None = _setting(
        "draft_model",
        f"The environment variable `{DRAFT_VARIABLE}` is another default, with `none` for None. A call may name "
        "another draft.",
        default_factory=default_draft_model,
    )
    device: str = _setting("device")
    draft_device: str = _setting("draft_device")
    draft_transport: DraftTransport = _setting("draft_transport")
    dtype: Dtype = _setting("dtype")
    kv_dtype: KVDtype = _setting("kv_dtype")
    quantization: str | None = _setting("quantization")
    exact: Exactness = _setting("exact")
    execution: Execution = _setting("execution")
    isolate: bool = _setting("isolate")
    replicas: int = _setting("replicas")
    cluster: str | None = _setting("cluster")
    drafters: tuple[str, ...] | None = _setting("drafters")
    acceptance: str = _setting("acceptance")
    steering: str | None = _setting("steering")
    stack: tuple[str, ...] = _setting("stack")
    draft_context: int | None = _setting("draft_context")
    prefix_cache: PrefixCache = _setting("prefix_cache")
    max_model_len: int | None = _setting("max_model_len")
    adapters: dict[str, str] = _setting("adapters", "Here a dict of folders by name.", default_factory=dict)
    pins: Pins = _setting("pins", "Or a dict.")
    limits: Limits = _setting("limits", "Or a dict.")

    def engine_config(self) -> EngineConfig:
        """Return the configuration of the engine that these fields select."""
        values = {name: getattr(self, name) for name in _SETTINGS}
        return EngineConfig(**values | {"adapters": (*self.adapters.items(),)})

    def _check_models(self) -> None:
        """Raise `UnknownModelError` unless models may have these names. Nothing is downloaded for that."""
        ModelStore().check(self.model)
        if self.draft_model is not None and self.engine_config().has_draft:
            ModelStore().check(self.draft_model, field="draft_model")
            for level in self.engine_config().levels:
                if level.is_model:
                    ModelStore().check(level.spec, field="stack")
