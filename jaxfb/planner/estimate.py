"""What the step needs and does, estimated without a compiler: traced abstractly, then counted. Seconds, any size.

State and batch are exact (shapes and shardings); temporaries are the rules of `liveness` and `moved`; work and traffic
are the traced program's own, loops counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.config import Config
from jaxfb.models.blocked_attention import causal_blocks
from jaxfb.parallel.sharding import abstract, shardings
from jaxfb.planner import gpu, liveness, tpu
from jaxfb.planner.hlo_cost import Traffic, wire_bytes
from jaxfb.planner.job import (
    Job,
    abstract_device,
    abstract_mesh,
    bytes_per_device,
    dense_bytes,
    make_job,
)
from jaxfb.planner.moved import moved_bytes
from jaxfb.planner.program import Op, Region, Value, walk
from jaxfb.planner.roofline import flops, work_seconds
from jaxfb.planner.routing import routed
from jaxfb.planner.tensor_shard import tensor_sums, traced_shard
from jaxfb.planner.topology import Topology

PACKING = {"cpu": 1.06, "gpu": 1.06, "tpu": 1.0}
"""Buffers of many sizes in one heap leave holes, and XLA copies into other layouts; the median over the layouts of
tests/planner/test_estimate.py. XLA for TPUs looks for the tightest packing, and left 0 to 5% of holes."""
_HELD = {"scan", "while", "carried", "dynamic_update_slice", "cond"}
_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}


@dataclass(frozen=True)
class Estimate:
    """Bytes and operations of one device, in one step.

    gradients: the sums that the loop over microbatches carries. activations: what forward keeps for backward at the
    peak. working: the rest of the peak. tensor_sums: are in `traffic` by formula.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    working: int
    flops: float
    work_seconds: float
    traffic: dict[tuple[str, str], Traffic]

    @property
    def arguments(self) -> int:
        return self.parameters + self.optimizer + self.batch

    @property
    def temporaries(self) -> int:
        return self.gradients + self.activations + self.working

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries

    @property
    def wire_seconds(self) -> float:
        return sum(row.seconds for row in self.traffic.values())


def estimate(config: Config, topology: Topology) -> tuple[Job, Estimate]:
    """Returns the abstract job and what it needs.

    Raises:
      ValueError: the mesh does not fit the topology, or the config what `jaxfb train` would refuse.
    """
    flash = topology.platform == "gpu" and gpu.takes_flash(config, topology)
    if flash:
        config = gpu.with_attention(config, "xla")  # cuDNN's is there only with the plugin
    job = make_job(config, abstract_mesh(config, topology.num_devices, abstract_device(topology)))
    local, region = traced_shard(job)
    if flash:
        _without_scores(region, _score_shapes(local))
    peak = liveness.temporaries(region, topology.platform)
    temporaries = int(PACKING[topology.platform] * (peak.bytes + moved_bytes(region, topology.platform)))
    if topology.platform == "cpu":
        temporaries = max(temporaries, 2 * _updated_bytes(job))
    gradients = min(gradient_bytes(job), temporaries)
    held = sum(size for size, made_by, _ in peak.live if made_by in _HELD)
    activations = min(max(0, held - gradients), temporaries - gradients)
    rows = routed(local, region, topology.platform).rows
    bytes_of = tpu.tiled_bytes if topology.platform == "tpu" else dense_bytes
    chip = topology.chip
    flops_rate, bandwidth = (chip.flops, chip.bandwidth) if chip else (math.inf, math.inf)
    counted = Estimate(
        parameters=bytes_per_device(job.state.params, bytes_of),
        optimizer=bytes_per_device(job.state.opt_state, bytes_of),
        batch=bytes_per_device(job.batch, bytes_of),
        gradients=gradients,
        activations=activations,
        working=temporaries - gradients - activations,
        flops=sum(times * flops(op, rows) for op, times in walk(region)),
        work_seconds=work_seconds(region, flops_rate, bandwidth, rows),
        traffic=_traffic(job, region, topology),
    )
    return job, counted


def _updated_bytes(job: Job) -> int:
    """Returns the gradients of one device as the optimizer reads them.

    XLA for CPU gives a fusion one output, so between the last reduction and the new parameters there are two arrays
    of that size: the gradients, and what the moments make of them.
    """
    fb, params = job.step.forward_backward, job.state.params
    return bytes_per_device(abstract(params, shardings(fb.grad_specs(job.step.model, params), job.mesh)))


