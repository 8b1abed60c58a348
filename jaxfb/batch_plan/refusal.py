"""How a batch plan says no: the rule, the values, the arithmetic, and the nearest choices that are legal.

Part of the batch-plan step. Every refusal is a ValueError raised before anything is traced.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_SCAN_LIMIT = 100_000

Choice = Mapping[str, Any]


class PlanError(ValueError):
    """An impossible plan. `choices`: changes of arguments, each of which alone makes the same call legal."""

    def __init__(self, message: str, choices: Iterable[Choice] = ()):
        super().__init__(message)
        self.choices = tuple(choices)


def positive_int(who: str, name: str, value: Any) -> int:
    """`value` as an int, numpy integers included; bool, floats, zero and negatives are refused."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise PlanError(f"[{who}] {name} must be a positive int, got {value!r}")
    return number


def one_of(who: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses a word outside `allowed`, naming the closest one."""
    if isinstance(value, str) and value in allowed:
        return
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f'did you mean "{close[0]}"? It' if close else "it"
    raise PlanError(
        f"[{who}] unknown {name} {value!r}; {hint} must be one of {', '.join(allowed)}",
        [{name: word} for word in close],
    )


def around(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and just above a `value` that is not one; never 0."""
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def nearest(value: int, highest: int, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """The nearest legal numbers below and above `value` in 1..highest, by looking at each."""
    top = min(value - 1, highest)
    below = range(top, max(0, top - _SCAN_LIMIT), -1)
    above = range(value + 1, min(highest, value + _SCAN_LIMIT) + 1)
    found = (next(filter(is_legal, side), None) for side in (below, above))
    return tuple(number for number in found if number is not None)


def offer(choices: Sequence[Choice], subject: str = "") -> str:
    """'; use 96 or 128, or remainder="pad"': the choices in words; the sentence's subject is not repeated."""
    values: dict[str, list[str]] = {}
    for choice in choices:
        (name, first), *rest = choice.items()
        text = _quoted(first) + "".join(f" with {key}={_quoted(value)}" for key, value in rest)
        values.setdefault(name, []).append(text)
    options = [("" if name == subject else f"{name}=") + " or ".join(texts) for name, texts in values.items()]
    return f"; use {', or '.join(options)}" if options else ""


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
