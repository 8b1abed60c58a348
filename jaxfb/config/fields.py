"""Reads which keys the dataclasses of a config have, and what their types allow."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from jaxfb.registry import OWN, Registry


def key_of(attribute: str) -> str:
    """Returns the key of a field: its name, without the underscore that keeps Python's own words apart (`from_`)."""
    return attribute.removesuffix("_")


@cache
def fields_of(cls: type) -> dict[str, Any]:
    """Returns key -> type of every field that `cls(...)` takes; None is a value of each whose default it is."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        key_of(field.name): hints[field.name] | None if field.default is None else hints[field.name]
        for field in fields_taken(cls)
    }


@cache
def fields_taken(cls: type) -> list[dataclasses.Field]:
    """Returns the fields that `cls(...)` takes, those that must be given first, as in a file."""
    taken = [field for field in dataclasses.fields(cls) if field.init]
    return sorted(taken, key=has_default)


def required_keys(cls: type) -> list[str]:
    """Returns the keys that have no default."""
    return [key_of(field.name) for field in fields_taken(cls) if not has_default(field)]


def has_default(field: dataclasses.Field) -> bool:
    """Returns whether a field may be left out."""
    return not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key below `cls`, leaves and sections."""
    for name, hint in fields_of(cls).items():
        yield f"{prefix}{name}"
        if section := section_of(hint):
            yield from all_keys(section, f"{prefix}{name}.")


def sections_of(hint: Any) -> list[type]:
    """Returns the dataclasses that a field may hold, the usual one first."""
    return [
        option for option in options_of(hint) if isinstance(option, type) and dataclasses.is_dataclass(option)
    ]


def section_of(hint: Any) -> type | None:
    """Returns the dataclass a field holds (perhaps or None), or None for a leaf."""
    return next(iter(sections_of(hint)), None)


def named_sections(hint: Any) -> type | None:
    """Returns the dataclass of `dict[str, dataclass]`, sections whose names are the user's; None for anything else."""
    if get_origin(hint) is dict and dataclasses.is_dataclass(get_args(hint)[1]):
        return get_args(hint)[1]
    return None


def listed_section(hint: Any) -> type | None:
    """Returns the dataclass of `tuple[dataclass, ...]`, a list of sections; None for anything else."""
    if get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
        return get_args(hint)[0]
    return None


def options_of(hint: Any) -> tuple:
    """Returns the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def words_of(hint: Any) -> Iterator[Any]:
    """Yields the words that a value, or an item of a list, may be: literals and names of parts."""
    for option in options_of(hint):
        if get_origin(option) is Literal:
            yield from get_args(option)
        elif registry := _registry(option):
            yield from registry.names
        elif get_origin(option) is tuple:
            yield from words_of(get_args(option)[0])


def registries_of(hint: Any) -> Iterator[Registry]:
    """Yields the registries whose names a value, or an item of a list, may be."""
    for option in options_of(hint):
        if registry := _registry(option):
            yield registry
        elif get_origin(option) is tuple:
            yield from registries_of(get_args(option)[0])


def _registry(option: Any) -> Registry | None:
    """Returns the registry that names the values of `Annotated[str, registry]`."""
    extras = getattr(option, "__metadata__", ())
    return next((extra for extra in extras if isinstance(extra, Registry)), None)


@cache
def adapter_of(hint: Any):
    """Returns what checks values of a type, strictly: no text is taken for a number."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def describe(hint: Any) -> str:
    """Returns a type in the words of an error: `an integer or null`, `one of gpipe, 1f1b`."""
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return " or ".join(alternatives(hint, names, lambda item: f"a list, each {describe(item)}"))


def alternatives(hint: Any, names: Mapping[Any, str], list_of: Callable[[Any], str]) -> list[str]:
    """Returns what a value of a type may be, in words.

    names: words of the plain types. list_of: words for a list, from the type of its items.
    """
    parts = []
    for option in options_of(hint):
        if get_origin(option) is Literal:
            words = ", ".join(map(str, get_args(option)))
            parts.append(f"one of {words}" if len(get_args(option)) > 1 else words)
        elif registry := _registry(option):
            parts.append(f"one of {', '.join(registry.names)}, or your own as {OWN}")
        elif listed := listed_section(option):
            parts.append(f"a list of sections with {', '.join(fields_of(listed))}")
        elif get_origin(option) is tuple:
            parts.append(list_of(get_args(option)[0]))
        elif named := named_sections(option):
            parts.append(f"a mapping of names to sections with {', '.join(fields_of(named))}")
        elif get_origin(option) in (dict, Mapping):
            parts.append("a mapping of names to values")
        else:
            parts.append(names.get(option, getattr(option, "__name__", str(option))))
    return parts
