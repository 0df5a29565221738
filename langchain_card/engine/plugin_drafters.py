"""The plug-ins among an engine's drafters: found, and made where that costs little, before weights are read."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from langchain_card import plugins
from langchain_card.config import LEAST_NGRAM_BYTES, NGRAM, EngineConfig
from langchain_card.core.messages import TARGET
from langchain_card.core.query import DrafterTraits
from langchain_card.drafters.model import ModelDrafter
from langchain_card.errors import InvalidInputError
from langchain_card.ports import Drafter, Setting


class Chosen:
    """One that a configuration names.

    Args:
        spec: by which it is named.
        field: where.
        setting: where it works.

    Attributes:
        source: what the core sees of it.
        looks_ahead: whether it may work below another one.
    """

    def __init__(self, spec: str, field: str, setting: Setting) -> None:
        self.spec, self._setting = spec, setting
        self._found = plugins.find("drafters", spec, field)
        self.source = source_of(self._found.factory)
        self.looks_ahead: bool = getattr(self._found.factory, "looks_ahead", False)
        self._first: list[Drafter] = []

    def prepare(self) -> None:
        """Makes the first one, unless its steps cost device time, for which it may take memory: bad options show."""
        if not self.source.paced:
            self._first.append(self.make())

    def make(self) -> Drafter:
        """One that nobody has."""
        drafter: Drafter = self._first.pop() if self._first else self._found.make(self._setting)
        return drafter

    def close(self) -> None:
        """Closes what was made and never taken."""
        while self._first:
            self._first.pop().close()


def choose(config: EngineConfig, setting: Setting, held: contextlib.ExitStack) -> tuple[list[Chosen], Chosen | None]:
    """The drafters beside the draft model or in its place, and the one below it.

    Args:
        config: of the engine.
        setting: of the engine.
        held: closes those that nobody took.

    Raises:
        InvalidInputError: one cannot be found, does not take its options, has the name of another one, or no memory.
    """
    own = [] if config.draft_model is None else ["forced"]
    setting = _shared(setting, [plugins.name_of(spec) for spec in (*config.modelless_drafters, *config.stack)])
    beside, below = list[Chosen](), None
    for spec in dict.fromkeys((*config.modelless_drafters, *own)):
        chosen = Chosen(spec, "drafters", setting)
        name, others = chosen.source.name, [other.source.name for other in beside]
        if spec == "forced" and name in others:
            continue  # somebody's own takes its place
        if name in (TARGET, ModelDrafter.name, *others):
            limit = f"is called {name!r} as {'another one' if name in others else 'a worker of the engine itself'} is"
            raise InvalidInputError("drafters", spec, limit, "the source of its proposals must be unique: change one")
        beside.append(chosen)
    if config.stack and not config.levels[-1].is_model:
        below = Chosen(config.levels[-1].spec, "stack", setting)
        if not below.looks_ahead:
            limit = "says nothing of what follows tokens that are assumed, as it must below another drafter"
            hint = f"stack=(), drafters={(*config.modelless_drafters, below.spec)!r} has it work beside the draft model"
            raise InvalidInputError("stack", below.spec, limit, hint)
    for chosen in (*beside, below) if below is not None else beside:
        held.callback(chosen.close)
        chosen.prepare()
    return beside, below


def _shared(setting: Setting, names: list[str]) -> Setting:
    """All n-gram drafters together keep to the bound."""
    most, count = setting.limits.max_ngram_bytes, max(1, names.count(NGRAM))
    if most < count * LEAST_NGRAM_BYTES:
        limit = f"is too little for {count} n-gram drafters, which need {LEAST_NGRAM_BYTES:,} each"
        raise InvalidInputError("max_ngram_bytes", most, limit, "raise it, or name ngram once in drafters and stack")
    return replace(setting, limits=replace(setting.limits, max_ngram_bytes=most // count))


def source_of(factory: Any) -> DrafterTraits:
    """A drafter's class as the core sees what it makes."""
    optional = {name: getattr(factory, name, False) for name in ("from_model", "of_grammars")}
    return DrafterTraits(factory.name, factory.paced, **optional)
