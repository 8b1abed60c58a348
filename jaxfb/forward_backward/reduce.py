"""Records of all microbatches become those of the global batch: sums, maxima and outputs over replicas."""

from __future__ import annotations

from collections.abc import Callable
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
    return jax.tree.map(lambda v: v[:length], across(lax.psum, padded, axes))


def reduce_metrics(metrics: dict, axes: tuple[str, ...]) -> dict:
    """name -> Sum, Max, Min or Last with [num_microbatches, ...] leaves, to one of each for the global batch."""
    reduce = {Sum: _reduce_sum, Max: _reduce_max, Min: _reduce_min, Last: _reduce_last}
    return {name: reduce[type(metric)](metric, axes) for name, metric in metrics.items()}


def means_of_microbatches(terms: dict[str, Sum]) -> dict[str, jax.Array]:
    """name -> [num_microbatches] of total / weight on this replica, 0 where nothing was counted."""
    return {name: term.value for name, term in terms.items()}


def across(collective: Callable, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Applies psum, pmax or pmin to every leaf; booleans, which have no such collective, travel as int8."""
    if not axes:
        return tree
    numbers = jax.tree.map(lambda leaf: leaf.astype(jnp.int8) if leaf.dtype == bool else leaf, tree)
    return jax.tree.map(lambda old, new: new.astype(old.dtype), tree, collective(numbers, axes))


def _reduce_sum(metric: Sum, axes) -> Sum:
    return across(lax.psum, jax.tree.map(lambda leaf: leaf.sum(0), metric), axes)


def _reduce_max(metric: Max, axes) -> Max:
    return across(lax.pmax, Max(metric.array.max(0)), axes)


def _reduce_min(metric: Min, axes) -> Min:
    return across(lax.pmin, Min(metric.array.min(0)), axes)


def _reduce_last(metric: Last, axes) -> Last:
    """The last replica of the last microbatch holds the last rows; the first of context, the last tokens."""
    here = jnp.asarray(True)
    for axis in axes:
        here &= lax.axis_index(axis) == (0 if axis == "context" else lax.axis_size(axis) - 1)
    last = metric.array[-1]
    return across(lax.psum, Last(jnp.where(here, last, jnp.zeros_like(last))), axes)
