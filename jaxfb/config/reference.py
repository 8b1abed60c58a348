"""Writes the reference of every config key, in Markdown, from the dataclasses that the keys are read into."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

from jaxfb.config.fields import (
    alternatives,
    fields_of,
    fields_taken,
    key_of,
    listed_section,
    named_sections,
    section_of,
    sections_of,
)
from jaxfb.config.post_training import COMMANDS
from jaxfb.config.root import Config
from jaxfb.config.show import as_yaml
from jaxfb.described import described_fields, introduction
from jaxfb.refusal import Refused

_IN_YAML = {"None": "null", "optimizer_sharding": "optimizer.sharding"}
"""Words of Python in descriptions that a config shares with programs, and what they are in YAML."""
_PYTHON = re.compile(rf"\b({'|'.join(_IN_YAML)})\b")


def reference() -> str:
    """Returns the page: one table a section, for `jaxfb train` first and then what each other command adds.

    Raises:
      ValueError: Python has left out the docstrings, in which the meanings are.
    """
    if sys.flags.optimize > 1:
        raise Refused(
            "[config] the reference is made of docstrings, which Python leaves out with -OO or PYTHONOPTIMIZE=2; call "
            "it without"
        )
    parts = [_HEAD]
    seen: set[type] = set()
    for root in (Config, *COMMANDS):
        parts.append(f"## Keys of `jaxfb {COMMANDS.get(root, 'train')}`\n\n{introduction(root)}")
        parts.extend(_sections(root, "", seen))
    return "\n\n".join(parts).rstrip() + "\n"


def _sections(cls: type, prefix: str, seen: set[type]) -> Iterator[str]:
    """Yields the table of the keys of `cls`, then those of its sections that no table has shown yet."""
    leaves = [field for field in fields_taken(cls) if section_of(fields_of(cls)[key_of(field.name)]) is None]
    texts = described_fields(cls)
    if leaves:
        yield "\n".join([_TABLE, *(_row(cls, field, prefix, texts) for field in leaves)])
    for name, hint in fields_of(cls).items():
        found, key = sections_of(hint), f"{prefix}{name}"
        if named := named_sections(hint):
            found, key = [named], f"{key}.NAME"
        if listed := listed_section(hint):
            found, key = [listed], f"{key}[NUMBER]"
        for section in found:
            if section not in seen:
                seen.add(section)
                other = "" if section is found[0] else ", of another kind"
                word = getattr(section, "WORD", None)
                yield f"### `{key}`{f': {word}' if word else other}\n\n{introduction(section)}"
                if word is None:
                    yield from _sections(section, f"{key}.", seen)


def _row(cls: type, field: dataclasses.Field, prefix: str, texts: dict[str, str]) -> str:
    key = key_of(field.name)
    legal = _legal(fields_of(cls)[key])
    text = _PYTHON.sub(lambda word: _IN_YAML[word[0]], texts.get(key, ""))
    cells = (f"`{prefix}{key}`", legal, _default(field), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _legal(hint: Any) -> str:
    """Returns a type in the words of a table: `integer, string or null`."""
    *others, last = alternatives(hint, _NAMES, _list_of)
    between = ", or " if any(" or " in words for words in others) else " or "
    return f"{', '.join(others)}{between}{last}" if others else last


def _list_of(item: Any) -> str:
    return f"list of {_NAMES[item]}s" if item in (int, float, str) else f"list, each {_legal(item)}"


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_yaml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    return "must be given"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return as_yaml(value)


_NAMES = {int: "integer", float: "number", str: "string", bool: "true or false", type(None): "null"}
_TABLE = "| key | legal values | default | meaning |\n|---|---|---|---|"
_HEAD = """# Every key of a config

This page lists every key of the YAML configs of `jaxfb train`, `sft`, `dpo` and `rl`, with its legal values. On the
command line a key is set by `section.key=value`; `jaxfb config show CONFIG` prints a config with all its keys. The keys
of `jaxfb train` come first; what the other commands add or change follows. The [glossary](glossary.md) explains the
words. `jaxfb config reference` writes this page."""
