"""Writes the reference of every config key, in Markdown, from the dataclasses that the keys are read into."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from jaxfb.config.post_training import COMMANDS
from jaxfb.config.root import Config
from jaxfb.config.schema import (
    describe,
    fields_of,
    key_of,
    listed_section,
    named_sections,
    section_of,
    sections_of,
)

_ENTRY = re.compile(r"^(?P<names>[a-z_0-9]+(?:, [a-z_0-9]+)*): +(?P<text>\S.*)$")
_INLINE = re.compile(r"(?<=\. )(?=[a-z_0-9]+: )")


def reference() -> str:
    """Returns the page: one table a section, for `jaxfb train` first and then what each other command adds."""
    parts = [_HEAD]
    seen: set[type] = set()
    for root in (Config, *COMMANDS):
        parts.append(f"## Keys of `jaxfb {COMMANDS.get(root, 'train')}`\n\n{_intro(root)}")
        parts.extend(_sections(root, "", seen))
    return "\n\n".join(parts).rstrip() + "\n"


def _sections(cls: type, prefix: str, seen: set[type]) -> Iterator[str]:
    """Yields the table of the keys of `cls`, then those of its sections that no table has shown yet."""
    leaves = [
        field
        for field in dataclasses.fields(cls)
        if field.init and section_of(fields_of(cls)[key_of(field.name)]) is None
    ]
    texts = descriptions(cls)
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
                yield f"### `{key}`{f': {word}' if word else other}\n\n{_intro(section)}"
                if word is None:
                    yield from _sections(section, f"{key}.", seen)


def _row(cls: type, field: dataclasses.Field, prefix: str, texts: dict[str, str]) -> str:
    key = key_of(field.name)
    legal = describe(fields_of(cls)[key])
    cells = (f"`{prefix}{key}`", legal, _default(field), texts.get(key, ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_yaml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    return "must be given"


def _yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return '""' if value == "" else str(value)


def descriptions(cls: type) -> dict[str, str]:
    """Returns the text of each field out of the docstrings of a dataclass and of those it inherits from.

    An entry is a line `name: text` or `name, name: text`; lines that are indented further continue it.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for names, text in _entries(inspect.cleandoc(base.__dict__.get("__doc__") or "")):
            found |= dict.fromkeys(names, text)
    return found


def _entries(doc: str) -> Iterator[tuple[list[str], str]]:
    entry: tuple[list[str], str] | None = None
    for line in (part for whole in doc.splitlines() for part in _INLINE.split(whole)):
        if match := _ENTRY.match(line.strip() if not line.startswith(" ") else ""):
            if entry:
                yield entry
            entry = match["names"].split(", "), match["text"].strip()
        elif entry and line.startswith(" "):
            entry = entry[0], f"{entry[1]} {line.strip()}"
        elif entry:
            yield entry
            entry = None
    if entry:
        yield entry


def _intro(cls: type) -> str:
    """Returns the sentences of a docstring before its first entry."""
    lines = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if _ENTRY.match(line):
            break
        lines.append(line)
    return " ".join(" ".join(lines).split())


_TABLE = "| key | legal values | default | meaning |\n|---|---|---|---|"
_HEAD = """# Every key of a config

Written by `jaxfb config reference`. On the command line a key is `section.key=value`; `jaxfb config show CONFIG`
prints what a config resolves to."""
