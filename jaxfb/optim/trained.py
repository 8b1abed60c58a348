"""Restricts an optimizer to the parameters that are trained."""

from __future__ import annotations

from collections.abc import Callable

import optax

from jaxfb.optim.optimizers import Optimizer
from jaxfb.types import PyTree


def of_trained(
    optimizer: optax.GradientTransformation, trained: Callable[[PyTree], PyTree]
) -> optax.GradientTransformation:
    """Returns the optimizer with a state for the trained parameters alone.

    Args:
      optimizer: any optax transformation; an `Optimizer` remains one.
      trained: params -> the same with None in place of each frozen leaf, where gradients and updates have None too.
    """

    def init(params):
        return optimizer.init(trained(params))

    def update(updates, state, params=None, **extra_args):
        given = None if params is None else trained(params)
        return optax.with_extra_args_support(optimizer).update(updates, state, given, **extra_args)

    if isinstance(optimizer, Optimizer):
        rates = optimizer.learning_rate, optimizer.weight_decay
        return Optimizer(init, update, *rates, optimizer.any_order, optimizer.layers_alike)
    return optax.GradientTransformationExtraArgs(init, update)
