"""Records of all microbatches become those of the global batch: sums, maxima and outputs over replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.types import Last, Max, Min, PyTree, Sum

Metric = TypeVar("Metric", bound=Sum | Max | Min | Last)
RECORD = 256
"""Numbers of a block in which per-microbatch records travel, so that a collective's bytes do not depend on their
number."""


def reduce_records(values: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Sums [num_microbatches] leaves over replicas, in all-reduces of a fixed size."""
    return _in_blocks(values, lambda padded: across(lax.psum, padded, axes))


def reduce_metrics(metrics: Mapping, axes: tuple[str, ...]) -> tuple[dict, dict]:
    """Returns metrics of the global batch and those of each microbatch, both reduced over replicas and context.

    metrics: name -> Sum, Max, Min or Last with [num_microbatches, ...] leaves. The second result costs nothing where
    nobody reads it; where somebody does, its collectives are of a fixed size, and of the kinds of the first.
    """
    each = {name: _in_blocks(metric, lambda m: _reduced(m, axes)) for name, metric in metrics.items()}
    return {name: _reduced(of_all(metric), axes) for name, metric in metrics.items()}, each


def of_all(metric: Metric, axis: int = 0) -> Metric:
    """Returns the metric of all microbatches of this replica, or pieces of a microbatch, from those of each."""
    of_last = lambda leaf, axis: leaf[(slice(None),) * axis + (-1,)]  # noqa: E731
    over = {Sum: jnp.sum, Max: jnp.max, Min: jnp.min, Last: of_last}[type(metric)]
    return jax.tree.map(lambda leaf: over(leaf, axis=axis), metric)


def _reduced(metric: Metric, axes: tuple[str, ...]) -> Metric:
    """Reduces over replicas and context: the last replica has the last rows, the first of context the last tokens."""
    if isinstance(metric, Last):
        here = jnp.asarray(True)
        for axis in axes:
            here &= lax.axis_index(axis) == (0 if axis == "context" else lax.axis_size(axis) - 1)
        metric = masked(here, metric)
    return across(COLLECTIVES[type(metric)], metric, axes)


def pmax(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns `lax.pmax` of every leaf, NaN where a device has NaN, as `jnp.max` does; XLA's may drop it."""
    return jax.tree.map(
        lambda leaf: _largest(leaf, axes) if _may_be_nan(leaf) else lax.pmax(leaf, axes), tree
    )


def pmin(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns `lax.pmin` of every leaf, NaN where a device has NaN."""
    return jax.tree.map(
        lambda leaf: -_largest(-leaf, axes) if _may_be_nan(leaf) else lax.pmin(leaf, axes), tree
    )


def _largest(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    is_nan = jnp.isnan(leaf)
    both = jnp.stack([jnp.where(is_nan, -jnp.inf, leaf), is_nan.astype(leaf.dtype)])
    value, any_nan = lax.pmax(both, axes)
    return jnp.where(any_nan > 0, jnp.nan, value)


def _may_be_nan(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


COLLECTIVES = {Sum: lax.psum, Last: lax.psum, Max: pmax, Min: pmin}
"""What sums up each kind of metric over devices, of which one alone has what a Last counts."""


def _in_blocks(values: PyTree, reduce: Callable[[PyTree], PyTree]) -> PyTree:
    """Applies `reduce` to [num_microbatches, ...] leaves in blocks of about RECORD numbers."""

    def padded(leaf):
        block = max(1, RECORD // max(1, leaf[0].size))
        return jnp.pad(leaf, [(0, -len(leaf) % block)] + [(0, 0)] * (leaf.ndim - 1))

    return jax.tree.map(lambda whole, leaf: whole[: len(leaf)], reduce(jax.tree.map(padded, values)), values)


def masked(counts: jax.Array, tree: PyTree) -> PyTree:
    """Returns the tree where it counts, bool[], and zeros elsewhere."""
    return jax.tree.map(lambda leaf: jnp.where(counts, leaf, jnp.zeros_like(leaf)), tree)


def across(collective: Callable, tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Applies psum, pmax or pmin to every leaf; booleans, which have no such collective, travel as int8.

    16-bit floats travel as float32: sums are then exact, and XLA:CPU aborts on them in a partly automatic region.
    """
    if not axes:
        return tree
    numbers = jax.tree.map(lambda leaf: leaf.astype(_travels_as(leaf.dtype)), tree)
    return jax.tree.map(lambda old, new: new.astype(old.dtype), tree, collective(numbers, axes))


def _travels_as(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.int8
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype
