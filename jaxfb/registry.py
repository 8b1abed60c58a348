"""Names for interchangeable parts: schedules, surrogates, estimators, optimizers and so on. Plain Python.

Each kind of part has one `Registry`, which is the only list of its names. A part of one's own is registered by a
decorator, or written as "package.module:attribute" wherever a name is expected, so that a config can use it too.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

from jaxfb.refusal import Refused, shown

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Parts of one kind by name.

    what: the kind in words, such as "schedule"; it opens every refusal.
    """

    def __init__(self, what: str):
        self.what = what
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Returns a decorator that files a part under a name; a name that is taken is refused."""

        def add(part: Part) -> Part:
            if self._parts.get(name, part) is not part:
                raise Refused(f"[{self.what}] the name {name!r} is taken; register under another")
            self._parts[name] = part
            return part

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the registered names, in the order of registration."""
        return tuple(self._parts)

    def __getitem__(self, name: str) -> Part:
        """Returns the part of a name, or the one that "package.module:attribute" names.

        Raises:
          ValueError: there is no such part; the sentence gives the nearest name.
        """
        if isinstance(name, str) and name in self._parts:
            return self._parts[name]
        if isinstance(name, str) and ":" in name:
            return load(name, self.what)
        raise self._unknown(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def check(self, name: str) -> str:
        """Returns the name itself; refuses one that names nothing."""
        self[name]
        return name

    def _unknown(self, name: object) -> Refused:
        text = name if isinstance(name, str) and len(name) < 100 else ""
        near = difflib.get_close_matches(text.lower().replace("-", "_"), self.names, n=1, cutoff=0.0)
        known = ", ".join(self.names)
        return Refused(
            f"[{self.what}] unknown {self.what} {shown(name)}; use {near[0]!r} (known: {known}), or your own as "
            "'package.module:attribute'",
            [{self.what: near[0]}],
        )


def load(path: str, what: str) -> object:
    """Returns the object that "package.module:attribute" names; the working directory is searched too.

    Raises:
      ValueError: there is no such module or attribute, or importing it failed.
    """
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise Refused(f"[{what}] {shown(path)} must be written as 'package.module:attribute'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = import_module(module)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise Refused(f"[{what}] {path!r} cannot be imported: {shown(error)}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise Refused(f"[{what}] {path!r}: {module} has no {attribute}")
        found = getattr(found, name)
    return found
