"""Rows of the run's windows, in order, cut into microbatches and placed where the step wants them.

Step two of the story: data -> batch plan. Rows are split on the host and each device receives its own, so the
step moves no row between devices.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfb.batch_plan import BatchPlan, RunPlan, Window
from jaxfb.data import Loader, PackedRows
from jaxfb.forward_backward import Microbatches, specs_of, split
from jaxfb.parallel.sharding import shardings

HostBatch = dict[str, np.ndarray]


class WindowReader:
    """The rows of each window of a run plan, read ahead; its position is a number of rows.

    On several processes every one reads all rows and keeps those of its devices.
    """

    def __init__(self, rows: PackedRows, plan: RunPlan, seed: int):
        self._loader = Loader(rows, lambda consumed: _rows_from(plan, consumed), seed=seed)

    def read(self, window: Window) -> HostBatch:
        """The window's rows, filled up with rows of zeros to what its plan computes.

        Windows are read in order; rows between two of them (a short window that was dropped) are passed over.
        """
        while True:
            start, batch = self._loader.consumed_rows, next(self._loader)
            if start == window.start:
                return fill(batch, window.rows, window.plan.padded_rows)
            if start > window.start:
                raise ValueError(
                    f"[data] update {window.update} starts at row {window.start}, which was read already"
                )

    def position(self, window: Window | None) -> dict[str, Any]:
        """What `restore` needs to go on after `window` (None: from the start)."""
        consumed = window.start + window.rows if window else 0
        return {**self._loader.state(), "consumed_rows": consumed}

    def restore(self, position: dict[str, Any]) -> None:
        """Continues after the window whose `position` it is; ValueError if that was another text or order."""
        self._loader.restore(position)

    def close(self) -> None:
        """Stops reading ahead."""
        self._loader.close()


def fill(batch: HostBatch, real: int, padded: int) -> HostBatch:
    """The first `real` rows, then rows of zeros, `padded` in all: a row of zeros weighs nothing."""

    def one(leaf: np.ndarray) -> np.ndarray:
        out = np.zeros((padded, *leaf.shape[1:]), leaf.dtype)
        out[:real] = leaf[:real]
        return out

    rows = next(iter(batch.values())).shape[0]
    return batch if rows == real == padded else {name: one(leaf) for name, leaf in batch.items()}


def place(batch: HostBatch, plan: BatchPlan, mesh: Mesh) -> Microbatches:
    """[rows, ...] on the host to [microbatches, rows, ...] on the mesh, cut over replicas and context."""
    microbatches = split(batch, plan, mesh)
    return jax.tree.map(_to_devices, microbatches, shardings(specs_of(microbatches, mesh), mesh))


def _to_devices(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _rows_from(plan: RunPlan, consumed: int) -> int:
    """Rows of the window that starts there, as `RunPlan.windows` cuts them; not its end."""
    rows = plan.plan_at(consumed).real_rows
    if plan.dataset_rows is None:
        return rows
    return min(rows, plan.dataset_rows - consumed % plan.dataset_rows)
