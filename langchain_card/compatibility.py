"""Which settings of an engine go together: what works below a draft, and what a lossy rule of acceptance needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_card import plugins
from langchain_card.errors import InvalidInputError

if TYPE_CHECKING:
    from langchain_card.config import EngineConfig


def check_stack(config: EngineConfig) -> None:
    """Raises `InvalidInputError` where nothing could work below the draft model."""
    if config.stack and not config.has_draft:
        raise InvalidInputError("stack", config.stack, "works below a draft model", "name one as draft_model")
    if config.stack and config.draft_transport == "process":
        raise InvalidInputError("draft_transport", "process", "a stack runs on a thread", 'use "auto" or stack=()')
    for level in config.levels[:-1]:
        if not level.is_model:
            hint = "name it last"
            raise InvalidInputError("stack", level.spec, "needs no model, so nothing can work below it", hint)


def check_lossy(config: EngineConfig) -> None:
    """Raises `InvalidInputError` where a lossy rule would break a promise, or let anybody write the answer."""
    rule = f'the rule "{config.acceptance}"'
    if config.exact == "strict":
        limit = f"{rule} is lossy, which no exactness goes with"
        raise InvalidInputError("exact", config.exact, limit, 'choose one: exact="default", or acceptance="exact"')
    if config.steering is not None:
        limit = f"{rule} is lossy, and might put into the answer what steering rules out"
        raise InvalidInputError("steering", config.steering, limit, 'choose one: steering=None, or acceptance="exact"')
    named = [("draft_model" if spec == config.draft_model else "drafters", spec) for spec in config.modelless_drafters]
    for field, spec in [*named, *(("stack", level.spec) for level in config.levels if not level.is_model)]:
        if not getattr(plugins.find("drafters", spec, field).factory, "trusted", False):
            limit = f"is not trusted, and {rule} may put what it proposes into the answer"
            raise InvalidInputError(field, spec, limit, 'take acceptance="exact"; see ports.Drafter')
