"""Reads config.json key by key, each with the type that it must have, and remembers which keys were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxfb.refusal import boolean, instance, integer, number

WHO = "[hf] config.json:"
_REQUIRED: Any = object()


class Values(Mapping[str, Any]):
    """A config.json, or a section of it, that remembers which of its keys were read.

    within: what stands before its keys in a refusal, such as "rope_parameters.".
    """

    def __init__(self, values: Mapping[str, Any], within: str = ""):
        self._values, self._within, self.read = values, within, set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[str]:
        """Returns the keys that were never read and are not off."""
        return [name for name, value in self._values.items() if name not in self.read and value]

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns whether a key is true; null is false, as transformers takes it."""
        given = self._given(name, default)
        return given is not None and boolean(self._within + name, given, who=WHO)

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """Returns an integer of at least `least`."""
        return integer(self._within + name, self._given(name, default), who=WHO, least=least)

    def integer_or_none(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Returns an integer of at least `least`, or None for null."""
        return None if self._given(name, default) is None else self.integer(name, default, least=least)

    def number(self, name: str, default: Any = _REQUIRED, **bounds: float) -> float:
        """Returns a finite number within the bounds of `jaxfb.refusal.number`."""
        return number(self._within + name, self._given(name, default), who=WHO, **bounds)

    def number_or_none(self, name: str, default: float | None = None, **bounds: float) -> float | None:
        """Returns a finite number within the bounds, or None for null."""
        return None if self._given(name, default) is None else self.number(name, default, **bounds)

    def several(self, name: str) -> list[Any]:
        """Returns a list, an empty one where the key is null or missing."""
        found = self._given(name, None)
        return [] if found is None else instance(self._within + name, found, list, "a list", who=WHO)

    def section(self, name: str) -> Values:
        """Returns an object, an empty one where the key is null or missing."""
        found = self._given(name, None)
        found = {} if found is None else found
        instance(self._within + name, found, Mapping, "an object", who=WHO)
        return Values(found, f"{self._within}{name}.")

    def _given(self, name: str, default: Any) -> Any:
        if name not in self and default is _REQUIRED:
            raise KeyError(self._within + name)
        return self.get(name, default)
