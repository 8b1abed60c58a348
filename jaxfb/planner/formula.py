"""Memory and time of a step by formula: microseconds for a layout, no trace and no compiler.

It orders the layouts of a search, and answers where no compiler is asked. Constants are counts of what the steps of a
1B and an 8B model do; `docs/planner.md` shows how near the formula comes to the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp

from jaxfb import compiler
from jaxfb.config import Config
from jaxfb.config.adapters import trained_patterns
from jaxfb.forward_backward.ahead import gathers_ahead
from jaxfb.mesh import AXES
from jaxfb.models import splash
from jaxfb.models.adapted import lora_of
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params, seen_share
from jaxfb.models.layout import layers_of_stages
from jaxfb.models.pattern import stack_of
from jaxfb.models.transformer import init_params
from jaxfb.planner.chips import Chip
from jaxfb.planner.topology import Topology
from jaxfb.recomputation import remat_parts
from jaxfb.schedules import Kind, default_name, kind_of
from jaxfb.trainable import pruned
from jaxfb.types import outer_params

_RECOMPUTED = {"none": 0.0, "selective": 0.1, "layer": 1 / 3, "offload": 1 / 3, "full": 2 / 3}
"""Share of forward and backward that runs again in a pipeline; in one stage "full" is "layer"."""
_SCORE_BYTES = {"none": 30}
"""Read and written a query, key and head, where attention makes scores: of two models at two lengths; 35 where
the forward runs again."""
_MOVED, _MOVED_IN_PIPELINE, _MOVED_WITH_RESIDUALS = 24, 34, 42
"""Reads and writes of as many numbers as a layer's products give, beside the products' own: 21 to 28 of one stage, 29
to 38 of a pipeline, 40 to 44 of one that keeps every residual in its slots."""
_LOGIT_BYTES = 65
"""Read and written a token and entry of the vocabulary: 61 of one stage, 75 of a pipeline."""
_SCORES_KEPT = 9 / 8
"""Of a query, key and head, in numbers of two bytes: probabilities of a causal row in eight blocks, and a copy."""
_BESIDE_PRODUCTS = {"tpu": 0.35}
"""Share of these reads and writes that takes time of its own where the compiler fuses the others into products, of 8B
and 70B on v5p, v6e and v5e: 0.2 to 0.55."""
_RING_BYTES = 85
"""Read and written a query's number and turn of a ring of kernels, to cut and to sum: 79 and 102 of two lengths."""
_HOLES = {"tpu": 1.25}
"""Memory of temporaries over what is counted of them: arrays of unlike sizes leave holes. 1.13 to 1.5 of ten rows."""
_EXPOSED, _EXPOSED_BY_DEFAULT = 0.15, 0.6
"""Share of communication that nothing hides on TPUs: 0.05 to 0.29 of those whose compiler has options in
`jaxfb/compiler.py`, where layers are gathered ahead; 0.61 of v5e, which has none."""
_ACCUMULATED = 12
"""Bytes read and written a parameter and microbatch: the float32 sum there and back, and what is added."""


@dataclass(frozen=True)
class Estimate:
    """Bytes, operations and seconds of one device, in one step.

    gradients: the sums that the loop over microbatches carries. activations: what forward keeps for backward at the
    peak. working: whole weights, one layer's backward, logits, and on a TPU the holes between all of these.
    wire_seconds: communication; exposed_seconds: what of it nothing hides.
    host: bytes of the optimizer's state in the host's memory, which are no part of any sum here. host_seconds: to read
    them twice; they are written while others are read.
    """

    parameters: float
    optimizer: float
    batch: float
    gradients: float
    activations: float
    working: float
    flops: float
    work_seconds: float
    wire_seconds: float
    exposed_seconds: float
    host: float = 0.0
    host_seconds: float = 0.0

    @property
    def arguments(self) -> float:
        return self.parameters + self.optimizer + self.batch

    @property
    def temporaries(self) -> float:
        return self.gradients + self.activations + self.working

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.exposed_seconds + self.host_seconds

    def with_host(self, on_device: float, on_host: float, chip: Chip | None) -> Estimate:
        """Returns the estimate for so many bytes of optimizer state in either memory."""
        seconds = 2 * on_host / chip.host_bandwidth if chip else 0.0
        return replace(self, optimizer=on_device, host=on_host, host_seconds=seconds)


