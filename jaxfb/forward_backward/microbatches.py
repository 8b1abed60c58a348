"""Rows to microbatches and back: the batch plan's arithmetic applied to arrays.

Microbatch m is rows [m*dp*b, (m+1)*dp*b) of the global batch, and replica d takes the d-th b rows inside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward.arguments import check_alive, is_plain, leaves_of, prng_keys
from jaxfb.mesh import axis_size, replica_axes
from jaxfb.parallel.context import zigzag
from jaxfb.parallel.sharding import automatic
from jaxfb.refusal import Refused, shown
from jaxfb.types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatches:
    """Holds a global batch already split: leaves [num_microbatches, data_parallel * rows_per_microbatch, ...].

    Under a context axis the tokens of a leaf [..., length, ...] are in the order of `parallel.context.zigzag`.
    `split` makes one; a loader that places each process's rows itself hands it to the engine directly.
    """

    leaves: PyTree


def split(batch: PyTree, plan: BatchPlan, mesh: Mesh | None = None) -> Microbatches:
    """Cuts [rows, ...] leaves into contiguous microbatches, padding or dropping rows as the plan specifies.

    Padding rows are zeros (of PRNG keys, copies of the last), so that every mask in them is zero and they weigh
    nothing. On a mesh with a context axis, leaves [rows, length, ...] must have one length, which is put in its order.

    Raises:
      ValueError: a leaf has no row dim, its rows are not the plan's, a key is a size and not data, or
        sequences do not divide over context.
    """
    if isinstance(batch, Microbatches):
        return _check_split(batch, plan)
    _check_batch(batch, plan)
    batch = automatic(batch)  # JAX reshapes no dim that explicit axes cut
    if (size := axis_size(mesh, "context")) > 1:
        batch = _in_context_order(batch, size)
    return Microbatches(jax.tree.map(lambda leaf: _cut(leaf, plan), batch))


def specs_of(microbatches: PyTree, mesh: Mesh, over_context: bool = True) -> PyTree:
    """Returns specs of [num_microbatches, rows, (length,) ...] leaves: rows over replicas, length over context."""
    cut = over_context and axis_size(mesh, "context") > 1
    return jax.tree.map(lambda leaf: rows_spec(mesh, cut and len(leaf.shape) > 2), microbatches)


def in_order_of_tokens(microbatches: PyTree, mesh: Mesh) -> PyTree:
    """Undoes the order of a context axis: [num_microbatches, rows, length, ...] leaves with their tokens in order."""
    size = axis_size(mesh, "context")

    def one(leaf):
        return jnp.take(leaf, np.argsort(zigzag(leaf.shape[2], size)), axis=2) if leaf.ndim > 2 else leaf

    return microbatches if size == 1 else jax.tree.map(one, microbatches)


def rows_spec(mesh: Mesh, of_tokens: bool = False) -> PartitionSpec:
    """Returns the spec of one such leaf."""
    length = ("context",) if of_tokens and "context" in mesh.axis_names else ()
    return PartitionSpec(None, replica_axes(mesh), *length)


def merge(outputs: PyTree, of_tokens: PyTree, plan: BatchPlan, mesh: Mesh) -> PyTree:
    """Merges [num_microbatches, rows per global microbatch, ...] leaves to [rows, ...] and removes padding.

    Whole on every device, so that a leaf costs one gather whatever the number of microbatches. `of_tokens`: a
    tree like it of bool, leaves [..., length, ...] that a context axis has in its own order.
    """

    def one(leaf, tokens):
        # not reshape(-1, ...), which an array without elements does not determine
        rows = leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])[: plan.rows]
        if not tokens:
            return rows
        return jnp.take(rows, np.argsort(zigzag(rows.shape[1], axis_size(mesh, "context"))), axis=1)

    rows = jax.tree.map(one, outputs, of_tokens)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec()))


def row_keys(rng: jax.Array | int | None, plan: BatchPlan) -> jax.Array | None:
    """Returns a PRNG key for each row, keys[rows]: `fold_in(rng, row)`, or `rng` itself if it already is one per row.

    A row's key depends on its place in the global batch and on nothing about how the batch was split.

    Warns of keys whose numbers depend on it nevertheless: under `jax.vmap`, JAX draws all rows from the first key.
    """
    rng = prng_keys(rng)
    if rng is None:
        return None
    if (kind := str(jax.random.key_impl(rng))) in ("rbg", "unsafe_rbg"):
        warnings.warn(
            f"rng is a key of the generator {kind!r}, which under jax.vmap draws numbers that depend on how many rows "
            "are drawn for at once: dropout will depend on how the batch is cut. "
            'jax.random.key(seed, impl="threefry2x32") has keys that do not',
            stacklevel=2,
        )
    if rng.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(plan.padded_rows))
    if rng.shape != (plan.rows,):
        raise Refused(
            f"rng must be one key, or one for each row: plan has {plan.rows} rows, rng shape is {rng.shape}"
        )
    return rng if plan.padded_rows <= plan.rows else jnp.resize(rng, (plan.padded_rows,))


def split_keys(keys: jax.Array | None, plan: BatchPlan) -> jax.Array | None:
    """Reshapes keys [rows] to [num_microbatches, rows per global microbatch]."""
    rows = plan.rows_per_global_microbatch
    return None if keys is None else keys[: plan.padded_rows].reshape(plan.num_microbatches, rows)


def _cut(leaf: Any, plan: BatchPlan) -> Any:
    missing = plan.padded_rows - leaf.shape[0]
    if missing > 0 and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # which cannot be zero
        leaf = jnp.concatenate([leaf, jnp.broadcast_to(leaf[-1:], (missing, *leaf.shape[1:]))])
    elif missing > 0:
        pad = jnp.pad if isinstance(leaf, jax.Array) else np.pad
        leaf = pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))
    kept = leaf[: plan.padded_rows]
    return kept.reshape(plan.num_microbatches, plan.rows_per_global_microbatch, *leaf.shape[1:])


def _in_context_order(batch: PyTree, size: int) -> PyTree:
    lengths = {leaf.shape[1] for leaf in jax.tree.leaves(batch) if leaf.ndim > 1}
    if len(lengths) != 1:
        raise Refused(
            f"context {size} cuts each leaf [rows, length, ...] of a batch along its length, which must be the same "
            f"for all; got lengths {sorted(lengths)}"
        )
    order = zigzag(lengths.pop(), size)
    return jax.tree.map(lambda leaf: leaf[:, order] if leaf.ndim > 1 else leaf, batch)


def _check_batch(batch: PyTree, plan: BatchPlan) -> None:
    check_leaves(batch)
    if isinstance(batch, dict):
        plan.check_keys(batch)
    counts = {
        jax.tree_util.keystr(path): leaf.shape[0] for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    for name, rows in counts.items():
        first = next(iter(counts))
        if rows != counts[first]:
            raise Refused(
                f"the leaves of a batch must have one number of rows, but batch{first} has {counts[first]} and "
                f"batch{name} has {rows}"
            )
        plan.check_rows(rows)


def check_leaves(batch: PyTree) -> None:
    """Raises ValueError for a batch that is not a tree of arrays of numbers [rows, ...]."""
    listed = isinstance(batch, (list, tuple)) and batch and all(isinstance(part, Mapping) for part in batch)
    parts = f" of {len(batch)} dicts" if listed else ""
    if parts or isinstance(batch, Iterator):
        raise Refused(
            "batch must be the whole global batch, one tree of arrays [rows, ...], got a "
            f"{type(batch).__name__}{parts}; concatenate microbatches, "
            "jax.tree.map(lambda *parts: jnp.concatenate(parts), *batch), and the plan cuts them again"
        )
    leaves = leaves_of("batch", batch)
    check_alive("batch", batch)
    if not leaves:
        raise Refused(f"batch must have at least one array [rows, ...], got {shown(batch)}")
    for path, leaf in leaves:
        _check_leaf(f"batch{jax.tree_util.keystr(path)}", leaf)


def _check_leaf(name: str, leaf: Any) -> None:
    if not hasattr(leaf, "dtype") or not getattr(leaf, "shape", ()):
        raise Refused(f"every leaf of a batch must be an array [rows, ...]; {name} is {shown(leaf)}")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise Refused(f"every leaf of a batch must be an array, {name} is {shown(leaf)}")
    if not isinstance(leaf, jax.Array | np.ndarray) and not hasattr(leaf, "__jax_array__"):
        raise Refused(
            f"every leaf of a batch must be an array of numpy or JAX, {name} is a "
            f"{type(leaf).__module__}.{type(leaf).__name__}; convert it with np.asarray(leaf)"
        )
    if not is_plain(leaf):
        dtype = "float64" if leaf.dtype == np.longdouble else leaf.dtype.name
        raise Refused(
            f"every leaf of a batch must be a plain array, {name} is a "
            f"{type(leaf).__name__} of {leaf.dtype.str}; convert it with np.asarray(leaf, {dtype!r}), "
            "and give a mask as a leaf beside it"
        )
    if isinstance(leaf, np.ndarray) and (leaf.dtype.kind not in "biufcV" or leaf.dtype.names):
        raise Refused(
            f"every leaf of a batch must be numbers, {name} has dtype {leaf.dtype}; "
            "keep names and other text outside the batch"
        )


def _check_split(batch: Microbatches, plan: BatchPlan) -> Microbatches:
    wanted = (plan.num_microbatches, plan.rows_per_global_microbatch)
    check_leaves(batch.leaves)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch.leaves):
        if leaf.shape[:2] != wanted:
            raise Refused(
                f"the leaves of a split batch must be [microbatches, rows, ...] = {list(wanted)} by plan "
                f"{plan.purpose!r}; leaf {jax.tree_util.keystr(path)} has shape {leaf.shape}"
            )
    return batch
