"""The hyperparameters of an optimizer, checked by name: what none of them can have is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.optim.choose import check, is_injected, real
from jaxfb.refusal import Refused, boolean, function, integer, refuse, shown
from jaxfb.types import PyTree

OF_PARAMS = "from params to a tree of bool"


def like_params(what: str, tree: PyTree, params: PyTree) -> PyTree:
    """Returns the tree of bool that a user's function gave for `params`, or a prefix of it, with one bool for each
    leaf.
    """
    try:
        wide = jax.tree.broadcast(tree, params)
    except ValueError as error:
        raise Refused(
            f"{what} must give a tree of bool like the parameters, or a prefix of it: {shown(error, 200)}"
        ) from None
    for path, leaf in jax.tree_util.tree_leaves_with_path(wide):
        where = jax.tree_util.keystr(path)
        check(
            isinstance(leaf, bool | np.bool_),
            f"{what} must give bools; for params{where} it gives {shown(leaf)}",
        )
    return wide


def checked(who: str, given: dict) -> dict:
    """Returns the hyperparameters; values that no optimizer can have are refused, names where they are used."""

    def one(name, value):
        return value if name not in LEGAL or is_injected(value) else LEGAL[name](who, name, value)

    return {name: one(name, value) for name, value in given.items()}


def _maybe(rule: Callable) -> Callable:
    """Returns the rule, or None."""
    return lambda who, name, value: None if value is None else rule(who, name, value)


def _rule(check: Callable, *how: Any) -> Callable:
    """Returns a check of `jaxfb.refusal` in the form of `LEGAL`."""
    return lambda who, name, value: check(name, value, *how, who=f"{who}:")


def _dtype(who: str, name: str, value: Any) -> Any:
    try:
        floats = jnp.issubdtype(np.dtype(value), jnp.floating) and not hasattr(value, "shape")
    except Exception:  # numpy reads a string as a format, and raises whatever its reader does
        floats = False
    return (
        value
        if floats
        else refuse(name, value, "a floating dtype such as 'bfloat16', or None", who=f"{who}:")
    )


_BELOW_ONE = partial(real, least=0, below=1)
LEGAL: dict[str, Callable] = {
    **dict.fromkeys(("b1", "b2", "momentum"), _BELOW_ONE),
    "eps": partial(real, least=0),
    "mu_dtype": _maybe(_dtype),
    "decay_rate": partial(real, above=0, most=1),
    "clipping_threshold": _maybe(partial(real, above=0)),
    "scale_by_parameter": _rule(boolean),
    "min_dim_size_to_factor": _rule(integer),
    "nesterov": _rule(boolean),
    "ns_steps": _rule(integer),
    "consistent_rms": _maybe(partial(real, above=0)),
    "matrices": _rule(function, OF_PARAMS),
}
"""What a hyperparameter may be, by its name, whatever the optimizer: (who, name, value) -> value."""
