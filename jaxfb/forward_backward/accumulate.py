"""Forward and backward without a pipeline: one `lax.scan` over the microbatches of this replica.

Equals
    grads = 0
    for microbatch, seed in zip(microbatches, seeds):
        grads += grad(lambda p: sum(seed[t] * loss(p, microbatch).terms[t].total for t in terms))(params)
with the sum kept in the accumulation dtype and no collective over the replicas inside (but for ZeRO-2's).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.types import CheckedLossFn, LossOutput, PyTree


def accumulate(
    loss_fn: CheckedLossFn,
    params: PyTree,
    microbatches: PyTree,
    keys: jax.Array | None,
    seeds: dict,
    accum_dtypes: PyTree,
    scatter: Callable[[PyTree], PyTree] | None = None,
    so_far: PyTree | None = None,
) -> tuple[PyTree, LossOutput]:
    """Computes gradients of this replica's rows, seeded and summed, and every microbatch's LossOutput.

    Args:
      params: as the microbatch loop holds them (`parallel.data.compute_params`).
      microbatches: leaves [num_microbatches, rows_per_microbatch, ...].
      keys: [num_microbatches, rows_per_microbatch] PRNG keys, or None.
      seeds: name -> [num_microbatches], the cotangent of each term's total.
      accum_dtypes: tree like params of dtypes.
      scatter: what to make of each microbatch's gradients before they are added; None adds them as they are.
      so_far: a sum to add to, such as that of other rows of the update; None: zeros.
    Returns:
      (tree like params, or like what `scatter` makes of it, in the accumulation dtypes; LossOutput with leaves
      [num_microbatches, ...]).
    """

    def step(grads, inputs):
        microbatch, row_keys, seed = inputs
        with jax.named_scope("forward"):
            totals, vjp, out = jax.vjp(
                lambda p: split_totals(loss_fn(p, microbatch, row_keys)), params, has_aux=True
            )
        with jax.named_scope("backward"):
            (partial,) = vjp({name: seed[name].astype(total.dtype) for name, total in totals.items()})
        with jax.named_scope("accumulate"):
            return jax.tree.map(jnp.add, grads, in_sum(partial)), out

    def in_sum(grads):
        wide = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), grads, accum_dtypes)
        return wide if scatter is None else scatter(wide)

    if so_far is None:
        shapes = jax.eval_shape(in_sum, params)
        so_far = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return lax.scan(step, so_far, (microbatches, keys, seeds))


def forward(
    loss_fn: CheckedLossFn, params: PyTree, microbatches: PyTree, keys: jax.Array | None
) -> LossOutput:
    """Computes every microbatch's LossOutput, leaves [num_microbatches, ...], without a backward."""

    def step(_, inputs):
        with jax.named_scope("forward"):
            return None, loss_fn(params, *inputs)

    return lax.scan(step, None, (microbatches, keys))[1]


def split_totals(out: LossOutput) -> tuple[dict, LossOutput]:
    """Splits an output into what is differentiated, by term, and the output, as `jax.vjp(..., has_aux=True)` wants."""
    return {name: term.total for name, term in out.terms.items()}, out


def added(sums: PyTree, values: PyTree) -> PyTree:
    """Returns sums + values, in the sums' dtypes."""
    return jax.tree.map(lambda leaf, value: leaf + value.astype(leaf.dtype), sums, values)


def empty_sums(params: PyTree, accum_dtypes: PyTree) -> PyTree:
    """Returns zeros for the gradients of the parameters that have a dtype in `accum_dtypes`."""
    return jax.tree.map(
        lambda leaf, dtype: None if dtype is None else jnp.zeros(leaf.shape, dtype), params, accum_dtypes
    )
