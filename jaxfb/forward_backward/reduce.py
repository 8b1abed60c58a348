"""Records of all microbatches become those of the global batch: sums, maxima and outputs over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.types import Last, Max, Min, Sum

PyTree = Any
RECORD = (
    256  # per-microbatch records travel in blocks of this many, so their bytes do not depend on their number
)


def reduce_records(values: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Sums [num_microbatches] leaves over replicas, in all-reduces of a fixed size."""
    length = jax.tree.leaves(values)[0].shape[0]
    padded = jax.tree.map(lambda v: jnp.pad(v, (0, -length % RECORD)), values)
    return jax.tree.map(lambda v: v[:length], _psum(padded, axes))


def reduce_metrics(metrics: dict, axes: tuple[str, ...]) -> dict:
    """name -> Sum, Max, Min or Last with [num_microbatches, ...] leaves, to one of each for the global batch."""
    reduce = {Sum: _reduce_sum, Max: _reduce_max, Min: _reduce_min, Last: _reduce_last}
    return {name: reduce[type(metric)](metric, axes) for name, metric in metrics.items()}


def means_of_microbatches(terms: dict[str, Sum]) -> dict[str, jax.Array]:
    """name -> [num_microbatches] of total / weight on this replica, 0 where nothing was counted."""
    return {name: term.value for name, term in terms.items()}


def _reduce_sum(metric: Sum, axes) -> Sum:
    weight = jnp.broadcast_to(metric.weight, metric.total.shape)
    return _psum(Sum(metric.total.sum(0), weight.sum(0)), axes)


def _reduce_max(metric: Max, axes) -> Max:
    return Max(lax.pmax(metric.array.max(0), axes) if axes else metric.array.max(0))


def _reduce_min(metric: Min, axes) -> Min:
    return Min(lax.pmin(metric.array.min(0), axes) if axes else metric.array.min(0))


def _reduce_last(metric: Last, axes) -> Last:
    """The last replica of the last microbatch holds the last rows; the first of context, the last tokens."""
    here = jnp.asarray(True)
    for axis in axes:
        here &= lax.axis_index(axis) == (0 if axis == "context" else lax.axis_size(axis) - 1)
    last = metric.array[-1]
    return Last(_psum(jnp.where(here, last, jnp.zeros_like(last)), axes))


def _psum(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    return lax.psum(tree, axes) if axes else tree
