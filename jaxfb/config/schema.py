"""Builds the frozen config out of plain values: checks every key and type, names the nearest legal one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from keyword import iskeyword
from typing import Any

from jaxfb.config.fields import (
    adapter_of,
    all_keys,
    describe,
    fields_of,
    listed_section,
    named_sections,
    options_of,
    registries_of,
    required_keys,
    sections_of,
    words_of,
)
from jaxfb.config.names import ALIASES
from jaxfb.config.suggestions import as_written, not_a_section, unknown_key, wrong_type
from jaxfb.refusal import INT64, Refused, shown, text


class ConfigError(Refused):
    """A config that is refused: one sentence with the full key, its value and the nearest legal choice."""


def build(cls: type, values: Any, prefix: str = "", root: type | None = None) -> Any:
    """Returns an instance of the dataclass `cls` from a mapping; nested dataclasses are built from nested mappings.

    A class with `of_word` stands for a section that is one word.

    Raises:
      ConfigError: an unknown or missing key, or a value of a wrong type.
      ValueError: raised by a section's own checks.
    """
    root = root or cls
    if isinstance(values, str) and hasattr(cls, "of_word"):
        return cls.of_word(values)
    if not isinstance(values, Mapping):
        raise ConfigError(not_a_section(cls, values, prefix))
    fields = _fields(cls)
    for key in values:
        if not isinstance(key, str) or not key.isprintable() or len(key) > 100:
            raise ConfigError(
                f"[config] {prefix}{shown(key)} is not a key; choose one of {', '.join(fields)}"
            )
        if key not in fields:
            _check_nested(fields, key, prefix)
            _check_kind(fields, values, f"{prefix}{key}", root)
            raise ConfigError(unknown_key(f"{prefix}{key}", root))
    built = {name: _value(fields[name], given, f"{prefix}{name}", root) for name, given in values.items()}
    if hasattr(cls, "completed"):
        built = cls.completed(built)
    missing = [f"{prefix}{name}" for name in required_keys(cls) if name not in built]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise ConfigError(f"[config] {', '.join(missing)} must be given; add {them} to the file")
    return cls(**{_attribute(name): value for name, value in built.items()})


def _check_nested(fields: Mapping[str, _Field], key: str, prefix: str) -> None:
    """Refuses model.num_layers as one key of a file."""
    section, dot, rest = key.partition(".")
    if dot and section in fields:
        raise ConfigError(
            f"[config] {prefix}{key} is the name on the command line; write {section}: {{{rest}: ...}} in a file"
        )


def _check_kind(fields: Mapping[str, _Field], values: Mapping[str, Any], key: str, root: type) -> None:
    """Refuses a key that exists, but in another kind of its section: model.num_layers with model.name=bigram."""
    if key not in all_keys(root):
        return
    section = key.rpartition(".")[0]
    for name in fields:
        if name in values:  # a wrong name of the kind is refused instead
            _value(fields[name], values[name], f"{section}.{name}", root)
    given = " and ".join(f"{section}.{name}={as_written(values[name])}" for name in fields if name in values)
    raise ConfigError(f"[config] {key} is not a key of a {section} with {given}; it has {', '.join(fields)}")


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a config with `mesh.data` where they have `mesh.dp`, and so on.

    Raises:
      ConfigError: a key is given by both of its names.
    """
    plain = dict(values)
    for alias, key in ALIASES.items():
        section, short = alias.split(".")
        name, given = key.partition(".")[2], plain.get(section)
        if not isinstance(given, Mapping) or short not in given:
            continue
        if name in given:
            raise ConfigError(f"[config] {alias} and {key} are one key; leave {alias} out")
        plain[section] = {name if each == short else each: value for each, value in given.items()}
    return plain


def _attribute(key: str) -> str:
    return f"{key}_" if iskeyword(key) else key


class _Field:
    """Reads a field's type once; a config of a hundred keys is built thousands of times by tests and searches."""

    def __init__(self, hint: Any):
        self.hint = hint
        self.may_be_none = type(None) in options_of(hint)
        self.sections = sections_of(hint)
        self.named, self.listed = named_sections(hint), listed_section(hint)
        self.registries = tuple(registries_of(hint))

    def section_for(self, given: Any) -> type | None:
        """Returns the section that the given values are of, where the field may hold several kinds."""
        usual = next(iter(self.sections), None)
        return next((section for section in self.sections[1:] if section.accepts(given)), usual)


@cache
def _fields(cls: type) -> dict[str, _Field]:
    return {key: _Field(hint) for key, hint in fields_of(cls).items()}


def _named_section(cls: type, given: Any, key: str) -> Any:
    for name in given if isinstance(given, Mapping) else ():
        if name not in fields_of(cls):
            near = difflib.get_close_matches(str(name), fields_of(cls), n=1, cutoff=0.0)[0]
            raise ConfigError(f"[config] unknown key {key}.{name}; did you mean {key}.{near}?")
    try:
        return build(cls, given, f"{key}.")
    except ConfigError:
        raise
    except Refused as error:  # its own checks do not know its name
        error.args = (re.sub(r"^\[\w+\]", f"[{key}]", str(error)),)
        raise


def _value(field: _Field, given: Any, key: str, root: type) -> Any:
    if field.named and isinstance(given, Mapping):
        return {str(name): _named_section(field.named, each, f"{key}.{name}") for name, each in given.items()}
    if field.listed and isinstance(given, list | tuple):
        return tuple(
            _named_section(field.listed, each, f"{key}[{number}]") for number, each in enumerate(given)
        )
    if field.named or field.listed:
        raise ConfigError(f"[config] {key}={as_written(given)} must be {describe(field.hint)}")
    section = field.section_for(given)
    if section is None:
        return _leaf(field, given, key)
    return None if given is None and field.may_be_none else build(section, given, f"{key}.", root)


def _leaf(field: _Field, given: Any, key: str) -> Any:
    from pydantic import ValidationError

    for one in given if isinstance(given, list | tuple) else (given,):
        if isinstance(one, str):
            text(key, one, who="[config]")
    given = _as_word(field.hint, given)
    _check_registered(field, given, key)
    try:
        value = adapter_of(field.hint).validate_python(tuple(given) if isinstance(given, list) else given)
    except (ValidationError, RecursionError):
        raise ConfigError(wrong_type(field.hint, given, key)) from None
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and abs(number) > INT64:
            raise ConfigError(f"[config] {key}={shown(number)} must be an integer of at most 64 bits")
    return value


def _as_word(hint: Any, given: Any) -> Any:
    """Returns the legal word `off` or `on` where YAML read it as false or true."""
    if not isinstance(given, bool) or bool in options_of(hint):
        return given
    word = "on" if given else "off"
    return word if word in words_of(hint) else given


def _check_registered(field: _Field, given: Any, key: str) -> None:
    """Refuses a string that names no part; a wrong type is left to the type's own check."""
    texts = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    for registry in field.registries:
        if any(":" not in name and name not in registry for name in texts):
            raise ConfigError(wrong_type(field.hint, given, key))
        for name in texts:
            registry.check(name, key)
