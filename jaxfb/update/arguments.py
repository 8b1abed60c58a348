"""Checks of what a caller hands to a train step; each refusal is one sentence that names the argument."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfb import gradients
from jaxfb.forward_backward.arguments import deleted_leaf, prng_keys
from jaxfb.forward_backward.options import LAYER_ORDERS
from jaxfb.optim.loss_scale import DynamicLossScale, StaticLossScale
from jaxfb.output import ForwardBackwardOutput, check_complete
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused, boolean, choice, function_of, integer, refuse, shown
from jaxfb.types import Counted, PyTree

_OWN_STEPS = (optax.LookaheadState, optax.MultiStepsState, optax.ApplyEvery)
"""States of optimizers that count steps within a step, which `check_kept` refuses or warns of."""


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what has not the two functions of an optax transformation."""
    functions = (getattr(optimizer, "init", None), getattr(optimizer, "update", None))
    if isinstance(optimizer, type) or not all(map(callable, functions)):
        refuse(
            "optimizer",
            optimizer,
            "an optax transformation, such as jaxfb.make_optimizer('adamw', learning_rate=1e-3) or optax.adam(1e-3)",
        )


def check_kept(opt_state: PyTree) -> PyTree:
    """Returns a fresh state of an optimizer, of arrays alone; warns where it accumulates over updates.

    Raises:
      ValueError: it holds what is not a number, or is that of an optimizer that a train step cannot apply.
    """
    kinds = _own_steps(opt_state)
    if optax.LookaheadState in kinds:
        raise Refused(
            "optax.lookahead has two sets of parameters, fast and slow, and a train step has one; pass the optimizer "
            "inside it without lookahead"
        )
    if kinds & {optax.MultiStepsState, optax.ApplyEvery}:
        warnings.warn(
            "the optimizer accumulates over several updates (optax.MultiSteps or apply_every), so that most of them "
            "change no parameter although state.step counts each; leave that out and give all rows to one update, "
            "BatchPlan(rows=..., rows_per_microbatch=...), which accumulates exactly",
            stacklevel=4,
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise Refused(
                f"the state of the optimizer must be a tree of arrays, but optimizer.init(params)"
                f"{jax.tree_util.keystr(path)} is {shown(leaf)}"
            )
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf, type(leaf)), opt_state
    )


def _own_steps(opt_state: PyTree) -> set[type]:
    """Returns which kinds of `_OWN_STEPS` a state has, those within one another too."""
    found = [
        node
        for node in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, _OWN_STEPS))
        if isinstance(node, _OWN_STEPS)
    ]
    return {*map(type, found)}.union(*(_own_steps(tuple(node)) for node in found))


def check_updated(updates: PyTree, opt_state: PyTree, params: PyTree, old: PyTree) -> None:
    """Raises ValueError for results of an optimizer that are not like the parameters and its state before."""
    check_like("optimizer.update(...)[0]", updates, params)
    check_like("optimizer.update(...)[1]", opt_state, old, "the state that it was given")


def check_options(max_grad_norm: Any, clip_convention: Any, loss_scale: Any, **flags: Any) -> None:
    """Raises ValueError for an option of `make_train_step` that is not among its legal values."""
    gradients.check_clipping(max_grad_norm, clip_convention)
    check_loss_scale(loss_scale)
    for name, flag in flags.items():
        boolean(name, flag)


def check_loss_scale(loss_scale: Any) -> None:
    """Raises ValueError for what is neither a loss scale nor None."""
    if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale | StaticLossScale):
        refuse("loss_scale", loss_scale, "a jaxfb.optim.DynamicLossScale, a StaticLossScale, or None")


def one_key(rng: Any) -> jax.Array:
    """Returns the PRNG key of a seed, of a key, or of a key's raw data; ValueError for what gives not just one."""
    keys = None if rng is None else prng_keys(rng)
    if keys is None or keys.ndim:
        refuse("rng", rng, "an integer or one key such as jax.random.key(0)")
    return keys


def check_rows(rows: Any, most: int) -> int | jax.Array:
    """Returns a number of rows as an integer; an int32[] of JAX, whose value is not known yet, stays as it is."""
    if isinstance(rows, jax.Array) and jnp.issubdtype(rows.dtype, jnp.integer) and not rows.shape:
        return rows
    return integer("rows", rows, most=most)


def check_limits(limits: Any) -> tuple[float, ...]:
    """Returns the numbers of a `Limits`; ValueError unless they are two that are not nan."""
    numbers = limits if isinstance(limits, tuple) else ()
    if len(numbers) != 2 or not all(isinstance(one, float | int) and one == one for one in numbers):
        refuse("limits", limits, "a Limits, two numbers that may be infinite, or None")
    return tuple(map(float, numbers))


def check_alive(state: PyTree) -> None:
    """Raises ValueError if an array of the state is gone because a step was given it."""
    if (name := deleted_leaf(state)) is not None:
        raise Refused(
            f"state{name} is deleted: a step overwrites the state that it is given; use the one that it returned, or "
            "give it a copy, jax.tree.map(jnp.copy, state)"
        )


