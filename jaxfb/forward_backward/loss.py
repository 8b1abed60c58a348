"""Calls the user's loss function on one microbatch and checks what it returns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.refusal import Refused, shown
from jaxfb.types import CheckedLossFn, Last, LossFn, LossOutput, Max, Min, PyTree, Sum

_OF_ONE_KEY = ("accepts a single key", "``rngs`` argument")
"""How jax.random and Linen name an array of keys where they need one."""

_FROM_OUTSIDE = "TraceContextError"
"""What Flax raises where a trace changes a Variable that was made before it."""

_OF_OTHER_AXES = re.compile(r"(?:spec=|axis: .* of )(P\(.*?\))(?: and mesh=| is not found in mesh)")
"""How JAX refuses a sharding constraint over axes of which a device computes its own part, or that are none of the
mesh, and the constraint."""

_OF_ANOTHER_MESH = re.compile(r"Context mesh .* should match the mesh of sharding .* passed to")
"""How JAX refuses to index an array that lies on the mesh, and that a function has from outside."""


def checked(loss_fn: LossFn) -> CheckedLossFn:
    """Wraps `loss_fn` to turn a bare Sum into a LossOutput and to refuse whatever breaks the contract.

    Raises (when traced):
      ValueError: the loss function returned a bare scalar, divided things, or misplaced a quantity.
    """

    def call(params, microbatch, rng) -> LossOutput:
        with jax.named_scope("loss"):
            with _keys_of_rows(rng), _own_variables(), _constraints(), _own_arrays():
                out = loss_fn(params, microbatch, rng)
            out = as_loss_output(out)
        _check_outputs(out.outputs, microbatch)
        return out

    return call


@contextmanager
def _keys_of_rows(rng: jax.Array | None) -> Iterator[None]:
    """Refuses a function that takes `rng` for one key, with what is to be written instead."""
    try:
        yield
    except ValueError as error:
        if rng is None or not any(words in str(error) for words in _OF_ONE_KEY):
            raise
        raise Refused(
            "rng must be taken as an array of keys, one for each row of the microbatch, so that dropout does not "
            f"depend on how rows are cut, but the loss function takes it for one key ({shown(str(error))}); draw row "
            "by row, jax.vmap(lambda row, key: ...)(microbatch, rng)"
        ) from error


@contextmanager
def _own_variables() -> Iterator[None]:
    """Refuses a function that changes a Variable of Flax NNX made outside of it, with what is to be written instead."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != _FROM_OUTSIDE:
            raise
        kind = re.search(r"Cannot mutate (\w+)", str(error))
        raise Refused(
            f"the loss function changes a {kind[1] if kind else 'Variable'} of NNX that was made outside of it, as a "
            "BatchNorm and a Dropout do when they are called; put nnx.merge(graph, params, rest, copy=True) together "
            "in the loss function"
        ) from error


@contextmanager
def _constraints() -> Iterator[None]:
    """Refuses a sharding constraint over an axis that is not "tensor", with what is to be written instead."""
    try:
        yield
    except ValueError as error:
        found = _OF_OTHER_AXES.search(str(error))
        if found is None:
            raise
        raise Refused(
            f"a sharding constraint in the model may name no axis but 'tensor', got {found[1]}, since a device is "
            "given its own rows, tokens, experts and layers already; leave the other axes out, or map their logical "
            "names to None in Flax's rules"
        ) from error


@contextmanager
def _own_arrays() -> Iterator[None]:
    """Refuses a function that indexes an array on the mesh from outside of it, with what is to be written instead."""
    try:
        yield
    except ValueError as error:
        if not _OF_ANOTHER_MESH.search(str(error)):
            raise
        raise Refused(
            "the model indexes an array that it has from outside and that lies on a mesh, such as the embedding of a "
            "frozen teacher, which JAX refuses here; make it a part of the parameters, and name those that are trained "
            'in trainable=["student"], or close over jnp.asarray(jax.device_get(array))'
        ) from error


def as_loss_output(out: Any) -> LossOutput:
    """Returns what the loss function returned as a LossOutput of float terms, none narrower than float32.

    Raises:
      ValueError: it is not a LossOutput or Sum, or something in it is not what its place asks for.
    """
    if isinstance(out, Sum):
        out = LossOutput({"loss": out})
    if not isinstance(out, LossOutput):
        raise Refused(
            f"a loss function must return jaxfb.LossOutput or jaxfb.Sum(total, weight), got {_described(out)}; "
            "return Sum(per_token_loss.sum(), mask.sum()), or wrap a Megatron loss in jaxfb.from_megatron"
        )
    terms, metrics = _named("terms", out.terms), _named("metrics", out.metrics)
    if not terms:
        raise Refused(
            "LossOutput.terms must name at least one jaxfb.Sum, got none; metrics are not the objective"
        )
    return LossOutput(
        {name: as_term(name, term) for name, term in terms.items()},
        {name: as_metric(name, metric) for name, metric in metrics.items()},
        out.outputs,
    )


