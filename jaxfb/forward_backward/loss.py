"""One microbatch: the user's loss function called and its answer checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.types import Last, LossFn, LossOutput, Max, Min, Pipelined, Sum

PyTree = Any


def checked(loss_fn: LossFn) -> LossFn:
    """`loss_fn`, with a bare Sum turned into a LossOutput and anything else than the contract refused.

    Raises (when traced):
      ValueError: the loss function returned a bare scalar, divided things, or misplaced a quantity.
    """

    def call(params, microbatch, rng) -> LossOutput:
        with jax.named_scope("loss"):
            out = as_loss_output(loss_fn(params, microbatch, rng))
        _check_outputs(out.outputs, microbatch)
        return out

    return call


def check_parts(model: LossFn | Pipelined, microbatches: PyTree, parts_of_each: int) -> None:
    """Asks the model's own `check` whether its head can be split into so many parts of each microbatch.

    Raises:
      ValueError: it cannot.
    """
    if isinstance(model, Pipelined) and model.check is not None:
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), microbatches)
        model.check(rows, parts_of_each * jax.tree.leaves(microbatches)[0].shape[0])


def as_loss_output(out: Any) -> LossOutput:
    """The loss function's answer as a LossOutput of float terms, none narrower than float32."""
    if isinstance(out, Sum):
        out = LossOutput({"loss": out})
    if not isinstance(out, LossOutput):
        raise ValueError(
            f"a loss function must return jaxfb.LossOutput or jaxfb.Sum(total, weight), got {_described(out)}; "
            "return Sum(per_token_loss.sum(), mask.sum()), or wrap a Megatron loss in jaxfb.from_megatron"
        )
    if not out.terms:
        raise ValueError(
            "LossOutput.terms must name at least one jaxfb.Sum, got none; metrics are not the objective"
        )
    for name, term in out.terms.items():
        _check_term(name, term)
    for name, metric in out.metrics.items():
        if not isinstance(metric, (Sum, Max, Min, Last)):
            raise ValueError(
                f"metric {name!r} must be a jaxfb.Sum, Max, Min or Last, got {_described(metric)}"
            )
    return LossOutput(
        {name: wide(term) for name, term in out.terms.items()},
        {name: wide(metric) for name, metric in out.metrics.items()},
        out.outputs,
    )


def wide(quantity: Sum | Max | Min | Last) -> Sum | Max | Min | Last:
    """The quantity in arrays whose sums lose nothing: bfloat16 and float16 become float32, what is wider stays.

    A weight that is a Python float is of the total's dtype, so that it does not make a float32 loss float64.
    """
    if isinstance(quantity, Sum) and isinstance(quantity.weight, float):
        quantity = Sum(quantity.total, jnp.asarray(quantity.weight, _at_least_float32(quantity.total).dtype))
    return jax.tree.map(_at_least_float32, quantity)


def _at_least_float32(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    short = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if short else x


def _check_term(name: str, term: Any) -> None:
    if not isinstance(term, Sum):
        raise ValueError(f"term {name!r} must be a jaxfb.Sum(total, weight), got {_described(term)}")
    total, weight = jnp.asarray(term.total), jnp.asarray(1 if term.weight is None else term.weight)
    if total.shape or weight.shape:
        raise ValueError(
            f"term {name!r} must be a scalar sum over a scalar weight, got total {total.shape} and weight "
            f"{weight.shape}; sum over rows and tokens before returning it"
        )
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(f"term {name!r} must have a floating total, got {total.dtype}")


def _check_outputs(outputs: PyTree, microbatch: PyTree) -> None:
    rows = jax.tree.leaves(microbatch)[0].shape[0] if jax.tree.leaves(microbatch) else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if rows is not None and (not jnp.shape(leaf) or jnp.shape(leaf)[0] != rows):
            raise ValueError(
                f"outputs are collected by row: leaf {jax.tree_util.keystr(path)} must be [{rows}, ...], "
                f"got shape {jnp.shape(leaf)}"
            )


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {shape}" if shape is not None else "")