def gradient_bytes(job: Job) -> int:
    """Returns the gradient sums of one device: like the parameters that the loop holds, in the accumulation dtype."""
    fb, mesh = job.step.forward_backward, job.mesh

    def one(path, leaf) -> int:
        parameter = bytes_per_device(leaf) / leaf.dtype.itemsize
        in_layers = getattr(path[0], "key", None) == "layers"
        whole = fb.fsdp_gather == "step" or (fb.pipe > 1 and not in_layers)
        cut = "fsdp" in jax.tree.leaves(tuple(leaf.sharding.spec))
        wide = jnp.dtype(fb.accum_dtype or jnp.promote_types(leaf.dtype, jnp.float32)).itemsize
        return int(parameter * wide * (mesh.shape["fsdp"] if whole and cut else 1))

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(one, job.state.params)))


def _score_shapes(job: Job) -> set[tuple[int, ...]]:
    """Returns what plain attention makes of a block of queries and the keys they see, heads that share keys apart or
    not.
    """
    length, sizes, rows = job.config.data.sequence_length, job.sizes, job.plan.rows_per_microbatch
    heads, shared = sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads
    blocks = [(block.end - block.first, block.seen) for block in causal_blocks(length)]
    blocks = [(queries, seen) for queries, seen in blocks if seen > sizes.head_size]
    apart = {(rows, heads, shared, queries, seen) for queries, seen in blocks}
    return apart | {(rows, heads, shared * queries, seen) for queries, seen in blocks}


def _without_scores(region: Region, shapes: set[tuple[int, ...]]) -> None:
    """Traces attention as a flash kernel would run, without an array of queries by keys."""

    def leave_out(values: list[Value]) -> None:
        for value in values:
            if value.shape[-4:] in shapes or value.shape[-5:] in shapes:
                value.bytes = 0

    for op in region.ops:
        leave_out(op.outputs)
        for inner in op.regions:
            leave_out(inner.inputs)
            _without_scores(inner, shapes)


def _traffic(job: Job, region: Region, topology: Topology) -> dict[tuple[str, str], Traffic]:
    rows: dict[tuple[str, str], Traffic] = {}
    for op, times in walk(region):
        if kind := _COLLECTIVES.get(op.name):
            axes = tuple(axis for axis in _axes(op) if job.mesh.shape[axis] > 1)
            if axes:
                groups = op.params.get("axis_index_groups")  # of one of two steps, see parallel.collectives
                _add(rows, job, topology, axes, kind, times, _moved(op), len(groups[0]) if groups else None)
    tensor = job.mesh.shape["tensor"]
    if tensor > 1:
        _add(rows, job, topology, ("tensor",), "all-reduce", *tensor_sums(job))
    return rows


def _add(
    rows,
    job: Job,
    topology: Topology,
    axes: tuple,
    kind: str,
    times: int,
    size: float,
    group: int | None = None,
) -> None:
    group = group or math.prod(job.mesh.shape[axis] for axis in axes)
    group = 2 if kind == "collective-permute" else group
    row = rows.setdefault(("+".join(axes), kind), Traffic())
    row.count += times
    row.bytes += times * size
    chip = topology.chip
    rate = chip.group_bandwidth(_group(job, axes)) if chip else math.inf
    seconds = times * wire_bytes(kind, size, group) / rate
    row.seconds += seconds
    row.exposed_seconds += seconds


def _group(job: Job, axes: tuple[str, ...]) -> list[int]:
    """Returns positions in the mesh of the first group along those axes."""
    shape = job.mesh.shape
    positions = np.arange(job.mesh.size).reshape(tuple(shape.values()))
    return positions[tuple(slice(None) if axis in axes else 0 for axis in shape)].ravel().tolist()


def _axes(op: Op) -> tuple[str, ...]:
    found = op.params.get("axes") or op.params.get("axis_name") or ()
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _moved(op: Op) -> float:
    return max(_total(op.inputs), _total(op.outputs)) if op.name != "ppermute" else _total(op.inputs)


def _total(values: list[Value]) -> float:
    return sum(value.bytes for value in values)
