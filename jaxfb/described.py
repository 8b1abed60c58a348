"""Reads what each field means from the docstring of a dataclass: for the reference of config keys, and for `help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

_ENTRY = re.compile(r"^(?P<names>[a-z_0-9]+(?:, [a-z_0-9]+)*): +(?P<text>\S.*)$")
_INLINE = re.compile(r"(?<=\. )(?=[a-z_0-9]+: )")


def described_fields(cls: type) -> dict[str, str]:
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


def introduction(cls: type) -> str:
    """Returns the sentences of a docstring before its first entry."""
    lines = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if _ENTRY.match(line):
            break
        lines.append(line)
    return " ".join(" ".join(lines).split())
