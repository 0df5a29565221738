"""TypedDicts as JSON schemas: pydantic's, with what LangChain's conventions say of the keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from enum import Enum
from types import UnionType, new_class
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, TypeAdapter
from pydantic_core import to_jsonable_python
from typing_extensions import NotRequired, Required, TypedDict, get_type_hints, is_typeddict

_ARGUMENT = re.compile(r"( *)(\w+)(?: *\([^)]*\))? *: *(.*)")
_ASIDE = ("Returns:", "Example:")
_TYPED_DICT: Any = TypedDict


def typed_dict_schema(typed_dict: type) -> dict[str, Any]:
    """The JSON schema of a TypedDict, references within.

    Keys are required unless they are `NotRequired`, of a class with `total=False`, or have a default. `Annotated[type,
    default, "description"]` says both of a key, `...` for no default; so do the `Args` of the docstring with
    descriptions, before these.

    Args:
        typed_dict: of `typing` or `typing_extensions`; those that it names may refer to each other.

    Raises:
        Exception: pydantic, or the resolution of its hints, cannot read it.
    """
    return TypeAdapter(_pydantics(typed_dict, {})).json_schema()


def _pydantics(kind: Any, known: dict[type, type]) -> Any:
    """A type with its TypedDicts made anew, as pydantic takes them on any Python; others stay."""
    if isinstance(kind, type) and is_typeddict(kind):
        return known[kind] if kind in known else _made(kind, known)
    arguments = get_args(kind)
    if not arguments or get_origin(kind) is Literal:
        return kind
    changed = tuple(_pydantics(argument, known) for argument in arguments)
    if changed == arguments:
        return kind
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return Union[changed]  # noqa: UP007 - of as many as there are
    return Annotated[changed] if origin is Annotated else origin[changed]


def _made(typed_dict: Any, known: dict[type, type]) -> Any:
    description, told = _told(typed_dict.__doc__)
    made: Any = new_class(typed_dict.__name__, (_TYPED_DICT,))
    if config := getattr(typed_dict, "__pydantic_config__", None):
        made.__pydantic_config__ = config
    known[typed_dict] = made  # its keys may refer to it
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(typed_dict, include_extras=True).items():
        required = name in typed_dict.__required_keys__
        hint, required = _plain(hint, required)
        hint, said = _said(hint)
        hint, required = _plain(hint, required)
        if name in told:
            said["description"] = told[name]
        if "default" in said:
            required, said["json_schema_extra"] = False, {"default": to_jsonable_python(said.pop("default"))}
        hint = _pydantics(hint, known)
        keys[name] = Annotated[hint, Field(**said)] if said else hint
        made.__required_keys__ |= {name} if required else frozenset()
    made.__annotations__, made.__doc__ = keys, description
    return made


def _plain(hint: Any, required: bool) -> tuple[Any, bool]:
    """Without `Required` or `NotRequired` around it, and whether the key is required."""
    if get_origin(hint) in (Required, NotRequired):
        return get_args(hint)[0], get_origin(hint) is Required
    return hint, required


def _said(hint: Any) -> tuple[Any, dict[str, Any]]:
    """The type of a key, and its default and description by LangChain's convention; pydantic's own stay."""
    if get_origin(hint) is not Annotated:
        return hint, {}
    kind, first, *rest = get_args(hint)
    is_value = first is ... or first is None or isinstance(first, bool | int | float | str | list | dict | Enum)
    if not is_value or (rest and not isinstance(rest[0], str)):
        return hint, {}
    default = {} if first is ... else {"default": first}
    return kind, {**default, **({"description": rest[0]} if rest else {})}


def _told(docstring: str | None) -> tuple[str, Mapping[str, str]]:
    """What a docstring in Google's form says of all, and of each key."""
    general: list[str] = []
    told: dict[str, str] = {}
    aside = False
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        if block.startswith("Args:"):
            name, margin = "", None
            for line in block.splitlines()[1:]:
                begun = _ARGUMENT.fullmatch(line)
                if begun and (margin is None or len(begun[1]) <= margin):
                    name, margin = begun[2], len(begun[1])
                    told[name] = begun[3].strip()
                elif name:
                    told[name] += " " + line.strip()
            break
        aside = aside or block.startswith(_ASIDE)
        general += [] if aside else [block]
    return " ".join(general).strip(), told
