"""Optimizers by name, on optax: a direction, then decoupled weight decay, then the learning rate.

Part of "one update". All of them end in the same line,

  params += -learning_rate * (direction + weight_decay * params where the mask is True)

with both rates functions of the number of applied updates (or of consumed samples). There is no clipping and
no accumulation in here: `jaxfb.gradients` clips, and `forward_backward` hands over one gradient an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfb.optim.choose import build, check, choose, is_injected, real
from jaxfb.optim.hyperparameters import OF_PARAMS, checked, like_params
from jaxfb.optim.learning_rate import Schedule
from jaxfb.optim.leaves import path_names
from jaxfb.optim.muon import Placed
from jaxfb.optim.weight_decay import decay_mask
from jaxfb.parts import OPTIMIZERS
from jaxfb.refusal import Refused, function, instance, shown
from jaxfb.types import PyTree

IN_ANY_ORDER = ("adamw", "lion", "muon", "sgd")
"""Names of the optimizers that are `any_order`. Not adafactor, whose averages over rows and columns have other shapes
than the parameters."""

_EPS_OF_HALF = 1e-4  # below it float16 loses squared gradients to 0, and eps alone would divide what is left

Rate = float | Callable[[jax.Array], jax.Array]


class OptimizerState(NamedTuple):
    """count: i32[], applied updates. learning_rate: float[], what the last one used. inner: optax's state."""

    count: jax.Array
    learning_rate: jax.Array
    inner: PyTree


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows the learning rate it will use; made by `make_optimizer`.

    init, update:  as in optax; `update(grads, state, params, samples=None, places=None)`. With places, NamedShardings
                   of the parameters, Muon orthogonalises whole matrices on each device.
    learning_rate: count (or samples, see `.learning_rate.unit`) -> float[].
    weight_decay:  the same for the weight decay.
    any_order:     whether stacked layers may stand in any order: what it does to one does not depend on its place, and
                   all that it keeps of a layer has the shape of the parameters.
    layers_alike:  whether it may be called with some of the stacked layers at a time, too.
    """

    learning_rate: Callable[[jax.Array], jax.Array]
    weight_decay: Callable[[jax.Array], jax.Array]
    any_order: bool
    layers_alike: bool

    def __new__(cls, init, update, learning_rate, weight_decay, any_order=False, layers_alike=False):
        self = super().__new__(cls, init, update)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.any_order = any_order
        self.layers_alike = layers_alike
        return self


def make_optimizer(
    name: str = "adamw",
    *,
    learning_rate: Rate,
    weight_decay: Rate = 0.0,
    mask: Callable[[PyTree], PyTree] | None = None,
    **hyperparameters,
) -> Optimizer:
    """Makes an optimizer by name.

    Args:
      name: adamw, lion, adafactor, muon or sgd, one registered in `jaxfb.parts.OPTIMIZERS`, or "module:function": a
        function of hyperparameters that returns an optax transformation whose updates are the directions.
      learning_rate: a number, or a function of the count of applied updates such as `lr_schedule(...)`; with
        unit="samples" a function of the `samples` handed to `update`.
      weight_decay: the same; decoupled, and multiplied by the learning rate, for every name.
      mask: params -> tree of bool (or a prefix of it), the leaves that decay; None: matrices only (`decay_mask`).
      hyperparameters: with their defaults,
        adamw: b1=0.9, b2=0.95, eps=1e-8, mu_dtype=None
        lion: b1=0.9, b2=0.99, mu_dtype=None
        adafactor: decay_rate=0.8, clipping_threshold=1.0, scale_by_parameter=True, eps=1e-30,
          min_dim_size_to_factor=128
        muon: momentum=0.95, nesterov=True, ns_steps=5, consistent_rms=0.2, matrices=`muon_matrices`;
          the AdamW of the leaves that are not matrices: b1=0.9, b2=0.95, eps=1e-8
          consistent_rms gives every matrix an update of that RMS, like AdamW's, so that one learning rate
          serves both (arXiv:2502.16982); None scales by sqrt(max(1, fan_out / fan_in)) as the first Muon did
        sgd: momentum=0.0, nesterov=False
    Returns:
      Optimizer, usable wherever optax takes a transformation. Moments have the dtype of the parameters.
    Raises:
      ValueError: unknown name or hyperparameter, naming the nearest, or a value that it cannot have.
    """
    builder = choose("optimizer", name, OPTIMIZERS)
    who = f"make_optimizer({name!r})"
    _check_by_name(who, builder, hyperparameters)
    mask = decay_mask if mask is None else function("mask", mask, OF_PARAMS, who=f"{who}:")
    direction = build(
        who, function("name", builder, "of hyperparameters", who=who), **checked(who, hyperparameters)
    )
    instance("the result", direction, optax.GradientTransformation, "an optax transformation", who=f"{who}:")
    direction = optax.with_extra_args_support(direction)
    is_ours = builder.__module__.startswith("jaxfb.")
    rate = _as_schedule(who, "learning_rate", learning_rate)
    decay = _as_schedule(who, "weight_decay", weight_decay)

    def decays_of(params):
        return like_params(f"{who}: mask", mask(params), params)

    def init(params):
        decays_of(params)
        if is_ours:
            _warn_of_eps(who, builder, hyperparameters, params)
        else:
            _check_direction(who, direction)
        return OptimizerState(jnp.zeros([], jnp.int32), jnp.asarray(rate(0), float), direction.init(params))

    def update(grads, state, params=None, *, samples=None, places=None, **extra_args):
        check(params is not None, f"{who}: update reads the parameters; call update(grads, state, params)")
        if isinstance(direction, Placed):
            extra_args["places"] = places
        directions, inner = direction.update(grads, state.inner, params, **extra_args)
        lr, wd = _at(rate, state.count, samples), _at(decay, state.count, samples)
        updates = jax.tree.map(lambda *leaf: _step(lr, wd, *leaf), directions, params, decays_of(params))
        return updates, OptimizerState(state.count + 1, lr, inner)

    any_order = name in IN_ANY_ORDER
    # functions of your own may look at how many layers a leaf has
    alike = any_order and mask is decay_mask and "matrices" not in hyperparameters
    return Optimizer(init, update, rate, decay, any_order, alike)


def _check_by_name(who: str, builder: Callable, given: dict) -> None:
    """Refuses the dict that `optax.inject_hyperparams` makes of hyperparameters, of which it would inject none."""
    if (
        isinstance(given.get("hyperparameters"), dict)
        and "hyperparameters" not in signature(builder).parameters
    ):
        call = f"{who[:-1]}, learning_rate=rate)"
        raise Refused(
            f"{who} takes each hyperparameter by its name, got them as hyperparameters="
            f"{shown(given['hyperparameters'])}; to inject rates, write "
            f"optax.inject_hyperparams(lambda rate: {call})(rate=...)"
        )


def _warn_of_eps(who: str, builder: Callable, given: dict, params: PyTree) -> None:
    """Warns of an eps that the parameters' dtype does not have: an update with a gradient of exactly 0 is skipped."""
    eps = given.get("eps", getattr(signature(builder).parameters.get("eps"), "default", 0))
    if is_injected(eps) or not eps:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.floating) and np.asarray(eps, dtype) == 0:
            warnings.warn(
                f"{who}: eps={eps} is 0 in {dtype}, the dtype of params{jax.tree_util.keystr(path)}, so an update in "
                "which a gradient is exactly 0 divides it by 0 and is skipped as not finite; use "
                f'eps={_EPS_OF_HALF}, or parameters in float32 with compute_dtype="{dtype}"',
                stacklevel=3,
            )
            return


