"""Every way to lay one job over so many devices, and a first guess at each: arithmetic alone, microseconds a guess.

The guess only orders candidates and drops the hopeless; what is left is traced (`estimate`), the best is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.models import splash
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.planner.topology import Topology

SCHEDULES = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4), ("v_shape", 2))
REMAT = ("none", "selective", "layer", "full")
ONE_STAGE_REMAT = REMAT[:-1]
ROWS = (1, 2, 4, 8)
MOST_TENSOR, MOST_PIPE = 8, 16
_RECOMPUTED = {"none": 0.0, "selective": 0.1, "layer": 1 / 3, "full": 2 / 3}
"""Share of forward and backward that runs again in a pipeline; in one stage "full" is "layer"."""


@dataclass(frozen=True)
class Guess:
    """bytes of a device, seconds of a step; both rough."""

    bytes: float
    seconds: float


def candidates(config: Config, sizes: TransformerConfig, num_devices: int) -> Iterator[Config]:
    """The config on every mesh x schedule x chunks x remat x rows a microbatch that divides. The rows of an
    update, the model, the optimizer and mesh.context stay."""
    for mesh in _meshes(config, sizes, num_devices):
        replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        remats = REMAT if mesh["pipe"] > 1 else ONE_STAGE_REMAT
        for (schedule, chunks), remat, rows in itertools.product(_schedules(mesh, sizes), remats, ROWS):
            if config.batch.rows % (replicas * rows):
                continue
            for gather in ("layer", "step") if mesh["fsdp"] > 1 else ("layer",):
                yield _with(config, mesh, schedule, chunks, remat, rows, gather)


def label(config: Config) -> str:
    """Such as `pipe 4 x fsdp 16, 1f1b, remat full, 2 rows, gather layer`."""
    axes = [f"{axis} {size}" for axis, size in vars(config.mesh).items() if size > 1]
    parts = [" x ".join(axes) or "one device"]
    if config.schedule:
        parts.append(config.schedule + (f" {config.chunks}" if config.chunks > 1 else ""))
    parts.append(f"remat {config.parallel.remat}")
    parts.append(f"{config.batch.rows_per_microbatch} rows")
    return ", ".join(parts + ([f"gather {config.parallel.fsdp_gather}"] if config.mesh.fsdp > 1 else []))


def guess(config: Config, sizes: TransformerConfig, topology: Topology) -> Guess:
    """Parameters, moments, gradients and a layer's activations by hand; work, bubble and traffic likewise."""
    return Guess(_bytes(config, sizes, topology), _seconds(config, sizes, topology))