def estimate(config: Config, sizes: TransformerConfig, topology: Topology) -> Estimate:
    """Estimates the step of a config whose mesh has no size left open, with AdamW's two moments in float32.

    Frozen parameters have no moments and no gradients.

    Args:
      sizes: of the model of `config`.
      topology: without a chip nothing takes time.
    """
    mesh, held, trained = config.mesh, sum(_held(config, sizes)), sum(_trained(config, sizes))
    state = 8 * trained / mesh.fsdp / (mesh.data if config.optimizer.sharding == "data" else 1)
    on_host = state if config.optimizer.memory == "host" else 0.0
    gradients, activations = _gradient_bytes(config, sizes), _kept_bytes(config, sizes, topology)
    working, holes = _working_bytes(config, sizes, topology), _HOLES.get(topology.platform, 1.0) - 1
    wire_seconds = _wire_seconds(config, sizes, topology.chip) if topology.chip else 0.0
    return Estimate(
        parameters=(4 * trained + _frozen_bytes(config) * (held - trained)) / mesh.fsdp,
        optimizer=state,
        batch=0,
        gradients=gradients,
        activations=activations,
        working=working + holes * (gradients + activations + working - _staying_bytes(config, sizes)),
        flops=_flops(config, sizes, topology),
        work_seconds=_work_seconds(config, sizes, topology) if topology.chip else 0.0,
        wire_seconds=wire_seconds,
        exposed_seconds=_exposed_share(config, topology) * wire_seconds,
    ).with_host(state - on_host, on_host, topology.chip)