def check_apart(state: PyTree, batch: PyTree) -> None:
    """Raises ValueError if an array of the batch is one of the state, which the step overwrites while it reads it."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    given = {id(leaf): path for path, leaf in leaves if isinstance(leaf, jax.Array) and not is_traced(leaf)}
    if given.keys().isdisjoint(map(id, jax.tree.leaves(state))):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if (place := given.get(id(leaf))) is not None:
            batch_leaf, state_leaf = jax.tree_util.keystr(place), jax.tree_util.keystr(path)
            raise Refused(
                f"batch{batch_leaf} is the same array as state{state_leaf}, which a step overwrites; give it a copy, "
                f"jnp.copy(state{state_leaf})"
            )


def check_state(state: Any, optimizer: Any, loss_scale: Any) -> None:
    """Raises ValueError for a state whose parts belong to a step with another optimizer or loss scale."""
    expected = jax.eval_shape(optimizer.init, state.params)
    if jax.tree.structure(state.opt_state) != jax.tree.structure(expected):
        raise Refused(
            "state.opt_state is not of this step's optimizer; make the state with this step's init, or the step with "
            "the optimizer that the state was made with"
        )
    kept = jax.tree.leaves(state.opt_state)
    for (path, wanted), leaf in zip(jax.tree_util.tree_leaves_with_path(expected), kept, strict=True):
        if jnp.shape(leaf) != wanted.shape:
            raise Refused(
                f"state.opt_state{jax.tree_util.keystr(path)} has shape {list(jnp.shape(leaf))}, but this step's "
                f"optimizer keeps {list(wanted.shape)} for state.params; make the state with this step's init, and "
                "change its parameters only to others of the same shapes"
            )
    if (state.loss_scale is None) != (loss_scale is None):
        raise Refused(
            f"state.loss_scale is {'None' if state.loss_scale is None else 'present'}, but this step was made with "
            f"loss_scale={shown(loss_scale)}; make the state with this step's init, or the step with another"
        )


def check_gradients(out: Any, params: PyTree) -> None:
    """Raises ValueError for what is not a complete result of forward_backward calls with such parameters."""
    if not isinstance(out, ForwardBackwardOutput) or out.origin is None:
        refuse("gradients", out, "what step.gradients(state, batch) returns, or a sum of such")
    if out.grads is None:
        raise Refused("gradients has none, it comes from a call with forward_only=True; call without it")
    check_like("gradients", out.grads, params)
    check_complete(out)


def check_changed_gradients(change: Any, state: Any, trained: PyTree, dtypes: PyTree) -> None:
    """Raises ValueError if `change_gradients` returns something other than gradients of these dtypes."""

    def abstract(leaf, dtype):
        wide = dtype if state.loss_scale is None else jnp.promote_types(dtype, jnp.float32)
        return jax.ShapeDtypeStruct(leaf.shape, wide)

    grads = jax.tree.map(abstract, trained, dtypes)
    check_like("change_gradients(gradients, state)", jax.eval_shape(change, grads, state), grads, dtypes=True)


def check_like(name: str, tree: PyTree, like: PyTree, what: str = "params", dtypes: bool = False) -> None:
    """Raises ValueError for a tree of another structure than `like`, which is called `what`, or of other shapes."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        found, wanted = (shown(jax.tree.structure(each)) for each in (tree, like))
        raise Refused(f"{name} must be a tree like {what}, {wanted}, got {found}")
    for (path, leaf), wanted in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(like), strict=True
    ):
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        if leaf.shape != wanted.shape or (dtypes and leaf.dtype != wanted.dtype):
            raise Refused(
                f"{name}{jax.tree_util.keystr(path)} must be {wanted.dtype}{list(wanted.shape)}, got "
                f"{leaf.dtype}{list(leaf.shape)}"
            )


def layer_order_of(given: Any, optimizer: Any, change_gradients: Any, counted: Counted | None) -> str:
    """Returns in which order a step stores layers, "pipeline" or "model"; ValueError if it cannot be the one given."""
    needs = None
    if change_gradients is not None:
        needs = "change_gradients, which receives them in the model's order"
    elif counted is not None and counted.before is not None:
        needs = "a model with Counted.before, which adds leaves in the model's order"
    if given is None:
        return "pipeline" if needs is None and getattr(optimizer, "any_order", False) else "model"
    if choice("layer_order", given, LAYER_ORDERS) == "pipeline" and needs is not None:
        raise Refused(
            f'[train] layer_order="pipeline" does not go with {needs}; use layer_order="model"',
            [{"layer_order": "model"}],
        )
    return given


def check_init_function(params: Any) -> None:
    """Raises ValueError for a class, which is called by mistake only, and for a function that takes no key alone."""
    if isinstance(params, type):
        raise Refused(
            f"params must be a tree of float arrays, or a function from a key to one, got {shown(params)}"
        )
    function_of("params", params, "(key)")
