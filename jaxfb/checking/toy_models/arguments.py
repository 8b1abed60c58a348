"""Turns a case into the arguments of jaxfb's public functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.tables import random_schedule
from jaxfb.checking.toy_models.toys import tensor_specs
from jaxfb.forward_backward import Microbatches
from jaxfb.mesh import make_mesh
from jaxfb.optim import DynamicLossScale, StaticLossScale
from jaxfb.schedules import Schedule

PyTree = Any
LOSS_SCALES = {None: None, "static": StaticLossScale(8.0), "dynamic": DynamicLossScale(initial=16.0)}


def mesh_of(case: Case) -> Mesh:
    """Makes the case's mesh of the first devices there are."""
    return make_mesh(**case.mesh, devices=jax.devices()[: case.num_devices])


def plan_of(case: Case) -> BatchPlan:
    """Makes the plan of one update."""
    return BatchPlan(
        rows=case.rows,
        rows_per_microbatch=case.rows_per_microbatch,
        data_parallel=case.data_parallel,
        remainder=case.remainder,
    )


def engine_options(case: Case) -> dict[str, Any]:
    """Returns the keyword arguments of `get_forward_backward_func` beside the mesh."""
    options = case.engine_options()
    if case.schedule == "random":
        options["schedule"] = schedule_of(case)
    if case.tensor_specs and case.model == "loss":
        options["param_specs"] = tensor_specs
    return options


def schedule_of(case: Case) -> Schedule:
    """Draws the schedule of a case whose schedule is random."""
    sizes = (case.pipe, case.num_microbatches, case.num_chunks)
    return random_schedule(case.table_seed, *sizes, case.splits_backward)


def rng_of(case: Case) -> jax.Array | None:
    """Makes the PRNG key, or keys, that the engine's function gets."""
    seed = case.data_seed + 3
    if case.rng == "none":
        return None
    if case.rng == "legacy":
        return jax.random.PRNGKey(seed)
    key = jax.random.key(seed)
    return key if case.rng == "key" else jax.random.split(key, case.rows)


def batch_as_called(case: Case, batch: PyTree) -> PyTree:
    """Returns the rows, already cut into microbatches if the case asks for that."""
    if case.call != "split":
        return batch
    shape = (case.num_microbatches, case.rows_per_global_microbatch)
    return Microbatches(jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), batch))


def params_as_called(case: Case, params: PyTree) -> PyTree:
    """Returns the parameters, already on one device if the case asks for that."""
    return jax.device_put(params, jax.devices()[0]) if case.call == "placed" else params


def second_batch(case: Case, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows of a second update: the same, or rows that count nothing, or that make the loss infinite."""
    changes = {}
    if case.second == "empty":
        names = ("mask", "weight", "loss_mask")
        changes = {name: np.zeros_like(batch[name]) for name in names if name in batch}
    if case.second == "nonfinite":
        changes["scale"] = np.full_like(batch["scale"], np.inf)
    return batch | changes if changes else batch
