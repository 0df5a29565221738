"""Plug-in drafters: found, and made where that is cheap, before weights are read."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from langchain_card import plugins
from langchain_card.config import NGRAM, EngineConfig
from langchain_card.core.messages import TARGET
from langchain_card.core.query import DrafterTraits
from langchain_card.drafters.model import ModelDrafter
from langchain_card.errors import InvalidInputError
from langchain_card.limits import LEAST_NGRAM_BYTES
from langchain_card.ports import Drafter, Setting


class ChosenDrafter:
    """A plug-in drafter that a configuration names.

    Args:
        spec: name and options, as configured.
        field: the configuration's field that names it.
        setting: of the engine; passed to the plug-in.

    Attributes:
        source: the core's description of the drafter.
        looks_ahead: whether it may work below another drafter.
    """

    def __init__(self, spec: str, field: str, setting: Setting) -> None:
        self.spec, self._setting = spec, setting
        self._plugin = plugins.find("drafters", spec, field)
        self.source = source_of(self._plugin.factory)
        self.looks_ahead: bool = getattr(self._plugin.factory, "looks_ahead", False)
        self._first: list[Drafter] = []

    def prepare(self) -> None:
        """Make the first instance, so that bad options fail early; not if its steps cost device time (and memory)."""
        if not self.source.paced and not self.source.reads_target:
            self._first.append(self.make())

    def read_target(self) -> None:
        """Make the first instance of a drafter that reads the target, whose model is loaded by now."""
        if self.source.reads_target:
            self._first.append(self.make())

    def make(self) -> Drafter:
        """Return an unused instance."""
        drafter: Drafter = self._first.pop() if self._first else self._plugin.make(self._setting)
        return drafter

    def close(self) -> None:
        """Close an instance that was made and never taken."""
        while self._first:
            self._first.pop().close()


def choose(
    config: EngineConfig, setting: Setting, resources: contextlib.ExitStack
) -> tuple[list[ChosenDrafter], ChosenDrafter | None]:
    """Return the drafters beside the draft model or in its place, and the drafter below it.

    Args:
        config: of the engine.
        setting: of the engine.
        resources: closes instances that were never taken.

    Raises:
        InvalidInputError: a drafter is unknown, rejects its options, shares its name with another, or lacks memory.
    """
    implied = [] if config.draft_model is None else ["forced"]
    setting = _split_memory(setting, [plugins.name_of(spec) for spec in (*config.modelless_drafters, *config.stack)])
    beside, below = list[ChosenDrafter](), None
    for spec in dict.fromkeys((*config.modelless_drafters, *implied)):
        chosen = ChosenDrafter(spec, "drafters", setting)
        if chosen.source.reads_target:
            _check_reading(chosen.source.name, config)
        name, others = chosen.source.name, [other.source.name for other in beside]
        if spec == "forced" and name in others:
            continue  # a plug-in of that name replaces it
        if name in (TARGET, ModelDrafter.name, *others):
            limit = f"is called {name!r} as {'another one' if name in others else 'a worker of the engine itself'} is"
            raise InvalidInputError("drafters", spec, limit, "the source of its proposals must be unique: change one")
        beside.append(chosen)
    if config.stack and not config.levels[-1].is_model:
        below = ChosenDrafter(config.levels[-1].spec, "stack", setting)
        if not below.looks_ahead:
            limit = "cannot predict what follows assumed tokens, as a drafter below another drafter must"
            hint = f"stack=(), drafters={(*config.modelless_drafters, below.spec)!r} has it work beside the draft model"
            raise InvalidInputError("stack", below.spec, limit, hint)
    for chosen in (*beside, below) if below is not None else beside:
        resources.callback(chosen.close)
        chosen.prepare()
    return beside, below


def _check_reading(name: str, config: EngineConfig) -> None:
    """Raise `InvalidInputError` if a drafter cannot read the target's states."""
    if config.draft_transport == "process":
        limit = f"cannot host {name}, which reads the target's states in this process"
        raise InvalidInputError("draft_transport", config.draft_transport, limit, 'use "auto"')
    if config.execution == "compiled":
        limit = f"has no place for {name} to read states between compiled layers"
        raise InvalidInputError("execution", config.execution, limit, 'use "graphs"')


def _split_memory(setting: Setting, names: list[str]) -> Setting:
    """Divide `max_ngram_bytes` among all n-gram drafters."""
    most, count = setting.limits.max_ngram_bytes, max(1, names.count(NGRAM))
    if most < count * LEAST_NGRAM_BYTES:
        limit = f"is too little for {count} n-gram drafters, which need {LEAST_NGRAM_BYTES:,} each"
        raise InvalidInputError("max_ngram_bytes", most, limit, "raise it, or name ngram once in drafters and stack")
    return replace(setting, limits=replace(setting.limits, max_ngram_bytes=most // count))


def source_of(factory: Any) -> DrafterTraits:
    """Return the core's description of the drafters that a factory makes."""
    optional = {name: getattr(factory, name, False) for name in ("from_model", "of_grammars", "reads_target")}
    return DrafterTraits(factory.name, factory.paced, **optional)
