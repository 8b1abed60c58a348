"""One tensor shard's view of a job: XLA cuts the automatic axis `tensor` only after tracing.

So the step is traced without that axis, with the sizes that a shard has, and what shards add up is put in by hand.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxfb.planner.job import Job, abstract_mesh, make_job
from jaxfb.planner.program import Op, Region, sharded_part

_CUT = ("num_heads", "num_kv_heads", "mlp_size", "expert_mlp_size", "shared_expert_size", "vocab_size")
_IN_STEPS = ("all_gather", "reduce_scatter")


def traced_shard(job: Job) -> tuple[Job, Region]:
    """Returns the job that one tensor shard has, and its traced step."""
    local = _one_shard(job)
    region = sharded_part(local.step.trace(local.state, local.batch).jaxpr)
    if local is not job:
        _in_one_step(region)
    return local, region


def tensor_sums(job: Job) -> tuple[int, float]:
    """Returns (how many, bytes of one): hidden states that tensor shards add up, two a layer in each direction and
    two more where the forward runs again; and one of the embedding."""
    config, plan, sizes = job.config, job.plan, job.sizes
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    tokens = plan.rows_per_microbatch * config.data.sequence_length // job.mesh.shape["context"]
    layers = -(-sizes.num_layers // job.mesh.shape["pipe"])
    a_layer = 6 if config.parallel.remat in ("layer", "full") else 4
    return plan.num_microbatches * (a_layer * layers + 1), tokens * sizes.hidden_size * width


def _one_shard(job: Job) -> Job:
    tensor = job.mesh.shape["tensor"]
    if tensor == 1:
        return job
    sizes = replace(job.sizes, **{name: -(-getattr(job.sizes, name) // tensor) for name in _CUT})
    config = replace(job.config, mesh=replace(job.config.mesh, tensor=1))
    mesh = abstract_mesh(config, job.mesh.size // tensor, job.mesh.abstract_device)
    return make_job(config, mesh, sizes)


def _in_one_step(region: Region) -> None:
    """Joins the two steps of collectives: without tensor an axis may be all of the mesh, of the job's it is not."""
    joined: set[Op] = set()
    for op in region.ops:
        for inner in op.regions:
            _in_one_step(inner)
        first = op.inputs[0].maker if op.name in _IN_STEPS else None
        if first is not None and first.name == op.name and first.params.get("axis_index_groups"):
            given = first.inputs[0]
            given.uses = [op if use is first else use for use in given.uses]
            op.inputs, op.params = [given], {**op.params, "axis_index_groups": None}
            joined.add(first)
    region.ops = [op for op in region.ops if op not in joined]
    for position, op in enumerate(region.ops):
        op.position = position
