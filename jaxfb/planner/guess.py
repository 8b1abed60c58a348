"""A first guess at a layout's memory and time: arithmetic alone, microseconds a guess.

It only orders candidates and drops the hopeless; what is left is traced (`estimate`), the best is compiled. Constants
are counts of what traced steps do, of the 1B and the 8B model; `docs/planner.md` says how near that comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.mesh import AXES
from jaxfb.models import splash
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.planner.chips import Chip
from jaxfb.planner.topology import Topology
from jaxfb.schedules import Kind, default_name, kind_of

_RECOMPUTED = {"none": 0.0, "selective": 0.1, "layer": 1 / 3, "full": 2 / 3}
"""Share of forward and backward that runs again in a pipeline; in one stage "full" is "layer"."""
_SCORE_BYTES = {"none": 30}
"""Read and written a query, key and head, where attention makes scores: of two models at two lengths, traced; 35 where
the forward runs again."""
_MOVED, _MOVED_IN_PIPELINE, _MOVED_WITH_RESIDUALS = 24, 34, 42
"""Reads and writes of as many numbers as a layer's products give, beside the products' own: 21 to 28 of one stage, 29
to 38 of a pipeline, 40 to 44 of one that keeps every residual in its slots."""
_LOGIT_BYTES = 65
"""Read and written a token and entry of the vocabulary: 61 of one stage, 75 of a pipeline."""
_SCORES_KEPT = 9 / 8
"""Of a query, key and head, in numbers of two bytes: probabilities of a causal row in eight blocks, and a copy."""


@dataclass(frozen=True)
class Guess:
    """bytes of a device, seconds of a step; both rough."""

    bytes: float
    seconds: float


def guess(config: Config, sizes: TransformerConfig, topology: Topology) -> Guess:
    """Estimates by formula: parameters, moments, gradients, a layer's activations, work, bubble and traffic."""
    return Guess(_bytes(config, sizes, topology), _seconds(config, sizes, topology))


def _held(config: Config, sizes: TransformerConfig) -> float:
    """Returns parameters that a device and those it shares them with over fsdp hold together."""
    mesh = config.mesh
    return num_params(sizes) / (mesh.pipe * mesh.tensor * (mesh.expert if sizes.num_experts else 1))


def _bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    mesh, layer = config.mesh, config.parallel.fsdp_gather == "layer"
    held = _held(config, sizes)
    moments = 8 * held / mesh.fsdp / (mesh.data if config.optimizer.sharding == "data" else 1)
    weights = 4 * held / mesh.fsdp + (0 if layer and mesh.fsdp > 1 else 2 * held)
    gradients = 4 * held / (mesh.fsdp if layer else 1)
    return weights + moments + gradients + _activation_bytes(config, sizes, topology)


def _activation_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns, at two bytes a number, what the layers in flight keep, and what one layer's backward and the head work
    on.
    """
    mesh, length = config.mesh, config.data.sequence_length // config.mesh.context
    tokens = config.batch.rows_per_microbatch * length
    products = _products(sizes) / mesh.tensor
    made = not _flash(config, sizes, topology)
    scores = made * _SCORES_KEPT * sizes.num_heads * length / mesh.tensor
    remat = config.parallel.remat
    if mesh.pipe > 1 and _kind(config).splits_backward and remat != "none":
        remat = "selective"  # products wait for the pass that takes the weights' gradients
    kept = {"selective": products, "none": products * 2.5 + scores}.get(remat, 0.0)
    layers = sizes.num_layers / mesh.pipe
    if mesh.pipe == 1:
        in_flight, inputs = 1.0, layers
    else:
        in_flight = _kind(config).in_flight(mesh.pipe, config.chunks)
        inputs = layers if config.parallel.remat != "full" else config.chunks
    again = layers * sizes.hidden_size if inputs < layers else 0
    logits = 4 * min(tokens, sizes.loss_chunk) * sizes.vocab_size / mesh.tensor
    at_work = scores + 2 * products + again
    return 2 * tokens * (in_flight * (inputs * sizes.hidden_size + layers * kept) + at_work) + 2 * logits


def _kind(config: Config) -> Kind:
    return kind_of(config.schedule or default_name(config.chunks))


def _products(sizes: TransformerConfig) -> int:
    """Returns numbers that a layer's products with weights give, a token."""
    width = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_size
    return width + 3 * _mlp_width(sizes)