def as_term(name: str, term: Any) -> Sum:
    """Returns a term with a float total [] and a weight [] or None, none narrower than float32.

    Raises:
      ValueError: the term is not a Sum of such.
    """
    if not isinstance(term, Sum):
        raise Refused(f"term {name!r} must be a jaxfb.Sum(total, weight), got {_described(term)}")
    term = _as_sum(f"term {name!r}", term)
    weight_shape = () if term.weight is None else term.weight.shape
    if term.total.shape or weight_shape:
        raise Refused(
            f"term {name!r} must be a scalar sum over a scalar weight, got total {term.total.shape} and weight "
            f"{weight_shape}; sum over rows and tokens before returning it"
        )
    if not jnp.issubdtype(term.total.dtype, jnp.floating):
        raise Refused(f"term {name!r} must have a floating total, got {term.total.dtype}")
    return term


def as_metric(name: str, metric: Any) -> Sum | Max | Min | Last:
    """Returns a metric of arrays none of which is narrower than float32; a Sum's weight has its total's shape.

    Raises:
      ValueError: the metric is not a Sum, Max, Min or Last of numbers, or a weight has another shape than its total.
    """
    if isinstance(metric, (Max, Min, Last)):
        return type(metric)(_at_least_float32(_numbers(f"metric {name!r}", metric.array)))
    if not isinstance(metric, Sum):
        raise Refused(f"metric {name!r} must be a jaxfb.Sum, Max, Min or Last, got {_described(metric)}")
    metric = _as_sum(f"metric {name!r}", metric)
    if metric.weight is None:
        return metric
    if metric.weight.shape not in ((), metric.total.shape):
        raise Refused(
            f"metric {name!r} must have one weight, or one for each of its totals {metric.total.shape}, got weights "
            f"of shape {metric.weight.shape}"
        )
    return Sum(metric.total, jnp.broadcast_to(metric.weight, metric.total.shape))


def _as_sum(what: str, given: Sum) -> Sum:
    """Returns the Sum in arrays whose sums lose nothing: booleans become int32, bfloat16 and float16 become float32.

    A weight that is a Python float is of the total's dtype, so that it does not make a float32 loss float64.
    """
    counted = lambda x: x.astype(jnp.int32) if x.dtype == bool else _at_least_float32(x)  # noqa: E731
    total = counted(_numbers(what, given.total))
    if given.weight is None:
        return Sum(total)
    if isinstance(given.weight, float):
        return Sum(total, jnp.asarray(given.weight, jnp.promote_types(total.dtype, jnp.float32)))
    return Sum(total, counted(_numbers(what, given.weight)))


def _numbers(what: str, value: Any) -> jax.Array:
    try:
        array = None if isinstance(value, (str, bytes)) else jnp.asarray(value)
    except Exception:  # integers beyond 64 bits, and objects whose own conversion fails in any way
        array = None
    if array is None or not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)):
        raise Refused(f"{what} must contain arrays of numbers, got {_described(value)}")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise Refused(
            f"{what} must contain real numbers, got {array.dtype}; take the real part or the modulus"
        )
    return array


def _at_least_float32(x: jax.Array) -> jax.Array:
    short = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if short else x


def _named(field: str, given: Any) -> dict:
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise Refused(
            f"LossOutput.{field} must be a dict from names to quantities such as {{'loss': Sum(total, weight)}}, got "
            f"{_described(given)}"
        )
    return given


def _check_outputs(outputs: PyTree, microbatch: PyTree) -> None:
    rows = jax.tree.leaves(microbatch)[0].shape[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        is_array = (
            isinstance(leaf, (jax.Array, np.ndarray)) and getattr(leaf.dtype, "kind", "V") not in "OSUMm"
        )
        if not is_array or leaf.shape[:1] != (rows,):
            raise Refused(
                f"outputs are collected by row: leaf {jax.tree_util.keystr(path)} must be [{rows}, ...], "
                f"got {f'shape {leaf.shape}' if hasattr(leaf, 'shape') else _described(leaf)}"
            )


def _described(value: Any) -> str:
    """Describes a value in words: its type, and its shape if it is an array, or its keys if it is a dict."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    return f"a {type(value).__name__}"
