"""Things picked by name, and the arguments they take: a misspelt one is refused with the nearest legal."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import INT32, Refused, number, shown
from jaxfb.registry import Registry

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def choose(what: str, name: Any, table: Mapping[str, Any] | Registry) -> Any:
    """Returns table[name], or raises a ValueError such as `unknown optimizer 'adamv'; did you mean 'adamw'?`

    Of a `Registry`, name may be "package.module:attribute" too.
    """
    own = isinstance(table, Registry) and isinstance(name, str) and ":" in name
    if not own and (not isinstance(name, str) or name not in table):
        raise Refused(f"unknown {what} {shown(name)}; {_nearest(name, table)}")
    return table[name]


def build(who: str, builder: Callable, *given: Any, **arguments: Any) -> Any:
    """Calls builder(*given, **arguments), where `arguments` came from the user and are checked by name."""
    legal = list(inspect.signature(builder).parameters)[len(given) :]
    for name in arguments:
        if name not in legal:
            raise Refused(f"{who} does not take {name!r}; {_nearest(name, legal)}")
    parameters = [*inspect.signature(builder).parameters.values()][len(given) :]
    for one in parameters:
        if one.default is one.empty and one.name not in arguments and one.kind not in _OPTIONAL:
            raise Refused(f"{who} needs {one.name!r}, which has no default; give it in options")
    return builder(*given, **arguments)


def check(holds: bool, sentence: str) -> None:
    """Refuses a number: `sentence` is "who: rule with the value; the nearest legal choice"."""
    if not holds:
        raise Refused(sentence)


def real(who: str, name: str, value: Any, **bounds: float) -> int | float:
    """Returns a finite number as one that JAX computes with; ValueError for what is none, or not within the bounds."""
    if isinstance(value, jax.Array) and not value.shape and not is_traced(value):
        value = value.item()
    given = number(name, value, who=f"{who}:", **bounds)
    return given if type(given) is int and abs(given) <= INT32 else float(given)


def is_injected(value: Any) -> bool:
    """Returns whether a number is being traced, as `optax.inject_hyperparams` does; its value is not known."""
    return is_traced(value) and not jnp.shape(value)


def _nearest(name: Any, names: Iterable[str]) -> str:
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if isinstance(name, str) else []
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose from {', '.join(names)}" if names else "it takes nothing more"