def _mlp_width(sizes: TransformerConfig) -> int:
    if not sizes.num_experts:
        return sizes.mlp_size
    return sizes.experts_per_token * sizes.expert_mlp_size + sizes.shared_expert_size


def _seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    return _work_seconds(config, sizes, topology) + _wire_seconds(config, sizes, topology.chip)


def _microbatches(config: Config) -> float:
    mesh = config.mesh
    return config.batch.rows / (mesh.data * mesh.fsdp * mesh.expert) / config.batch.rows_per_microbatch


def _turns(config: Config) -> tuple[float, float]:
    """Returns how often a microbatch's worth of layers runs, and of the head: a pipeline fills and drains, and while
    it is full
    its head runs in every tick, of which a microbatch takes as many as there are chunks."""
    pipe, chunks, microbatches = config.mesh.pipe, config.chunks, _microbatches(config)
    if pipe == 1:
        return 1.0, 1.0
    return 1 + _kind(config).fill(pipe) / (chunks * microbatches), max(
        1.0, chunks - pipe * (chunks - 1) / microbatches
    )


def _work_seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    chip, length = topology.chip, config.data.sequence_length
    tokens = config.batch.rows * length / topology.num_devices
    head = 6 * sizes.hidden_size * sizes.vocab_size
    layers = (flops_per_token(sizes, length) - head) * (1 + _RECOMPUTED[config.parallel.remat])
    of_layers, of_head = _turns(config)
    moved = _MOVED
    if config.mesh.pipe > 1:
        moved = _MOVED_WITH_RESIDUALS if config.parallel.remat == "none" else _MOVED_IN_PIPELINE
    read = 2 * moved * _products(sizes) * sizes.num_layers + _score_bytes(config, sizes, topology)
    layers = layers / chip.flops + read / chip.bandwidth
    head = head / chip.flops + _LOGIT_BYTES * sizes.vocab_size / chip.bandwidth
    return tokens * (layers * of_layers + head * of_head)


def _wire_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time of gathered weights, reduced gradients, hidden states summed over tensor, and stages'
    exchanges.
    """
    mesh, held, microbatches = config.mesh, _held(config, sizes), _microbatches(config)
    times = microbatches if config.parallel.fsdp_gather == "layer" else 1
    tokens = config.batch.rows_per_microbatch * config.data.sequence_length / mesh.context
    hidden = 2 * tokens * sizes.hidden_size * microbatches
    of_layers, of_head = _turns(config)
    sums = 8 * hidden * of_layers * sizes.num_layers / mesh.pipe
    seconds = times * 8 * held * _share(mesh.fsdp) / _rate(config, chip, "fsdp")
    seconds += 8 * held / mesh.fsdp * _share(mesh.data) / _rate(config, chip, "data")
    seconds += sums * _share(mesh.tensor) / _rate(config, chip, "tensor")
    if mesh.pipe > 1:
        # a stage's result there and its gradient back; around the head, sums of about five hidden states
        seconds += 2 * hidden * of_layers * config.chunks / _rate(config, chip, "pipe", neighbours=True)
        seconds += 10 * hidden * of_head * _share(mesh.pipe) / _rate(config, chip, "pipe")
    return seconds


def _share(size: int) -> float:
    """Returns the share of an array that a device sends around a ring of that size."""
    return (size - 1) / size


def _rate(config: Config, chip: Chip, axis: str, neighbours: bool = False) -> float:
    """Returns bytes a second along an axis."""
    sizes = {name: getattr(config.mesh, name) for name in AXES}
    stride = math.prod(sizes[name] for name in AXES[AXES.index(axis) + 1 :])
    return chip.group_bandwidth(range(0, (2 if neighbours else sizes[axis]) * stride, stride))


def _score_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns read and written for one token's attention where no flash kernel runs."""
    if _flash(config, sizes, topology):
        return 0.0
    passes = _SCORE_BYTES.get(config.parallel.remat, 35)
    return passes * sizes.num_heads * config.data.sequence_length * sizes.num_layers


def _flash(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns whether attention never makes scores: GPUs are taken to run cuDNN's, a TPU runs splash where it can."""
    if topology.platform != "tpu" or config.mesh.context > 1 or sizes.attention == "xla":
        return topology.platform == "gpu"
    dtype = jnp.dtype(config.precision.compute_dtype)
    return splash.refused_sizes(dtype, config.data.sequence_length, sizes.head_size) is None
