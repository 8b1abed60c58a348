"""Things picked by name, and the arguments they take: a misspelt one is refused with the nearest legal."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def choose(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """table[name], or a ValueError such as `unknown optimizer 'adamv'; did you mean 'adamw'?`"""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; {_nearest(name, table)}")
    return table[name]


def build(who: str, builder: Callable, *given: Any, **arguments: Any) -> Any:
    """builder(*given, **arguments), where `arguments` came from the user and are checked by name."""
    legal = list(inspect.signature(builder).parameters)[len(given) :]
    for name in arguments:
        if name not in legal:
            raise ValueError(f"{who} does not take {name!r}; {_nearest(name, legal)}")
    return builder(*given, **arguments)


def check(holds: bool, sentence: str) -> None:
    """Refuses a number: `sentence` is "who: rule with the value; the nearest legal choice"."""
    if not holds:
        raise ValueError(sentence)


def _nearest(name: str, names: Iterable[str]) -> str:
    names = sorted(names)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose from {', '.join(names)}" if names else "it takes nothing more"
