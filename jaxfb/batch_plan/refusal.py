"""Words a batch plan's refusals: the rule, the values, the arithmetic, and the nearest legal choices.

Part of the batch-plan step. Every refusal is a ValueError raised before anything is traced.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from jaxfb.refusal import INT32, Choice, Refused, boolean, integer, shown

MOST_ROWS = 1 << 62
"""The most rows, or tokens, of a whole run: sums of two still fit into 64 bits."""

_SCAN_LIMIT = 20_000


class PlanError(Refused):
    """Refuses an impossible plan. `choices`: changes of arguments, each of which alone makes the same call legal."""


def positive_int(who: str, name: str, value: Any, most: int = INT32) -> int:
    """Returns `value` as an integer from 1 to `most`, numpy integers included; refuses bools and floats."""
    return integer(name, value, who=f"[{who}]", most=most, error=PlanError)


def positive_ints(who: str, name: str, values: Any) -> tuple[int, ...]:
    """Returns a list or a tuple of positive integers as a tuple; refuses an empty one."""
    if not isinstance(values, list | tuple | range) or not values:
        raise PlanError(f"[{who}] {name} must be a list of positive integers, got {shown(values)}")
    return tuple(positive_int(who, name, value) for value in values)


def not_negative(who: str, name: str, value: Any) -> int:
    """Returns `value` as an integer that is not negative, such as a position in a stream of rows."""
    return integer(name, value, who=f"[{who}]", least=0, most=MOST_ROWS, error=PlanError)


def true_or_false(who: str, name: str, value: Any) -> bool:
    """Returns `value` if it is True or False."""
    return boolean(name, value, who=f"[{who}]", error=PlanError)


def one_of(who: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuses a word outside `allowed`, naming the closest one."""
    if isinstance(value, str) and value in allowed:
        return
    close = difflib.get_close_matches(shown(value), allowed, n=1)
    hint = f'did you mean "{close[0]}"? It' if close else "it"
    raise PlanError(
        f"[{who}] unknown {name} {shown(value)}; {hint} must be one of {', '.join(allowed)}",
        [{name: word} for word in close or allowed],
    )


def around(value: int, unit: int) -> tuple[int, ...]:
    """Returns the multiples of `unit` just below and just above a `value` that is not one; never 0."""
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def nearest(value: int, highest: int, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns the nearest legal numbers below and above `value` in 1..highest, by looking at each."""
    top = min(value - 1, highest)
    below = range(top, max(0, top - _SCAN_LIMIT), -1)
    above = range(value + 1, min(highest, value + _SCAN_LIMIT) + 1)
    found = (next(filter(is_legal, side), None) for side in (below, above))
    return tuple(number for number in found if number is not None)


def offer(choices: Sequence[Choice], subject: str = "") -> str:
    """Returns the choices in words, such as '; use 96 or 128, or remainder="pad"'."""
    values: dict[str, list[str]] = {}
    for choice in choices:
        (name, first), *rest = choice.items()
        text = _quoted(first) + "".join(f" with {key}={_quoted(value)}" for key, value in rest)
        values.setdefault(name, []).append(text)
    options = [("" if name == subject else f"{name}=") + " or ".join(texts) for name, texts in values.items()]
    return f"; use {', or '.join(options)}" if options else ""


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
