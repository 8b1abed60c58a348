"""Rows of the run's windows, in order, cut into microbatches and placed where the step wants them.

The second step of a run: data -> batch plan. Every process reads the rows of its own devices and no others, split
on the host as the global plan specifies, so that the step moves no row between devices.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfb.batch_plan import BatchPlan, RunPlan, Window
from jaxfb.data import Loader
from jaxfb.data.packing import Rows
from jaxfb.forward_backward import Microbatches, specs_of, split
from jaxfb.forward_backward.microbatches import row_keys, rows_spec, split_keys
from jaxfb.parallel.sharding import shardings
from jaxfb.refusal import Refused
from jaxfb.update.train_state import TrainState
from jaxfb.update.train_step import TrainStep

PyTree = Any
HostBatch = dict[str, np.ndarray]


class WindowReader(Loader):
    """Reads this process's rows of each window of a run plan ahead; its position is a number of rows."""

    def __init__(self, rows: Rows, plan: RunPlan, seed: int, mesh: Mesh):
        last = plan.window(plan.total_updates - 1)
        super().__init__(
            rows,
            lambda consumed: _rows_from(plan, consumed),
            seed=seed,
            total_rows=last.end,
            local_rows=lambda consumed, rows: rows_here(plan.plan_at(consumed), mesh),
        )

    def read(self, window: Window) -> HostBatch:
        """Returns the rows of the window that this process holds, with the rows of zeros that fill up its plan.

        Windows are read in order; rows between two of them (a short window that was dropped) are passed over.
        """
        while True:
            start, batch = self.consumed_rows, next(self)
            if start == window.start:
                return batch
            if start > window.start:
                raise Refused(
                    f"[data] update {window.update} starts at row {window.start}, which was read already"
                )

    def position(self, window: Window | None) -> dict[str, Any]:
        """Returns what `restore` needs to continue after `window` (None: from the start)."""
        consumed = window.end if window else 0
        return {**self.state(), "consumed_rows": consumed}


@lru_cache(maxsize=64)
def rows_here(plan: BatchPlan, mesh: Mesh, devices: tuple[Any, ...] | None = None) -> np.ndarray:
    """Returns which rows of the plan's padded batch those devices compute, i64[rows], microbatch by microbatch.

    devices: None is those of this process. Processes that hold other stages, tensor or context shards of the same
    replica get the same rows.
    """
    replicas = replicas_here(plan, mesh, devices)
    cut = [(microbatch, replica) for microbatch in range(plan.num_microbatches) for replica in replicas]
    return np.concatenate([plan.rows_of(*part) for part in cut])


def replicas_here(plan: BatchPlan, mesh: Mesh, devices: tuple[Any, ...] | None = None) -> list[int]:
    """Returns the replicas that those devices (None: of this process) belong to."""
    shares = NamedSharding(mesh, rows_spec(mesh)).devices_indices_map((1, plan.data_parallel))
    mine = [shares[device][1] for device in (mesh.local_devices if devices is None else devices)]
    return sorted({replica for share in mine for replica in range(plan.data_parallel)[share]})


def place(batch: HostBatch, plan: BatchPlan, mesh: Mesh) -> Microbatches:
    """Puts this process's rows, `rows_here`, as [microbatches, rows, ...] on the mesh, cut over replicas and
    context.
    """
    replicas = replicas_here(plan, mesh)
    microbatches = split(batch, _plan_of(plan, len(replicas)), mesh)
    targets = shardings(specs_of(microbatches, mesh), mesh)
    return jax.tree.map(lambda leaf, target: _to_devices(leaf, target, plan, replicas), microbatches, targets)


def parts_of_update(
    step: TrainStep, state: TrainState, batch: HostBatch, plan: BatchPlan
) -> tuple[Any, PyTree, PyTree, jax.Array | None]:
    """Returns what one update computes with, apart: model, parameters, microbatches on the host, keys of their rows.

    Parameters are in the dtype of computing; microbatches [num_microbatches, rows, ...] and keys likewise; for one
    process, which has all rows.
    """
    dtype = step.forward_backward.options.compute_dtype
    cast = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    params = state.params if dtype is None else jax.tree.map(cast, state.params)
    keys = split_keys(row_keys(step.key_of(state), plan), plan)
    return step.model, params, split(batch, plan).leaves, keys


def _plan_of(plan: BatchPlan, replicas: int) -> BatchPlan:
    """Returns the cut of so many of the replicas."""
    return BatchPlan(
        plan.purpose,
        rows=plan.num_microbatches * replicas * plan.rows_per_microbatch,
        rows_per_microbatch=plan.rows_per_microbatch,
        data_parallel=replicas,
    )


def _to_devices(leaf: np.ndarray, target: NamedSharding, plan: BatchPlan, replicas: list[int]) -> jax.Array:
    if len(replicas) == plan.data_parallel and target.is_fully_addressable:
        return jax.device_put(leaf, target)
    each = plan.rows_per_microbatch
    first = {replica * each: place * each for place, replica in enumerate(replicas)}

    def share(index: Any) -> np.ndarray:
        """Returns a device's part: the rows of one replica, or of all where there is one."""
        start, stop, _ = index[1].indices(plan.rows_per_global_microbatch)
        here = first[start]
        return leaf[index[0], here : here + stop - start, *index[2:]]

    shape = (leaf.shape[0], plan.rows_per_global_microbatch, *leaf.shape[2:])
    return jax.make_array_from_callback(shape, target, share)


def _rows_from(plan: RunPlan, consumed: int) -> int:
    """Returns rows of the window that starts there, as `RunPlan.windows` cuts them; not its end."""
    rows = plan.plan_at(consumed).real_rows
    if plan.dataset_rows is None:
        return rows
    return min(rows, plan.dataset_rows - consumed % plan.dataset_rows)
