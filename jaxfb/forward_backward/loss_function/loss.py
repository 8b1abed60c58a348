"""Calls the user's loss function on one microbatch and checks what it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.forward_backward.loss_function.model_errors import explained
from jaxfb.refusal import Refused
from jaxfb.types import CheckedLossFn, Last, LossFn, LossOutput, Max, Min, PyTree, Sum


def checked(loss_fn: LossFn) -> CheckedLossFn:
    """Wraps `loss_fn` to turn a bare Sum into a LossOutput and to refuse whatever breaks the contract.

    Raises (when traced):
      ValueError: the loss function returned a bare scalar, divided things, or misplaced a quantity.
    """

    def call(params, microbatch, rng) -> LossOutput:
        with jax.named_scope("loss"):
            with explained(rng):
                out = loss_fn(params, microbatch, rng)
            out = as_loss_output(out)
        _check_outputs(out.outputs, microbatch)
        return out

    return call


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
