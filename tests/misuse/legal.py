"""What is legal for an argument: functions value -> bool, written apart from the checks of jaxfb."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Rule = Callable[[Any], bool]


def nothing(value: Any) -> bool:
    """No value of the pool is legal."""
    return False


def anything(value: Any) -> bool:
    """Every value is legal."""
    return True


def integers(least: float = 1, most: float = 2**31 - 1) -> Rule:
    """Python's and numpy's integers in a range; no bool."""

    def rule(value):
        if isinstance(value, bool | np.bool_):
            return False
        try:
            return least <= operator.index(value) <= most
        except TypeError:
            return False

    return rule


positive_int = integers()


def numbers(
    least: float = -math.inf, most: float = math.inf, above: float = -math.inf, below: float = math.inf
) -> Rule:
    """Finite real numbers in a range; no bool, text or array."""

    def rule(value):
        if isinstance(value, bool | np.bool_ | complex | str | bytes) or not hasattr(value, "__float__"):
            return False
        try:
            finite = math.isfinite(value)
        except (OverflowError, TypeError, ValueError):
            return False
        return bool(finite and least <= value <= most and above < value < below)

    return rule


def maybe(rule: Rule) -> Rule:
    """None, or what the rule allows."""
    return lambda value: value is None or rule(value)


def one_of(legal: Iterable[Any]) -> Rule:
    """One of these values, of the same type."""
    return lambda value: any(type(value) is type(one) and value == one for one in legal)


def boolean(value: Any) -> bool:
    """True or False."""
    return value is True or value is False


def functions(value: Any) -> bool:
    """What can be called and is no class."""
    return callable(value) and not isinstance(value, type)


def texts(value: Any) -> bool:
    """Any text."""
    return isinstance(value, str)


def either(*rules: Rule) -> Rule:
    """What any of the rules allows."""
    return lambda value: any(rule(value) for rule in rules)


float_dtypes = one_of(("float16", "bfloat16", "float32", "float64", "half", "single", "double", *"efd"))
"""Names of dtypes, numpy's short ones too."""