def learning_rate_of(
    optimizer: optax.GradientTransformation,
    opt_state: PyTree,
    samples: jax.typing.ArrayLike | None = None,
    *,
    updated: PyTree | None = None,
) -> jax.Array:
    """Returns the learning rate of the update that starts from `opt_state`, float[], for the log; nan if unknown.

    Exact for an `Optimizer`. Any other transformation is asked through its state: `optax.inject_hyperparams`
    and an `Optimizer` inside an `optax.chain` write down the rate that they used, so pass the state that
    came out of the update as `updated` (without it: the rate of the update before, or one set by hand).
    """
    rate = known_learning_rate(optimizer, opt_state, samples, updated=updated)
    return jnp.asarray(jnp.nan, float) if rate is None else rate


def known_learning_rate(
    optimizer: optax.GradientTransformation,
    opt_state: PyTree,
    samples: jax.typing.ArrayLike | None = None,
    *,
    updated: PyTree | None = None,
) -> jax.Array | None:
    """Returns what `learning_rate_of` returns, None where that is nan because the rate is unknown."""
    if isinstance(optimizer, Optimizer):
        return _at(optimizer.learning_rate, opt_state.count, samples)
    leaves = jax.tree_util.tree_leaves_with_path(opt_state if updated is None else updated)
    rates = [leaf for path, leaf in leaves if path_names(path)[-1:] == ["learning_rate"]]
    return jnp.asarray(rates[0], float) if len(rates) == 1 else None


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