def _held(config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns (parameters of layers, of embedding and head) that a device and its peers over fsdp have together."""
    mesh = config.mesh
    outer = sizes.vocab_size * sizes.hidden_size * (1 if sizes.tied_embeddings else 2)
    with_experts = sum(number for one, number in stack_of(sizes).counted() if one.num_experts)
    experts = 3 * with_experts * sizes.num_experts * sizes.hidden_size * sizes.expert_mlp_size
    layers = num_params(sizes) - outer - experts + experts / mesh.expert
    return layers * _share_of_layers(config, sizes) / mesh.tensor, outer / (mesh.pipe * mesh.tensor)


def _share_of_layers(config: Config, sizes: TransformerConfig) -> float:
    """Returns the share of the layers that a device stores and runs: for each stage, those of the longest."""
    counts = config.parallel.layers_per_stage
    if counts is None:
        return 1 / config.mesh.pipe
    counts = layers_of_stages(counts, sizes) if isinstance(counts, str) else counts
    return config.chunks * max(counts) / sum(counts)


def _layers_here(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many layers the arrays of a device are for."""
    return sizes.num_layers * _share_of_layers(config, sizes)


def _trained(config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns how many of those that `_held` counts are trained."""
    held, patterns = _held(config, sizes), trained_patterns(config)
    if patterns is None:
        return held
    layers, outer = _number(sizes, patterns)
    share, tensor = _share_of_layers(config, sizes), config.mesh.tensor
    return min(layers * share / tensor, held[0]), min(outer / (config.mesh.pipe * tensor), held[1])


@lru_cache(maxsize=16)
def _number(sizes: TransformerConfig, patterns: tuple[str, ...]) -> tuple[int, int]:
    """Returns how many parameters of the layers, and beside them, the patterns match."""
    matched = pruned(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    parts = matched["layers"], outer_params(matched)
    layers, outer = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)
    return layers, outer


def _frozen_bytes(config: Config) -> int:
    return jnp.dtype(config.precision.frozen_dtype or "float32").itemsize


def _gathers_layers(config: Config) -> bool:
    """Returns True if a layer's weights are whole only while the layer runs."""
    return config.mesh.fsdp > 1 and config.parallel.fsdp_gather != "step"


def _share_gathered(config: Config, sizes: TransformerConfig) -> float:
    """Returns the share of a device's layers whose weights stay gathered while others are not."""
    gather = config.parallel.fsdp_gather
    if config.mesh.fsdp == 1 or isinstance(gather, str):
        return 0.0
    return config.chunks * gather / _layers_here(config, sizes)


def _gathers_ahead(config: Config, topology: Topology) -> bool:
    """Returns True if a layer's weights are gathered while the layer before it runs."""
    parallel = config.parallel
    return config.mesh.fsdp > 1 and gathers_ahead(
        parallel.gather_ahead, topology.platform, parallel.fsdp_gather, config.optimizer.sharding
    )


def _gradient_bytes(config: Config, sizes: TransformerConfig) -> float:
    layers, outer = _trained(config, sizes)
    if not _gathers_layers(config):
        return 4 * (layers + outer)
    return 4 * layers / config.mesh.fsdp + 4 * outer / (config.mesh.fsdp if config.mesh.pipe == 1 else 1)


def _staying_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts whole weights that are gathered for all of an update."""
    return 2 * _held(config, sizes)[0] * _share_gathered(config, sizes)


def _working_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is there while a layer or the head runs: whole weights in two bytes a number, gradients of whole
    weights, what a layer's backward and a block of logits take.

    Gathered a layer ahead, a second layer's weights and gradient. On TPUs, where layers are gathered without a
    pipeline, that of a layer or that of the head, the larger; the compiler for GPUs keeps some of both.
    """
    (layers, outer), (trained, trained_outer) = _held(config, sizes), _trained(config, sizes)
    gathers, ahead = _gathers_layers(config), 2 if _gathers_ahead(config, topology) else 1
    layer, gradient = (number / _layers_here(config, sizes) for number in (layers, trained))
    stay = _staying_bytes(config, sizes)
    of_layer = 2 * gradient * ahead + _layer_work_bytes(config, sizes, topology)
    of_head = min(_head_gradient_bytes(config, sizes), 4 * trained_outer) + _logit_bytes(config, sizes)
    if gathers and config.mesh.pipe == 1 and topology.platform == "tpu":
        table = 2 * sizes.vocab_size * sizes.hidden_size / config.mesh.tensor
        return stay + max(2 * layer * ahead + of_layer, table + of_head)
    return stay + of_layer + of_head + 2 * outer + 2 * (layer * ahead if gathers else layers)


def _head_gradient_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Returns the bytes of a sum over the head's chunks in float32, or of its logits' gradient where these are
    fewer.
    """
    vocabulary = sizes.vocab_size / (config.mesh.pipe * config.mesh.tensor)
    return min(4 * sizes.hidden_size, 2 * _tokens(config)) * vocabulary


def _tokens(config: Config) -> int:
    """Returns the tokens of a microbatch on one device."""
    return _rows_per_microbatch(config) * config.data.sequence_length // config.mesh.context


def _kept_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what layers in flight keep for their backward: their inputs, and what `remat` does not compute
    again.
    """
    in_flight = _in_flight(config) if config.mesh.pipe > 1 else 1.0
    return sum(
        _kept_of(config, sizes, topology, remat, layers, in_flight)
        for remat, layers in _layers_by_remat(config, sizes)
    )


def _layers_by_remat(config: Config, sizes: TransformerConfig) -> list[tuple[str, float]]:
    """Returns (a word of `remat`, the number of a device's layers that it is for)."""
    *counted, (last, _) = remat_parts(config.parallel.remat)
    parts = [(word, float(config.chunks * (number or 0))) for word, number in counted]
    return [*parts, (last, _layers_here(config, sizes) - sum(number for _, number in parts))]


def _mean_over_layers(config: Config, sizes: TransformerConfig, of_word: Callable[[str], float]) -> float:
    """Returns the mean of a number that each word of `remat` has."""
    parts = _layers_by_remat(config, sizes)
    return sum(of_word(word) * layers for word, layers in parts) / _layers_here(config, sizes)


def _kept_of(
    config: Config, sizes: TransformerConfig, topology: Topology, remat: str, layers: float, in_flight: float
) -> float:
    """Counts what so many layers keep that are recomputed in one way."""
    inputs = config.chunks if config.mesh.pipe > 1 and remat == "full" else layers
    if config.mesh.pipe > 1 and _kind(config).splits_backward and remat != "none":
        remat = "selective"  # products wait for the pass that takes the weights' gradients
    products = _products(sizes) / config.mesh.tensor
    everything = 2 * products + 8 * _hidden(config, sizes) + _scores(config, sizes, topology)
    if remat == "offload":  # they wait in the host's memory
        return 2 * _tokens(config) * 2 * _hidden(config, sizes)
    kept = {"selective": products, "none": everything}.get(remat, 0.0)
    return 2 * _tokens(config) * in_flight * (inputs * _hidden(config, sizes) + layers * kept)


def _in_flight(config: Config) -> float:
    """Returns microbatches whose activations the first stage keeps: of pieces, those of 1f1b and the rest of the first
    microbatch.
    """
    found, pieces = _kind(config).in_flight(config.mesh.pipe, config.chunks), config.parallel.pieces
    return found if pieces == 1 else (found + (pieces - 1) / config.chunks) / pieces


def _layer_inputs(config: Config, sizes: TransformerConfig) -> float:
    """Returns the number of layer inputs that a microbatch in flight keeps."""
    if config.mesh.pipe == 1:
        return _layers_here(config, sizes)
    parts = _layers_by_remat(config, sizes)
    return sum(config.chunks if remat == "full" else layers for remat, layers in parts)


def _hidden(config: Config, sizes: TransformerConfig) -> float:
    """Returns the numbers of a token's hidden state on one device."""
    return sizes.hidden_size / (config.mesh.tensor if sizes.sequence_parallel else 1)


def _layer_work_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what one layer's backward takes beside weights."""
    layers, tokens = _layers_here(config, sizes), _tokens(config)
    again = layers * _hidden(config, sizes) if _layer_inputs(config, sizes) < layers else 0
    at_work = _scores(config, sizes, topology) + 2 * _products(sizes) / config.mesh.tensor + again
    return 2 * tokens * at_work


def _logit_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts a block of the head's logits and their softmax."""
    return 8 * min(_tokens(config), sizes.loss_chunk) * sizes.vocab_size / config.mesh.tensor


def forward_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what a pass without gradients takes beside the parameters: weights, one layer's work, a block of logits.

    config: as for `estimate`.
    """
    layers, outer = _held(config, sizes)
    layer = layers / _layers_here(config, sizes)
    weights = 2 * outer + 2 * (layer if _gathers_layers(config) else layers)
    return weights + _layer_work_bytes(config, sizes, topology) + _logit_bytes(config, sizes)


def _scores(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the numbers a token that attention keeps where it makes scores."""
    if _flash(config, sizes, topology):
        return 0.0
    length = config.data.sequence_length // config.mesh.context
    return _SCORES_KEPT * sizes.num_heads * length * seen_share(sizes, length) / config.mesh.tensor


def _kind(config: Config) -> Kind:
    return kind_of(config.schedule or default_name(config.chunks, config.parallel.pieces))


def _products(sizes: TransformerConfig) -> float:
    """Returns how many numbers a layer's products with weights give, a token, in the mean."""
    width = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_size
    if sizes.latent:
        expanded = 2 * sizes.head_size - sizes.latent.rotary_size + sizes.latent.value_size
        short = sizes.latent.norm_params + sizes.latent.rotary_size
        width = short + sizes.num_heads * expanded + sizes.hidden_size
    of_mlps = sum(number * _mlp_width(one) for one, number in stack_of(sizes).counted())
    return width + 3 * of_mlps / sizes.num_layers


def _mlp_width(sizes: TransformerConfig) -> int:
    if not sizes.num_experts:
        return sizes.mlp_size
    return sizes.experts_per_token * sizes.expert_mlp_size + sizes.shared_expert_size


def _rows_per_microbatch(config: Config) -> int:
    assert config.batch.rows_per_microbatch is not None  # `make_verdict` fills it in
    return config.batch.rows_per_microbatch


def _microbatches(config: Config) -> float:
    mesh = config.mesh
    return config.batch.rows / (mesh.data * mesh.fsdp * mesh.expert) / _rows_per_microbatch(config)


def _turns(config: Config) -> tuple[float, float]:
    """Returns how often a microbatch's worth of layers runs, and of the head.

    A pipeline fills and drains, and while it is full its head runs in every tick, of which a microbatch takes as many
    as there are chunks.
    """
    pipe, chunks, microbatches = config.mesh.pipe, config.chunks, _microbatches(config)
    if pipe == 1:
        return 1.0, 1.0
    return 1 + _kind(config).fill(pipe) / (chunks * microbatches * config.parallel.pieces), max(
        1.0, chunks - pipe * (chunks - 1) / microbatches
    )


def _flops_per_token(config: Config, sizes: TransformerConfig, topology: Topology) -> tuple[float, float]:
    """Returns (those of the layers, recomputation and bubble included; those of the head)."""
    of_layers, of_head = _turns(config)
    head = (6 if lora_of(sizes) is None else 4) * sizes.hidden_size * sizes.vocab_size
    layers = flops_per_token(sizes, config.data.sequence_length) - head
    again = _mean_over_layers(
        config,
        sizes,
        lambda remat: _RECOMPUTED["layer" if remat == "full" and config.mesh.pipe == 1 else remat],
    )
    layers = layers * (1 + again) + _flops_of_kernels(config, sizes, topology, again)
    return layers * of_layers * _share_of_layers(config, sizes) * config.mesh.pipe, head * of_head


def _flops_of_kernels(config: Config, sizes: TransformerConfig, topology: Topology, again: float) -> float:
    """Counts what a token takes more of splash's kernels: scores twice more in the backward, of which there are seven
    products in place of four, and blocks on the diagonal of which half is masked.
    """
    if topology.platform != "tpu" or not _flash(config, sizes, topology):
        return 0.0
    length = config.data.sequence_length
    value_size = sizes.latent.value_size if sizes.latent else sizes.head_size
    seen = seen_share(sizes, length) * length * sizes.num_layers / 2
    attention = 6 * sizes.num_heads * (sizes.head_size + value_size) * seen
    blocks = 1 + splash.block_size(length // (2 * config.mesh.context)) / length
    return attention * ((1.5 + again) * blocks - 1 - again)


def _flops(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    tokens = config.batch.rows * config.data.sequence_length
    return sum(_flops_per_token(config, sizes, topology)) * tokens / topology.num_devices


def _work_seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    chip, length = topology.chip, config.data.sequence_length
    assert chip is not None  # times are asked of chips with a known peak alone
    tokens = config.batch.rows * length / topology.num_devices
    of_layers, of_head = _turns(config)
    moved = _MOVED
    if config.mesh.pipe > 1:
        in_slots = {"none": _MOVED_WITH_RESIDUALS}
        moved = _mean_over_layers(config, sizes, lambda remat: in_slots.get(remat, _MOVED_IN_PIPELINE))
    share = _BESIDE_PRODUCTS.get(topology.platform, 1.0)
    read = 2 * moved * share * _products(sizes) * sizes.num_layers + _score_bytes(config, sizes, topology)
    read = (
        read * of_layers * _share_of_layers(config, sizes) * config.mesh.pipe
        + _LOGIT_BYTES * share * sizes.vocab_size * of_head
    )
    if _flash(config, sizes, topology):
        turns = (config.mesh.context - 1) * sizes.num_layers
        read += _RING_BYTES * turns * sizes.num_heads * sizes.head_size
    return (
        _flops(config, sizes, topology) / chip.flops
        + (tokens * read + _accumulated_bytes(config, sizes)) / chip.bandwidth
    )


def _accumulated_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts what is read and written to add each microbatch's gradient to the sums."""
    return _ACCUMULATED / 4 * _gradient_bytes(config, sizes) * _microbatches(config)


def _wire_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> float:
    """Returns the time of gathered weights, reduced gradients, sums over tensor shards, and what stages hand on."""
    mesh, held, microbatches = config.mesh, sum(_held(config, sizes)), _microbatches(config)
    trained = sum(_trained(config, sizes))
    times = microbatches if config.parallel.fsdp_gather != "step" else 1
    of_kept = _held(config, sizes)[0] * _share_gathered(config, sizes)
    hidden = 2 * _tokens(config) * sizes.hidden_size * microbatches
    of_layers, of_head = _turns(config)
    sums = 8 * hidden * of_layers * _layers_here(config, sizes)
    gathered = 4 * times * (held + trained) - (4 * times - 2) * of_kept
    seconds = gathered * _share(mesh.fsdp) / _rate(config, chip, "fsdp")
    seconds += 8 * trained / mesh.fsdp * _share(mesh.data) / _rate(config, chip, "data")
    seconds += sums * _share(mesh.tensor) / _rate(config, chip, "tensor")
    if mesh.pipe > 1:
        # a stage's result there and its gradient back; around the head, sums of about five hidden states
        seconds += 2 * hidden * of_layers * config.chunks / _rate(config, chip, "pipe", neighbours=True)
        seconds += 10 * hidden * of_head * _share(mesh.pipe) / _rate(config, chip, "pipe")
    return seconds


def _exposed_share(config: Config, topology: Topology) -> float:
    """Returns the share of communication that nothing hides."""
    if topology.platform != "tpu" or topology.chip is None:
        return 1.0
    if topology.chip.kind not in compiler.TABLE:
        return _EXPOSED_BY_DEFAULT
    waits = (
        config.mesh.fsdp > 1
        and config.parallel.fsdp_gather == "layer"
        and not _gathers_ahead(config, topology)
    )
    return 1.0 if waits else _EXPOSED


def _share(size: int) -> float:
    """Returns the part of an array that a device sends around a ring of that size."""
    return (size - 1) / size


def _rate(config: Config, chip: Chip, axis: str, neighbours: bool = False) -> float:
    """Returns bytes a second along an axis."""
    sizes = {name: getattr(config.mesh, name) for name in AXES}
    stride = math.prod(sizes[name] for name in AXES[AXES.index(axis) + 1 :])
    return chip.group_bandwidth(range(0, (2 if neighbours else sizes[axis]) * stride, stride))


def _score_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is read and written for one token's attention where no flash kernel runs."""
    if _flash(config, sizes, topology):
        return 0.0
    passes = _mean_over_layers(config, sizes, lambda remat: _SCORE_BYTES.get(remat, 35))
    length = config.data.sequence_length
    return passes * sizes.num_heads * length * seen_share(sizes, length) * sizes.num_layers


def _flash(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns True if attention never makes scores: GPUs run cuDNN's and a TPU splash, where they can."""
    dtype, context = jnp.dtype(config.precision.compute_dtype), config.mesh.context
    length = config.data.sequence_length
    if topology.platform == "cpu" or sizes.attention == "xla":
        return False
    if topology.platform == "gpu":
        return context == 1 and dtype.itemsize == 2 and sizes.variant.has_plain_scores
    if context > 1:
        ring = sizes.context_attention == "ring" and sizes.window is None
        return ring and splash.refused_sizes(dtype, length // context // 2, sizes.head_size) is None
    return splash.refused_sizes(dtype, length, sizes.head_size) is None
