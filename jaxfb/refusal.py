"""Defines the errors of a refused call, and checks of single arguments. No jax is imported.

Every refusal is a `ValueError` of one sentence: the name of the argument, the rule, and the value that was given.
`who` is what stands before the name, such as "[train]" or "make_optimizer('adamw'):".
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import MappingProxyType, UnionType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

INT32 = 2**31 - 1
"""The largest count that a train state can hold, for its counters are 32-bit integers."""

INT64 = 2**63 - 1

FLOAT32 = 3.4028234663852886e38
"""The largest finite float32."""

Choice = Mapping[str, Any]


class Refused(ValueError):
    """A call with a wrong argument. `choices`: changes of arguments, each of which alone makes the call legal."""

    def __init__(self, message: str, choices: Iterable[Choice] = ()):
        super().__init__(message)
        self.choices = tuple(choices)


class Missing(Refused, FileNotFoundError):
    """A file or checkpoint that a call needs does not exist; the message is a whole sentence."""


class StorageError(OSError):
    """Something on disk could not be written or read back; the message is a whole sentence."""


def shown(value: Any, width: int = 80) -> str:
    """Returns the repr of any value on one line of at most `width` characters."""
    if isinstance(value, int) and abs(value) >= 10**width:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of somebody else's may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= width else f"{text[: width - 3]}..."


def integer(
    name: str,
    value: Any,
    *,
    who: str = "",
    least: int = 1,
    most: int = INT32,
    error: type[Refused] = Refused,
) -> int:
    """Returns `value` as an int from `least` to `most`, numpy integers included; refuses bools, floats, strings."""
    number = _index(value)
    if number is not None and least <= number <= most:
        return number
    rules = {1: "a positive integer", 0: "an integer that is not negative", -INT64: "an integer of 64 bits"}
    rule = rules.get(least, f"an integer of at least {least}")
    choices = []
    if number is not None:
        nearest = least if number < least else most
        rule += f" of at most {most}" if number > most else ""
        choices = [] if nearest == -INT64 else [{name: nearest}]  # another rule names the least
    raise error(f"{_prefix(who)}{name} must be {rule}, got {shown(value)}", choices)


def number(
    name: str,
    value: Any,
    *,
    who: str = "",
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Returns `value` if it is a finite real number with least <= value <= most and above < value < below.

    Refuses bools, strings, arrays, NaN and infinity.
    """
    real, given_number = (
        isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value),
        cast(Any, value),
    )
    if real and least <= given_number <= most and above < given_number < below:
        return given_number
    bounds = {"of at least": least, "of at most": most, "above": above, "below": below}
    given = [f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)]
    rule = " ".join(["a finite number", " and ".join(given)]).strip()
    closed = [{name: bound} for bound in (least, most) if math.isfinite(bound) and above < bound < below]
    raise Refused(f"{_prefix(who)}{name} must be {rule}, got {shown(value)}", closed)


def boolean(name: str, value: Any, *, who: str = "", error: type[Refused] = Refused) -> bool:
    """Returns `value` if it is True or False; refuses 0, 1 and strings."""
    if value is True or value is False:
        return value
    raise error(
        f"{_prefix(who)}{name} must be True or False, got {shown(value)}", [{name: True}, {name: False}]
    )


def choice(name: str, value: Any, legal: Collection[Any], *, who: str = "") -> Any:
    """Returns `value` if it is one of `legal`; otherwise names the nearest."""
    if any(value is one or (type(value) is type(one) and value == one) for one in legal):
        return value
    words = [one for one in legal if isinstance(one, str)]
    close = difflib.get_close_matches(str(value), words, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(map(repr, legal))
    raise Refused(
        f"{_prefix(who)}{name} must be one of {listed}, got {shown(value)}{hint}",
        [{name: one} for one in close or legal],
    )


def only_legal(choices: Sequence[Choice], accepts: Callable[[Choice], Any]) -> list[Choice]:
    """Returns the choices that `accepts` takes without a refusal; all where it takes none, since more is wrong."""
    legal = []
    for choice in choices:
        try:
            accepts(choice)
        except Refused:
            continue
        legal.append(choice)
    return legal or list(choices)


def check_keywords(
    who: str, given: Iterable[str], known: Collection[str], words: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises TypeError, as Python does of a misspelt keyword, for a name that is not known, with the nearest.

    words: what something is called elsewhere -> its name among `known`.
    """
    for name in given:
        if name not in known:
            near = words.get(name) or difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}; did you mean {near!r}?")


def with_nearest_keyword(
    words: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[Given, Answer]], Callable[Given, Answer]]:
    """Makes a function name the nearest of its arguments where it is given a keyword that it does not have.

    words: as for `check_keywords`.
    """

    def with_check(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
        known = inspect.signature(function).parameters

        @wraps(function)
        def checked(*args: Given.args, **keywords: Given.kwargs) -> Answer:
            check_keywords(function.__qualname__, keywords, known, words)
            return function(*args, **keywords)

        return checked

    return with_check


def function(name: str, value: Any, signature: str, *, who: str = "") -> Callable:
    """Returns `value` if it can be called; `signature` tells how, such as "(params, microbatch, rng)"."""
    if callable(value) and not isinstance(value, type):
        return value
    raise Refused(f"{_prefix(who)}{name} must be a function {signature}, got {shown(value)}")


def name_of(function: Any) -> str:
    """Returns the name of a function, or of the class of an object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


def function_of(name: str, value: Any, arguments: str, *, who: str = "", more: str = "") -> Callable:
    """Returns `value` if it can be called with positional arguments, such as "(params, microbatch, rng)".

    more: what a refusal adds about them.
    """
    given = function(name, value, arguments, who=who)
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # built-in functions have none
        return given
    try:
        signature.bind(*arguments.split(","))
    except TypeError:
        raise Refused(
            f"{_prefix(who)}{name} must take {arguments}, but {name_of(given)} takes {signature}{more}"
        ) from None
    return given


def instance(
    name: str, value: Any, kind: type | UnionType | tuple[type, ...], what: str, *, who: str = ""
) -> Any:
    """Returns `value` if it is an instance of `kind`, which `what` describes, such as "a jaxfb.BatchPlan"."""
    if isinstance(value, kind):
        return value
    refuse(name, value, what, who=who)


def text(name: str, value: Any, *, who: str = "") -> str:
    """Returns `value` if it is a string that can be written in UTF-8, which a half of a surrogate pair cannot."""
    if not isinstance(value, str):
        refuse(name, value, "a string", who=who)
    with contextlib.suppress(UnicodeEncodeError):
        value.encode()
        return value
    with contextlib.suppress(UnicodeError):
        value.encode(errors="surrogateescape").decode()
        raise Refused(
            f"{_prefix(who)}{name} must be text in UTF-8, got {shown(value)}, whose bytes Python read as ASCII "
            "(with PYTHONUTF8=1 it reads UTF-8)"
        )
    refuse(name, value, "text in UTF-8", who=who)


def is_several(value: Any) -> bool:
    """Returns whether a value is things to go through, and no text or array."""
    return isinstance(value, Iterable) and not (isinstance(value, str | bytes) or hasattr(value, "dtype"))


def refuse(name: str, value: Any, rule: str, *, who: str = "") -> NoReturn:
    """Raises `name must be <rule>, got <value>`."""
    raise Refused(f"{_prefix(who)}{name} must be {rule}, got {shown(value)}")


def _prefix(who: str) -> str:
    return f"{who} " if who else ""


def _index(value: Any) -> int | None:
    """Returns the int that `value` is, None for a bool and for all that is not an integer."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False