def _check_direction(who: str, direction: optax.GradientTransformationExtraArgs) -> None:
    """Refuses a whole optimizer: its updates point downhill, and the minus of a step turns them uphill.

    Called when a state is made, since it computes, after which a process can join no others.
    """
    found = np.zeros(1)
    # one that reads more than gradients and parameters is not checked
    with suppress(Exception), jax.ensure_compile_time_eval():
        ones = {"w": jnp.ones(16, jnp.float32)}
        updates, _ = direction.update(ones, direction.init(ones), ones, value=jnp.float32(1))
        (found,) = map(np.asarray, jax.tree.leaves(updates))
    check(
        not (found < 0).all(),
        f"{who} must give directions, which are multiplied by -learning_rate, but its update of a gradient of ones is "
        "negative, as that of a whole optimizer; name one of optax's scale_by_ functions, or hand the whole optimizer "
        "to jaxfb.Trainer or jaxfb.make_train_step",
    )


def _as_schedule(who: str, name: str, rate: Rate) -> Callable[[Any], jax.Array]:
    """Returns the rate as a function of a count; a function that gives no number for a count is refused."""
    if is_injected(rate):
        return Schedule(lambda count: jnp.asarray(rate, count.dtype))
    if not callable(rate):
        value = real(who, name, rate)
        check(value >= 0, f"{who}: {name}={rate} must be finite and not negative; use 0 or more")
        return Schedule(lambda count: jnp.full_like(count, value))
    function(name, rate, "from a count to a rate", who=f"{who}:")
    try:
        given = jax.eval_shape(lambda count: jnp.asarray(rate(count), float), jnp.int32(0))
    except Exception as error:
        raise Refused(
            f"{who}: {name} must be a function from a count to a rate; called with one it raises {shown(error)}"
        ) from error
    check(
        given.shape == (), f"{who}: {name} must give one number for a count, but gives an array {given.shape}"
    )
    return rate


def _at(schedule: Callable, count: jax.Array, samples: jax.typing.ArrayLike | None) -> jax.Array:
    by_samples = getattr(schedule, "unit", "updates") == "samples"
    check(
        samples is not None or not by_samples,
        'a schedule with unit="samples" needs the number of rows consumed so far; pass samples= to update',
    )
    return jnp.asarray(schedule(samples if by_samples else count), float)


def _step(lr, wd, direction, param, decays):
    # The rates may be float64 beside float32 parameters; the update keeps the parameters' dtype.
    if jnp.shape(direction) != jnp.shape(param):
        raise Refused(
            f"[optimizer] the direction of a parameter must have its shape {list(jnp.shape(param))}, got "
            f"{list(jnp.shape(direction))}"
        )
    dtype = jnp.result_type(direction, param)
    decayed = direction + wd.astype(dtype) * param if decays else direction
    return -lr.astype(dtype) * decayed


def adamw(b1=0.9, b2=0.95, eps=1e-8, mu_dtype=None):
    """Returns the direction of Adam; see `make_optimizer`."""
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)


def lion(b1=0.9, b2=0.99, mu_dtype=None):
    """Returns the direction of Lion; see `make_optimizer`."""
    return optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)


def sgd(momentum=0.0, nesterov=False):
    """Returns the direction of the gradient, or its momentum; see `make_optimizer`."""
    return optax.trace(momentum, nesterov) if momentum else optax.identity()
