"""Checks of what a caller hands to forward and backward; each refusal is one sentence that names the argument."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfb.batch_plan import BatchPlan
from jaxfb.mesh import AXES, axis_size, data_parallel
from jaxfb.parallel.annotations import check_kinds
from jaxfb.parallel.sharding import axes_of
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import INT64, Refused, choice, function_of, instance, integer, name_of, shown
from jaxfb.trainable import Patterns, pruned
from jaxfb.types import Counted, Halves, Pipelined, PyTree, VocabularyParallel

_RNG = "; rng is an array of keys, one for each row, or None"
_LOSS_FN = "(params, microbatch, rng)"
_STAGES = {
    "embed": "(outer, microbatch, rng)",
    "layer": "(layer_params, hidden, microbatch, rng)",
    "head": "(outer, hidden, microbatch, rng)",
}
_OPTIONAL = {
    "param_specs": "(params)",
    "unembed": "(outer, hidden)",
    "layer_piece": "(layer_params, hidden, microbatch, rng, piece)",
    "check": "(microbatch, num_parts)",
    "tables": "(outer)",
}
_GROUPS: dict[str, tuple[type, dict[str, str]]] = {
    "vocabulary": (
        VocabularyParallel,
        {
            "dims": "(outer)",
            "embed": "(outer, microbatch, rng, axis)",
            "head": "(outer, hidden, microbatch, rng, axis)",
            "shared": "(outer)",
        },
    ),
    "counted": (
        Counted,
        {"leaves": "(params)", "before": "(params, metrics)", "after": "(params, metrics)"},
    ),
    "halves": (
        Halves,
        {
            "first": "(layer_params, hidden, microbatch, rng)",
            "second": "(layer_params, hidden, microbatch, rng, beside)",
        },
    ),
}
_MODEL = f"a loss function {_LOSS_FN} -> LossOutput or Sum, or a jaxfb.Pipelined(embed, layer, head)"
_WITHOUT_THE_REST = (
    "leave it out and close over it, by eqx.partition(model, eqx.is_inexact_array) in Equinox or "
    "nnx.split(model, nnx.Param, ...) in Flax NNX"
)


def check_model(model: Any) -> None:
    """Raises ValueError for what is neither a loss function nor a `Pipelined`, or takes other arguments than these."""
    if isinstance(model, Pipelined):
        for name, arguments in _STAGES.items():
            _check_function(f"Pipelined.{name}", getattr(model, name), arguments)
        _check_optional(model)
    elif not callable(model) or isinstance(model, type):
        raise Refused(f"model must be {_MODEL}, got {shown(model)}")
    else:
        _check_function("a loss function", model, _LOSS_FN)
    try:
        hash(model)
    except TypeError as error:
        raise Refused(
            f"a model must be hashable, since it decides which compiled program runs, but {name_of(model)} is not "
            f"({error}); write a plain function {_LOSS_FN} that is given its arrays in params"
        ) from None


def _check_optional(model: Pipelined) -> None:
    """Raises ValueError for a member of a `Pipelined` beside its three functions that is not what it must be."""
    for name, arguments in _OPTIONAL.items():
        if getattr(model, name) is not None:
            _check_function(f"Pipelined.{name}", getattr(model, name), arguments)
    for name, (kind, functions) in _GROUPS.items():
        group = getattr(model, name)
        if group is None:
            continue
        instance(f"Pipelined.{name}", group, kind, f"a jaxfb.types.{kind.__name__} or None")
        for part, arguments in functions.items():
            if (given := getattr(group, part)) is not None:
                _check_function(f"Pipelined.{name}.{part}", given, arguments)


def check_plan(plan: Any, mesh: Mesh, forward_only: bool) -> None:
    """Raises ValueError for a plan of another purpose, or for another number of replicas than the mesh has."""
    if not isinstance(plan, BatchPlan):
        raise Refused(
            f"plan must be a jaxfb.BatchPlan, got {shown(plan)}; sizes are given there and nowhere else"
        )
    if not forward_only and plan.purpose != "critic":
        plan.require("train")
    replicas = data_parallel(mesh)
    if plan.data_parallel != replicas:
        raise Refused(
            f"plan {plan.purpose!r} is for data_parallel={plan.data_parallel} replicas, the mesh has "
            f"data * fsdp * expert = {replicas}; make the plan with data_parallel={replicas}"
        )
    context = axis_size(mesh, "context")
    if plan.max_context not in (None, context):
        raise Refused(
            f"plan {plan.purpose!r} has max_context={plan.max_context}, the mesh has context={context}; make the plan "
            f"with max_context={context}",
            [{"max_context": context}],
        )


def check_params(
    params: PyTree, forward_only: bool, concrete: bool = False, trainable: Patterns | None = None
) -> None:
    """Raises ValueError for a leaf that is not an array or, where a backward trains it, not a float array.

    concrete: shapes without numbers are refused too. trainable: as `EngineOptions.trainable`.
    """
    if hasattr(params, "opt_state") and hasattr(params, "params"):
        kind = type(params).__name__
        raise Refused(
            f"params must be the parameters alone, got a whole {kind}; hand over state.params of it"
        )
    if inspect.isfunction(params):
        raise Refused(f"params must be a tree of arrays, got the function {name_of(params)}; call it first")
    leaves = leaves_of("params", params)
    if not forward_only:
        check_kinds(params)
    if not leaves and not forward_only:
        raise Refused(f"params must have at least one float array to have a gradient, got {shown(params)}")
    for path, leaf in leaves:
        _check_param(f"params{jax.tree_util.keystr(path)}", leaf, concrete)
    if concrete:
        check_alive("params", params)
    if not forward_only:
        _check_trained(pruned(trainable, params))


def _check_param(name: str, leaf: Any, concrete: bool) -> None:
    """Raises ValueError for a parameter that is no array of numbers; name: of the leaf, such as params['w']."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and _is_finite(leaf)
        advice = f"make it jnp.asarray({float(leaf)})" if number else _WITHOUT_THE_REST
        raise Refused(f"every parameter must be an array, {name} is {shown(leaf)}; {advice}")
    if not is_plain(leaf):
        raise Refused(
            f"every parameter must be a plain array, {name} is a {type(leaf).__name__} of {leaf.dtype.str}; "
            "convert it with np.asarray(leaf, 'float32')"
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise Refused(
            f"every parameter must be an array of numbers, {name} is {leaf.dtype}; pass a key as rng, keys of rows "
            "in the batch, or leave it out and close over it"
        )
    if concrete and isinstance(leaf, jax.ShapeDtypeStruct):
        raise Refused(
            f"every parameter must be an array, {name} is a mere shape, {shown(leaf)}; initialize it first"
        )


def check_alive(name: str, tree: PyTree) -> None:
    """Raises ValueError if an array of a tree is gone because a compiled function overwrote it."""
    if (place := deleted_leaf(tree)) is not None:
        raise Refused(
            f"{name}{place} is deleted: a compiled function overwrote it, by donate_argnums of jax.jit or as the state "
            "of a train step; give a copy that was made before, or what that function returned"
        )


def deleted_leaf(tree: PyTree) -> str | None:
    """Returns the path of an array that a compiled function has overwritten; None where there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
            return jax.tree_util.keystr(path)
    return None


def is_plain(leaf: Any) -> bool:
    """Returns whether JAX can take an array: one of numpy without a mask, in native byte order, of up to 64 bits."""
    if not isinstance(leaf, np.ndarray):
        return True
    native = leaf.dtype.isnative
    too_wide = leaf.dtype in (np.longdouble, np.clongdouble) and np.dtype(np.longdouble) != np.float64
    return native and not too_wide and not isinstance(leaf, np.ma.MaskedArray)


_PARTS = "keep its real and imaginary parts as two float arrays, and put them together in the loss: lax.complex(a, b)"
_FROZEN = "freeze it (trainable=[...] names those that are trained), or pass it in the batch"


def _check_trained(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Refused(
                f"every parameter must be a float array to have a gradient, params{jax.tree_util.keystr(path)} is "
                f"{leaf.dtype}; {_PARTS if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else _FROZEN}"
            )
        if jnp.finfo(leaf.dtype).bits < 16:
            raise Refused(
                f"every trained parameter must have at least 16 bits, params{jax.tree_util.keystr(path)} is "
                f"{leaf.dtype}; keep it in float32 or bfloat16 and cast it in the loss function, or freeze it "
                "(trainable=[...] names those that are trained)"
            )


def leaves_of(name: str, tree: PyTree) -> list[tuple]:
    """Returns (path, leaf) of every leaf; ValueError for what JAX cannot take apart, as keys that do not compare."""
    try:
        return jax.tree_util.tree_leaves_with_path(tree)
    except Exception as error:  # of a tree that holds itself, or from somebody else's class
        raise Refused(
            f"{name} must be a pytree of arrays, but JAX cannot flatten it: {shown(error)}"
        ) from None


def check_accum_dtype(accum_dtype: Any, plan: BatchPlan) -> None:
    """Warns of a sum over several microbatches in fewer bits than float32 has."""
    if accum_dtype is not None and jnp.finfo(accum_dtype).bits < 32 and plan.num_microbatches != 1:
        warnings.warn(
            f"accum_dtype={accum_dtype} sums {plan.num_microbatches or 'several'} microbatches below float32; "
            "leave it None unless the memory is worth the lost bits",
            stacklevel=4,
        )


def check_reduce_dtype(reduce_dtype: Any, accum_dtype: Any) -> None:
    """Raises ValueError for a dtype of sums over devices that is wider than that of sums over microbatches."""
    accum = jnp.dtype(accum_dtype)
    if reduce_dtype is not None and jnp.finfo(reduce_dtype).bits > jnp.finfo(accum).bits:
        raise Refused(
            f"reduce_dtype={reduce_dtype} is wider than {accum.name}, the accum_dtype to which sums over devices are "
            f"added; use reduce_dtype={accum.name}, or None for the same",
            [{"reduce_dtype": accum.name}, {"reduce_dtype": None}],
        )


def checked_scale(grad_scale: Any) -> float | jax.Array:
    """Returns `grad_scale` as a float, or as the array that it is; ValueError if it is not a number or not finite."""
    if not _is_scale(grad_scale):
        raise Refused(
            f"grad_scale must be one finite number, the factor of the gradients, got {shown(grad_scale)}"
        )
    return grad_scale if hasattr(grad_scale, "dtype") else float(grad_scale)


def _is_scale(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array)):
        return not value.shape and bool(jnp.issubdtype(value.dtype, jnp.floating))
    return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)


def checked_weights(weights: Any, normalize: str) -> dict | None:
    """Returns the weights of a whole update, name -> number, or raises ValueError."""
    if weights is None:
        return None
    if not isinstance(weights, Mapping) or not all(map(_is_number, weights.values())):
        raise Refused(f"weights must be a dict from names of terms to numbers, got {shown(weights)}")
    if normalize != "global":
        raise Refused(
            f'weights go with normalize="global", got normalize={normalize!r}; use None, since the outputs of such '
            "calls are added without them",
            [{"weights": None}],
        )
    return dict(weights)


def _is_number(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array, np.generic)):
        return not value.shape and bool(jnp.issubdtype(value.dtype, jnp.number))
    return isinstance(value, Real)


def specs_like(params: PyTree, specs: PyTree) -> PyTree:
    """Returns the PartitionSpecs that a rule gave for `params`, as a tree of the same kinds of nodes.

    Raises:
      ValueError: a parameter has no PartitionSpec or one of more entries than it has dims or with an unknown axis,
        or a spec no parameter.
    """
    given = dict(jax.tree_util.tree_leaves_with_path(specs))

    def one(path, leaf):
        spec = given.pop(path, None)
        if not isinstance(spec, P) or len(spec) > len(leaf.shape):
            raise Refused(
                "param_specs must give a PartitionSpec for each parameter, of at most as many entries as it has dims; "
                f"for params{jax.tree_util.keystr(path)} of shape {tuple(leaf.shape)} it gives {spec!r}"
            )
        for axis in (axis for entry in spec for axis in axes_of(entry)):
            choice(f"each axis that param_specs gives for params{jax.tree_util.keystr(path)}", axis, AXES)
        return spec

    found = jax.tree_util.tree_map_with_path(one, params)
    if given:
        names = ", ".join(f"params{jax.tree_util.keystr(path)}" for path in given)
        raise Refused(f"param_specs has entries that are not parameters: {names}")
    return found


def prng_keys(rng: Any) -> jax.Array | None:
    """Returns one key or an array of keys: of an integer its `jax.random.key`, of raw uint32 data the keys that it is.

    Raises:
      ValueError: rng is none of these.
    """
    if rng is None:
        return None
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        return jax.random.key(integer("rng", rng, least=-INT64 - 1, most=INT64))
    if isinstance(rng, (jax.Array, np.ndarray)) and rng.ndim:
        with contextlib.suppress(TypeError):  # raised for data that is not a key
            rng = jax.random.wrap_key_data(jnp.asarray(rng)) if rng.dtype == jnp.uint32 else rng
    if isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng
    raise Refused(
        f"rng must be None, an integer, a key such as jax.random.key(0), or keys [rows], got {shown(rng)}"
    )


def float_dtype(name: str, value: Any) -> str | None:
    """Returns the name of a float dtype, or None, or raises ValueError."""
    if value is None:
        return None
    try:
        is_array = isinstance(value, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct))
        dtype = None if is_array else jnp.dtype(value)
    except Exception:  # numpy reads a string as a format, and raises whatever its reader does
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise Refused(
            f"{name} must be a float dtype such as 'float32' or 'bfloat16', or None, got {shown(value)}"
        )
    # by name, since dtype('float64') == None, and these decide whether a compiled program is used again
    return dtype.name


def layer_counts(value: Any) -> tuple[int, ...] | None:
    """Returns `layers_per_stage` as a tuple, or raises ValueError if it is not a sequence of non-negative integers."""
    if value is None:
        return None
    try:
        if isinstance(value, bytes) or any(isinstance(count, bool) for count in value):
            raise TypeError
        counts = tuple(map(operator.index, value))
    except TypeError:
        counts = (-1,)
    if min(counts, default=-1) < 0:
        raise Refused(
            "layers_per_stage must be a list of the numbers of layers of each stage, such as [2, 3, 3, 2], or None, "
            f"got {shown(value)}"
        )
    return counts


def _check_function(what: str, given: Any, arguments: str) -> None:
    function_of(what, given, arguments, more=_RNG if "rng" in arguments else "")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer beyond float64
        return False
