"""Numbers that a user gives a loss: coefficients, clip ranges, temperatures. Refused by name when a loss is made.

A NaN passes every comparison that is written the wrong way round
and then makes every gradient NaN; a string fails deep inside a trace. Both are refused here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any

import numpy as np

from jaxfb.refusal import Refused, shown


def check_number(
    who: str, name: str, value: Any, is_legal: Callable[[Any], bool], rule: str, use: Any
) -> None:
    """Raises ValueError unless `value` is a Python or numpy number, not NaN, that `is_legal` accepts.

    rule: completes "clip_low=2 must be ..." in the message. use: a legal value, shown as advice.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    if not is_number or not _fits(value) or not is_legal(value):
        choices = [{name: use}] if isinstance(use, Real) else []
        raise Refused(f"[{who}] {name}={shown(value)} must be {rule}; use {use}", choices)


def check_word(who: str, name: str, value: Any, legal: Collection[str]) -> None:
    """Raises ValueError unless `value` is one of these words."""
    if isinstance(value, str) and value in legal:
        return
    close = difflib.get_close_matches(value, legal, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    choices = [{name: word} for word in close or legal]
    raise Refused(f"[{who}] {name}={shown(value)} must be one of {', '.join(legal)}{hint}", choices)


def check_positive(who: str, use: Any, **values: Any) -> None:
    """Raises ValueError unless every value is a finite number above 0."""
    for name, value in values.items():
        check_number(who, name, value, lambda x: 0 < x < math.inf, "positive and finite", use)


def check_not_negative(who: str, use: Any, **values: Any) -> None:
    """Raises ValueError unless every value is a finite number, 0 or more."""
    for name, value in values.items():
        check_number(who, name, value, lambda x: 0 <= x < math.inf, "at least 0 and finite", use)


def check_finite(who: str, use: Any, **values: Any) -> None:
    """Raises ValueError unless every value is a finite number of either sign."""
    for name, value in values.items():
        check_number(who, name, value, math.isfinite, "a finite number", use)


def check_share(who: str, use: Any, **values: Any) -> None:
    """Raises ValueError unless every value is a number in [0, 1]."""
    for name, value in values.items():
        check_number(who, name, value, lambda x: 0 <= x <= 1, "a number in [0, 1]", use)


def _fits(value: Any) -> bool:
    """Returns whether the value is a number that float64 can represent, or infinite; not NaN."""
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False
