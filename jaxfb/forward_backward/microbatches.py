"""Rows to microbatches and back: the batch plan's arithmetic applied to arrays.

Microbatch m is rows [m*dp*b, (m+1)*dp*b) of the global batch, and replica d takes the d-th b rows inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfb.batch_plan import BatchPlan

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Microbatches:
    """A global batch already split: leaves [num_microbatches, data_parallel * rows_per_microbatch, ...].

    `split` makes one; a loader that places each process's rows itself hands it to the engine directly.
    """

    leaves: PyTree


def split(batch: PyTree, plan: BatchPlan) -> Microbatches:
    """Cuts [rows, ...] leaves into contiguous microbatches, padding or dropping rows as the plan says.

    Padding rows are zeros, so that every mask in them is zero and they weigh nothing.

    Raises:
      ValueError: a leaf has no row dim, its rows are not the plan's, or a key is a size and not data.
    """
    if isinstance(batch, Microbatches):
        return _check_split(batch, plan)
    _check_batch(batch, plan)
    return Microbatches(jax.tree.map(lambda leaf: _cut(leaf, plan), batch))


def merge(outputs: PyTree, plan: BatchPlan, mesh: Mesh) -> PyTree:
    """[num_microbatches, rows per global microbatch, ...] leaves back to [rows, ...], padding removed.

    Whole on every device, so that a leaf costs one gather whatever the number of microbatches.
    """
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: plan.rows], outputs)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec()))


def row_keys(rng: jax.Array | None, plan: BatchPlan) -> jax.Array | None:
    """One PRNG key a row, keys[rows]: `fold_in(rng, row)`, or `rng` itself if it already holds one a row.

    A row's key depends on its place in the global batch and on nothing about how the batch was split.
    """
    if rng is None:
        return None
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    if rng.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(plan.padded_rows))
    if rng.shape != (plan.rows,):
        raise ValueError(
            f"rng must be one key or one a row: plan has {plan.rows} rows, rng shape is {rng.shape}"
        )
    return rng if plan.padded_rows <= plan.rows else jnp.resize(rng, (plan.padded_rows,))


def split_keys(keys: jax.Array | None, plan: BatchPlan) -> jax.Array | None:
    """[rows] keys to [num_microbatches, rows per global microbatch]."""
    rows = plan.rows_per_global_microbatch
    return None if keys is None else keys[: plan.padded_rows].reshape(plan.num_microbatches, rows)


def _cut(leaf: Any, plan: BatchPlan) -> Any:
    missing = plan.padded_rows - leaf.shape[0]
    if missing > 0:
        pad = jnp.pad if isinstance(leaf, jax.Array) else np.pad
        leaf = pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))
    kept = leaf[: plan.padded_rows]
    return kept.reshape(plan.num_microbatches, plan.rows_per_global_microbatch, *leaf.shape[1:])


def _check_batch(batch: PyTree, plan: BatchPlan) -> None:
    if isinstance(batch, dict):
        plan.check_keys(batch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape") or not leaf.shape:
            raise ValueError(
                "every leaf of a batch must be an array [rows, ...]; "
                f"batch{jax.tree_util.keystr(path)} is {leaf!r}"
            )
        plan.check_rows(leaf.shape[0])


def _check_split(batch: Microbatches, plan: BatchPlan) -> Microbatches:
    wanted = (plan.num_microbatches, plan.rows_per_global_microbatch)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch.leaves):
        if leaf.shape[:2] != wanted:
            raise ValueError(
                f"a split batch must be [microbatches, rows, ...] = {list(wanted)} by plan {plan.purpose!r}; "
                f"leaf {jax.tree_util.keystr(path)} has shape {leaf.shape}"
            )
    return batch