def _meshes(config: Config, sizes: TransformerConfig, devices: int) -> Iterator[dict[str, int]]:
    context = config.mesh.context
    tensors = [n for n in _divisors(devices // context, MOST_TENSOR) if _tensor_divides(sizes, n)]
    pipes = [n for n in _divisors(devices // context, MOST_PIPE) if sizes.num_layers % n == 0]
    experts = _divisors(devices // context, sizes.num_experts) if sizes.num_experts else [1]
    for tensor, pipe, expert in itertools.product(tensors, pipes, experts):
        rest, left = divmod(devices, context * tensor * pipe * expert)
        if left or not rest or (sizes.num_experts and sizes.num_experts % expert):
            continue
        for fsdp in _divisors(rest, rest):
            if fsdp in (1, rest) or 8 <= fsdp <= 64:
                sizes_ = {"pipe": pipe, "data": rest // fsdp, "fsdp": fsdp, "expert": expert}
                yield sizes_ | {"context": context, "tensor": tensor}


def _schedules(mesh: dict[str, int], sizes: TransformerConfig) -> list[tuple[str | None, int]]:
    if mesh["pipe"] == 1:
        return [(None, 1)]
    return [one for one in SCHEDULES if sizes.num_layers % (mesh["pipe"] * one[1]) == 0]


def _with(config: Config, mesh, schedule, chunks, remat, rows, gather) -> Config:
    return replace(
        config,
        mesh=replace(config.mesh, **mesh),
        schedule=schedule,
        chunks=chunks,
        batch=replace(config.batch, rows_per_microbatch=rows, num_microbatches=None),
        parallel=replace(
            config.parallel, remat=remat, fsdp_gather=gather, head_placement=None, layers_per_stage=None
        ),
    )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _tensor_divides(sizes: TransformerConfig, tensor: int) -> bool:
    cut = (sizes.num_heads, sizes.num_kv_heads, sizes.mlp_size, sizes.vocab_size, sizes.expert_mlp_size)
    return all(size % tensor == 0 for size in cut)


def _bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    mesh, layer = config.mesh, config.parallel.fsdp_gather == "layer"
    held = num_params(sizes) / (mesh.pipe * mesh.tensor * (mesh.expert if sizes.num_experts else 1))
    moments = 8 * held / mesh.fsdp / (mesh.data if config.optimizer.sharding == "data" else 1)
    weights = 4 * held / mesh.fsdp + (0 if layer else 2 * held)
    gradients = 4 * held / (mesh.fsdp if layer else 1)
    return weights + moments + gradients + _activation_bytes(config, sizes, topology)


def _activation_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """In two bytes a number: what the layers in flight keep."""
    mesh, length = config.mesh, config.data.sequence_length // config.mesh.context
    tokens = config.batch.rows_per_microbatch * length
    width = sizes.num_heads * sizes.head_size
    products = (2 * width + 2 * sizes.num_kv_heads * sizes.head_size + 3 * _mlp_width(sizes)) / mesh.tensor
    scores = 0 if _flash(config, sizes, topology) else 2 * sizes.num_heads * length / mesh.tensor
    remat = config.parallel.remat
    if config.schedule == "zero_bubble" and remat != "none":
        remat = "selective"  # products wait for the pass that takes the weights' gradients
    kept = {"selective": products, "none": products * 2 + 2.5 * scores}.get(remat, 0.0)
    layers = sizes.num_layers / mesh.pipe
    if mesh.pipe == 1:
        in_flight, inputs = 1.0, layers
    else:
        in_flight = {"v_shape": mesh.pipe}.get(config.schedule, 2 * mesh.pipe - 1 + mesh.pipe / config.chunks)
        inputs = layers if config.parallel.remat != "full" else config.chunks
    return 2 * tokens * in_flight * (inputs * sizes.hidden_size + layers * kept) + 4 * tokens * scores


def _mlp_width(sizes: TransformerConfig) -> int:
    if not sizes.num_experts:
        return sizes.mlp_size
    return sizes.experts_per_token * sizes.expert_mlp_size + sizes.shared_expert_size


def _seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    mesh, chip, length = config.mesh, topology.chip, config.data.sequence_length
    tokens = config.batch.rows * length / topology.num_devices
    work = flops_per_token(sizes, length) * tokens * (1 + _RECOMPUTED[config.parallel.remat])
    replicas = mesh.data * mesh.fsdp * mesh.expert
    microbatches = config.batch.rows / replicas / config.batch.rows_per_microbatch
    idle = 1 + (mesh.pipe - 1) / (config.chunks * microbatches)
    held = num_params(sizes) / (mesh.pipe * mesh.tensor * (mesh.expert if sizes.num_experts else 1))
    times = microbatches if config.parallel.fsdp_gather == "layer" else 1
    gathered = times * 8 * held * (mesh.fsdp - 1) / mesh.fsdp
    reduced = 8 * held / mesh.fsdp * (mesh.data - 1) / mesh.data
    own_tokens = config.batch.rows * length / replicas / mesh.context
    summed = (
        16 * own_tokens * sizes.hidden_size * sizes.num_layers / mesh.pipe * (mesh.tensor - 1) / mesh.tensor
    )
    compute = work / chip.flops + _score_bytes(config, sizes, topology) * tokens / chip.bandwidth
    return compute * idle + (gathered + reduced + summed) / chip.axis_bandwidth


def _score_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Read and written for one token's attention where no flash kernel runs: passes over the scores of every layer,
    as the traced step counts them; more where they are kept."""
    if _flash(config, sizes, topology):
        return 0.0
    passes = 110 if config.parallel.remat == "none" else 55
    return passes * sizes.num_heads * config.data.sequence_length * sizes.num_layers


def _flash(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Whether attention never makes scores: GPUs are taken to run cuDNN's, a TPU runs splash where it can."""
    if topology.platform != "tpu" or config.mesh.context > 1 or sizes.attention == "xla":
        return topology.platform == "gpu"
    dtype = jnp.dtype(config.precision.compute_dtype)
    return splash.refused_sizes(dtype, config.data.sequence_length, sizes.head_size) is None
