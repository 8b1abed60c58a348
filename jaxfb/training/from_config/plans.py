"""Makes the batch plans of a config, and the length of its run."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan
from jaxfb.config import Config
from jaxfb.config.custom import CustomConfig
from jaxfb.mesh import data_parallel
from jaxfb.training.from_config.dtypes import AnyConfig


def train_plan(config: Config | CustomConfig, mesh: Mesh) -> BatchPlan:
    """Returns how the rows of one update are cut on this mesh."""
    batch = config.batch
    cut: dict[str, Any] = {name: getattr(batch, name) for name in ("rows_per_microbatch", "num_microbatches")}
    return BatchPlan(
        "train",
        rows=batch.rows,
        data_parallel=data_parallel(mesh),
        remainder=batch.remainder,
        **cut,
    )


def eval_plan(config: Config, mesh: Mesh) -> BatchPlan:
    """Returns how the rows of one evaluation batch are cut; what does not fill it weighs nothing."""
    per_replica = config.eval.rows_per_microbatch or train_plan(config, mesh).rows_per_microbatch
    return BatchPlan(
        "eval",
        rows=config.eval.rows or config.batch.rows,
        rows_per_microbatch=per_replica,
        data_parallel=data_parallel(mesh),
        remainder="pad",
    )


def run_plan(config: Config | CustomConfig, plans: dict[str, BatchPlan], train_rows: int | None) -> RunPlan:
    """Returns the length of the run. Only a length in epochs ends a window of rows where an epoch ends."""
    run = config.run
    return RunPlan(
        plans,
        updates=run.updates,
        samples=run.samples,
        tokens=run.tokens,
        epochs=run.epochs,
        dataset_rows=train_rows if run.epochs else None,
        sequence_length=getattr(config.data, "sequence_length", None),
        ramp_up=config.batch.ramp_up,
        remainder=run.remainder,
    )


def length_of(config: AnyConfig, plan: RunPlan) -> int:
    """Returns the length of the run in `lr.unit`."""
    last = plan.window(plan.total_updates - 1)
    return {"updates": plan.total_updates, "samples": last.end}[config.lr.unit]
