"""Calls an optax transformation with those of the engine's extra arguments that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import optax

from jaxfb.refusal import Refused
from jaxfb.types import PyTree
from jaxfb.update.arguments import check_updated

_MISSING = ("required keyword-only argument", "must be provided")
"""How Python, and optax where it looks itself, name an argument that an optimizer was not given."""


def updated(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree, **more: Any
) -> tuple[PyTree, PyTree]:
    """Returns (updates, state) of `optimizer.update`.

    more: extra arguments, such as the loss as `value`; those that it does not take are left out, and so are those that
      a member of a chain does not take.

    Raises:
      ValueError: it needs others, as a line search does, or returns what is not like parameters and state.
    """
    update = optax.with_extra_args_support(optimizer).update
    taken = inspect.signature(update).parameters
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        more = {name: value for name, value in more.items() if name in taken}
    try:
        updates, new = update(grads, state, params, **more)
    except (TypeError, ValueError) as error:
        if unknown := [name for name in more if f"unexpected keyword argument '{name}'" in str(error)]:
            # a chain takes any argument, and hands each to all of its members
            fewer = {name: value for name, value in more.items() if name not in unknown}
            return updated(optimizer, grads, state, params, **fewer)
        if not any(words in str(error) for words in _MISSING):
            raise
        *names, last = ("gradients", "parameters", *more)
        raise Refused(
            f"the optimizer needs arguments beside {', '.join(names)} and {last} ({error}); use one that does not, "
            "such as optax.lbfgs(linesearch=None) in place of optax.lbfgs()"
        ) from error
    check_updated(updates, new, params, state)
    return updates, new
