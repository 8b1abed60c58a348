"""Calls an optax transformation with those of the engine's extra arguments that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import optax

from jaxfb.refusal import Refused
from jaxfb.types import PyTree

_MISSING = "required keyword-only argument"


def updated(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree, **more: Any
) -> tuple[PyTree, PyTree]:
    """Returns (updates, state) of `optimizer.update`.

    more: extra arguments, such as the loss as `value`; those that its signature does not have are left out.

    Raises:
      ValueError: it needs others, as a line search does.
    """
    update = optax.with_extra_args_support(optimizer).update
    taken = inspect.signature(update).parameters
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        more = {name: value for name, value in more.items() if name in taken}
    try:
        return update(grads, state, params, **more)
    except TypeError as error:
        if _MISSING not in str(error):
            raise
        raise Refused(
            f"the optimizer needs arguments beside gradients, parameters, value and samples ({error}); use one that "
            "does not, such as optax.lbfgs(linesearch=None) in place of optax.lbfgs()"
        ) from error
