"""Names for interchangeable parts: schedules, surrogates, estimators, optimizers and so on. Plain Python.

Each kind of part has one `Registry`, which is the only list of its names. Your own part is registered by a
decorator, or written as "package.module:attribute" wherever a name is expected, so that a config can use it too.
docs/extending.md shows both for each kind.
"""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxfb.refusal import Refused, shown

Part = TypeVar("Part")
OWN = "'package.module:attribute'"


class Registry(Generic[Part]):
    """Parts of one kind by name.

    what:     the kind in words, such as "schedule"; it opens every refusal.
    built_in: name -> "module:attribute" of parts that are imported when they are first used, so that their names are
      known without JAX.
    """

    def __init__(self, what: str, built_in: Mapping[str, str] | None = None):
        self.what = what
        self._parts: dict[str, Part] = {}
        self._paths = dict(built_in or {})

    def register(self, name: str) -> Callable[[Part], Part]:
        """Returns a decorator that files a part under a name; a name that is taken is refused."""

        def add(part: Part) -> Part:
            if name in self._paths or self._parts.get(name, part) is not part:
                raise Refused(f"[{self.what}] the name {name!r} is taken; register under another")
            self._parts[name] = part
            return part

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the registered names, in the order of registration."""
        return (*self._paths, *(name for name in self._parts if name not in self._paths))

    def __getitem__(self, name: str) -> Part:
        """Returns the part of a name, or the one that "package.module:attribute" names.

        Raises:
          ValueError: there is no such part; the sentence gives the nearest name.
        """
        if isinstance(name, str) and name in self._parts:
            return self._parts[name]
        if isinstance(name, str) and name in self._paths:
            return self._parts.setdefault(name, attribute_of(*self._paths[name].split(":")))
        if isinstance(name, str) and ":" in name:
            return load(name, self.what)
        raise self._unknown(name)

    def items(self) -> Iterator[tuple[str, Part]]:
        """Yields every registered name with its part, all of which are imported."""
        return ((name, self[name]) for name in self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.names

    def check(self, name: Any, argument: str = "") -> str:
        """Returns the name itself; refuses one that names nothing. No built-in part is imported.

        argument: what the caller calls it, to be named in the refusal.
        """
        if name in self:
            return name
        try:
            self[name]
        except Refused as error:
            choices = [{argument or self.what: near} for choice in error.choices for near in choice.values()]
            raise Refused(f"{argument}: {error}" if argument else str(error), choices) from error.__cause__
        return name

    def _unknown(self, name: object) -> Refused:
        known = ", ".join(self.names)
        if not isinstance(name, str):
            path = path_of(name)
            rule = f"[{self.what}] unknown {self.what} {shown(name)}, which must be a name"
            if path is None:
                return Refused(f"{rule}: one of {known}, or your own as {OWN}")
            return Refused(f"{rule}; use {path!r} (known: {known})", [{self.what: path}])
        text = name[:100].lower().replace("-", "_")
        near = difflib.get_close_matches(text, self.names, n=1, cutoff=0.0)
        return Refused(
            f"[{self.what}] unknown {self.what} {shown(name)}; use {near[0]!r} (known: {known}), or your own as {OWN}",
            [{self.what: near[0]}],
        )


def load(path: str, what: str) -> Any:
    """Returns the object that "package.module:attribute" names; the working directory is searched too.

    Raises:
      ValueError: there is no such module or attribute, or importing it failed.
    """
    module, _, attribute = path.partition(":")
    if not _is_dotted(module) or not _is_dotted(attribute):
        raise Refused(f"[{what}] {shown(path)} must be written as {OWN}")
    _import_own(module, what, path)
    try:
        return attribute_of(module, attribute)
    except AttributeError:
        raise Refused(f"[{what}] {path!r}: {module} has no {attribute}") from None


def load_plugins(modules: Iterable[str]) -> None:
    """Imports modules for what they register; the working directory is searched too.

    Raises:
      ValueError: a name is not that of a module, or importing it failed.
    """
    for module in modules:
        if not isinstance(module, str) or not _is_dotted(module):
            raise Refused(
                f"[plugins] {shown(module)} must be the name of a module, such as 'my_package.parts'"
            )
        _import_own(module, "plugins", module)


def path_of(part: Any) -> str | None:
    """Returns "module:attribute" of a function or class, None of what cannot be found by such a path."""
    module, attribute = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(attribute, str) and module in sys.modules):
        return None
    try:
        found = operator.attrgetter(attribute)(sys.modules[module])
    except AttributeError:  # made in another function
        return None
    return f"{module}:{attribute}" if found is part else None


def attribute_of(module: str, attribute: str) -> Any:
    """Returns `attribute`, perhaps dotted, of a module that can be imported."""
    return operator.attrgetter(attribute)(import_module(module))


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _import_own(module: str, what: str, path: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        import_module(module)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise Refused(f"[{what}] {path!r} cannot be imported: {shown(error)}") from error
