"""Plug-ins: what installed packages add to this one, found by name and imported when it is named.

A package offers a drafter by an entry point of its `pyproject.toml`:

```
[project.entry-points."langchain_card.drafters"]
echo = "my_package:EchoDrafter"
```

and `EngineConfig(drafters=("ngram", "echo?depth=4"))` uses it: the name, then options as in a URL. What is built in is
found in the same way, whether this package was installed or not. docs/plugins.md has an example.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from langchain_card.errors import CARDError, InvalidInputError, check_choice, is_out_of_memory

Kind: TypeAlias = Literal["drafters", "acceptance", "steering"]

_BUILTIN: Mapping[Kind, Mapping[str, str]] = {
    "drafters": {
        "forced": "langchain_card.drafters.forced:ForcedDrafter",
        "ngram": "langchain_card.drafters.ngram.drafter:NgramDrafter",
    },
    "acceptance": {
        "exact": "langchain_card.core.walk:ExactRule",
        "loose": "langchain_card.acceptance.loose:LooseRule",
    },
    "steering": {},
}

_NEEDED: Mapping[Kind, Mapping[str, type]] = {"drafters": {"name": str, "paced": bool}}

_registered: dict[tuple[Kind, str], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class PlugIn:
    """One that was named.

    Attributes:
        kind: what it is.
        name: of it.
        factory: a class, or what stands for one; called with a `ports.Setting` and the options.
        options: by name.
        field: in which it was named.
    """

    kind: Kind
    name: str
    factory: Callable[..., Any]
    options: Mapping[str, Any]
    field: str

    def make(self, *arguments: Any) -> Any:
        """A fresh one.

        Raises:
            InvalidInputError: its factory raised something of its own.
        """
        try:
            return self.factory(*arguments, **self.options)
        except Exception as error:
            if isinstance(error, CARDError) or is_out_of_memory(error):
                raise
            limit = f"could not be made ({type(error).__name__}: {error})"
            raise InvalidInputError(self.field, self.name, limit, "mend its factory, or its options") from error


def register(kind: Kind, name: str, factory: Callable[..., Any]) -> None:
    """Makes a plug-in known in this process alone: for tests and notebooks. Engines with `isolate` do not see it.

    Raises:
        InvalidInputError: there is no such kind.
    """
    check_choice("kind", kind, tuple(_BUILTIN))
    _registered[kind, name] = factory


def names(kind: Kind) -> tuple[str, ...]:
    """All that may be named."""
    registered = [name for found, name in _registered if found == kind]
    return tuple(sorted({*_BUILTIN[kind], *registered, *_offered(kind)}))


def name_of(spec: str) -> str:
    """The name in a spec, without its options."""
    return spec.partition("?")[0]


def take_option(spec: str, option: str) -> tuple[str, Any]:
    """A spec of a stack without one of its options, and that one's value; None where it has none."""
    name, _, query = spec.partition("?")
    rest = "&".join(part for part in query.split("&") if unquote(part.partition("=")[0]) != option)
    return f"{name}?{rest}" if rest else name, _options(spec, "stack").get(option)


def is_known(kind: Kind, spec: str) -> bool:
    """Whether a spec names one."""
    return name_of(spec) in names(kind)


def find(kind: Kind, spec: str, field: str | None = None) -> PlugIn:
    """The plug-in that a spec names.

    Args:
        kind: what is looked for.
        spec: name and options: `"name"`, `"name?depth=4&table=c++.ngrams"`. Values are numbers or other JSON where
            they can be read as such, else text; `%26` stands for `&`.
        field: in which it was named; `kind` by default.

    Raises:
        InvalidInputError: there is none of this name, it cannot be imported, is not of its kind, has no such options,
            or one is named twice.
    """
    field = field or kind
    name = name_of(spec)
    check_choice(field, name, names(kind), "install the package that offers it")
    factory = _load(kind, name, field)
    options, known = _options(spec, field), _parameters(kind, name, factory, field)
    if not any(each.kind == each.VAR_KEYWORD for each in known):
        for option in options:
            check_choice(f"option of {field} {name}", option, tuple(each.name for each in known))
    return PlugIn(kind, name, factory, options, field)


def _load(kind: Kind, name: str, field: str) -> Callable[..., Any]:
    if (kind, name) in _registered:
        return _registered[kind, name]
    try:
        if name in _BUILTIN[kind]:
            module, _, attribute = _BUILTIN[kind][name].partition(":")
            factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
            return factory
        loaded: Callable[..., Any] = _offered(kind)[name].load()
        return loaded
    except Exception as error:
        limit = f"cannot be imported ({type(error).__name__}: {error})"
        raise InvalidInputError(field, name, limit, "mend or remove the package that offers it") from error


def _parameters(kind: Kind, name: str, factory: Callable[..., Any], field: str) -> list[inspect.Parameter]:
    """Those that options are for, of a factory that is one."""
    hint = f"mend or remove the package that offers it; docs/plugins.md says what {kind} need"
    for attribute, type_ in _NEEDED.get(kind, {}).items():
        if not isinstance(getattr(factory, attribute, None), type_):
            limit = f"its factory has no attribute {attribute!r} of type {type_.__name__}"
            raise InvalidInputError(field, name, limit, hint)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(field, name, f"its factory has no signature to be read ({error})", hint) from error
    return [each for each in [*parameters][1:] if each.kind != each.POSITIONAL_ONLY]  # but the setting


@functools.cache
def _offered(kind: Kind) -> Mapping[str, EntryPoint]:
    """By installed packages; the first of a name counts."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"langchain_card.{kind}"):
        found.setdefault(entry.name, entry)
    return found


def _options(spec: str, field: str) -> dict[str, Any]:
    """By name. A plus stands for itself: it is common in paths."""
    options: dict[str, Any] = {}
    for part in filter(None, spec.partition("?")[2].split("&")):
        key, _, text = part.partition("=")
        if unquote(key) in options:
            raise InvalidInputError(field, spec, f"names {unquote(key)} twice", "name each option once")
        options[unquote(key)] = _value(unquote(text))
    return options


def _value(text: str) -> Any:
    for read in (json.loads, float):
        with contextlib.suppress(ValueError, RecursionError):
            return read(text)
    return text
