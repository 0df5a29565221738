"""Plug-ins: drafters, acceptance rules and steering of installed packages, imported when a setting names them.

A package offers a drafter by an entry point of its `pyproject.toml`:

```
[project.entry-points."langchain_card.drafters"]
echo = "my_package:EchoDrafter"
```

and `EngineConfig(drafters=("ngram", "echo?depth=4"))` uses it: the name, then options as in a URL. Built-in ones are
found in the same way, even where this package is not installed. docs/plugins.md has an example.
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
from urllib.parse import parse_qsl, unquote

from langchain_card.errors import CARDError, InvalidInputError, check_choice, is_out_of_memory

PlugInKind: TypeAlias = Literal["drafters", "acceptance", "steering", "pools"]

_BUILTIN: Mapping[PlugInKind, Mapping[str, str]] = {
    "drafters": {
        "forced": "langchain_card.drafters.forced:ForcedDrafter",
        "head": "langchain_card.drafters.head:HeadDrafter",
        "ngram": "langchain_card.drafters.ngram.drafter:NgramDrafter",
    },
    "acceptance": {
        "exact": "langchain_card.core.walk:ExactRule",
        "loose": "langchain_card.acceptance.loose:LooseRule",
    },
    "steering": {},
    "pools": {"ray": "langchain_card.cluster.replica_pool:ReplicaPool"},
}

_NEEDED: Mapping[PlugInKind, Mapping[str, type]] = {"drafters": {"name": str, "paced": bool}}

_registered: dict[tuple[PlugInKind, str], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class PlugIn:
    """A plug-in that a setting names, with its options.

    Attributes:
        kind: its kind.
        name: its name.
        factory: a class or another callable; called with a `ports.Setting` and the options.
        options: values by name.
        field: the setting that names it.
    """

    kind: PlugInKind
    name: str
    factory: Callable[..., Any]
    options: Mapping[str, Any]
    field: str

    def make(self, *arguments: Any) -> Any:
        """Make a new instance.

        Raises:
            InvalidInputError: the factory failed with an error that is neither a `CARDError` nor a lack of memory.
        """
        try:
            return self.factory(*arguments, **self.options)
        except Exception as error:
            if isinstance(error, CARDError) or is_out_of_memory(error):
                raise
            limit = f"could not be made ({type(error).__name__}: {error})"
            raise InvalidInputError(self.field, self.name, limit, "mend its factory, or its options") from error


def register(kind: PlugInKind, name: str, factory: Callable[..., Any]) -> None:
    """Register a plug-in in this process only, for tests and notebooks. Engines with `isolate` do not see it.

    Raises:
        InvalidInputError: `kind` does not exist.
    """
    check_choice("kind", kind, tuple(_BUILTIN))
    _registered[kind, name] = factory


def unregister(kind: PlugInKind, name: str) -> None:
    """Undo `register`, if it was called."""
    _registered.pop((kind, name), None)


def names(kind: PlugInKind) -> tuple[str, ...]:
    """Return the names of all plug-ins of a kind."""
    registered = [name for registered_kind, name in _registered if registered_kind == kind]
    return tuple(sorted({*_BUILTIN[kind], *registered, *_offered(kind)}))


def name_of(spec: str) -> str:
    """Return the name in a spec, without its options."""
    return spec.partition("?")[0]


def take_option(spec: str, option: str) -> tuple[str, Any]:
    """Remove one option from a spec of a stack: return the rest, and the option's value or None."""
    name, _, query = spec.partition("?")
    rest = "&".join(part for part in query.split("&") if unquote(part.partition("=")[0]) != option)
    return f"{name}?{rest}" if rest else name, _options(spec, "stack").get(option)


def is_known(kind: PlugInKind, spec: str) -> bool:
    """Return True if a spec names a plug-in of this kind."""
    return name_of(spec) in names(kind)


def package_of(kind: PlugInKind, spec: str) -> str:
    """Return the package that offers a plug-in, with its version; "" if it is built in, or registered."""
    entry, name = _offered(kind).get(name_of(spec)), name_of(spec)
    if entry is None or entry.dist is None or name in _BUILTIN[kind] or (kind, name) in _registered:
        return ""
    return f"{entry.dist.name} {entry.dist.version}"


def find(kind: PlugInKind, spec: str, field: str | None = None) -> PlugIn:
    """Return the plug-in that a spec names.

    Args:
        kind: kind of the plug-in.
        spec: name and options: `"name"`, `"name?depth=4&table=c++.ngrams"`. Values that parse as JSON or as a number
            are read so, all others are text; `%26` stands for `&`.
        field: the setting that holds the spec, for error messages; `kind` by default.

    Raises:
        InvalidInputError: the name or an option is unknown, an option is given twice, the import fails, or the factory
            lacks what its kind needs.
    """
    field = field or kind
    name = name_of(spec)
    check_choice(field, name, names(kind), "install the package that offers it")
    factory = _load(kind, name, field)
    options, known = _options(spec, field), _parameters(kind, name, factory, field)
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in known):
        for option in options:
            check_choice(f"option of {field} {name}", option, tuple(parameter.name for parameter in known))
    return PlugIn(kind, name, factory, options, field)


def _load(kind: PlugInKind, name: str, field: str) -> Callable[..., Any]:
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


def _parameters(kind: PlugInKind, name: str, factory: Callable[..., Any], field: str) -> list[inspect.Parameter]:
    """Return the parameters of a factory that options may set, once its attributes are checked."""
    hint = f"mend or remove the package that offers it; docs/plugins.md says what {kind} need"
    for attribute, type_ in _NEEDED.get(kind, {}).items():
        if not isinstance(getattr(factory, attribute, None), type_):
            limit = f"its factory has no attribute {attribute!r} of type {type_.__name__}"
            raise InvalidInputError(field, name, limit, hint)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(field, name, f"its factory has no signature to be read ({error})", hint) from error
    return [each for each in [*parameters][1:] if each.kind != each.POSITIONAL_ONLY]  # the first one is the setting


@functools.cache
def _offered(kind: PlugInKind) -> Mapping[str, EntryPoint]:
    """Return the entry points of installed packages by name; of several with one name the first counts."""
    offered: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"langchain_card.{kind}"):
        offered.setdefault(entry.name, entry)
    return offered


def _options(spec: str, field: str) -> dict[str, Any]:
    """Return the options of a spec by name. A plus stands for itself: it is common in paths."""
    options: dict[str, Any] = {}
    for name, text in parse_qsl(spec.partition("?")[2].replace("+", "%2B"), keep_blank_values=True):
        if name in options:
            raise InvalidInputError(field, spec, f"names {name} twice", "name each option once")
        options[name] = _value(text)
    return options


def _value(text: str) -> Any:
    for parse in (json.loads, float):
        with contextlib.suppress(ValueError, RecursionError):
            return parse(text)
    return text
