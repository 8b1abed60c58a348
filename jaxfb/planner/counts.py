"""Counts what a device of a layout has, and how often it runs: the numbers of which the formula is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.config.adapters import trained_patterns
from jaxfb.forward_backward.ahead import gathers_ahead, halves_pay
from jaxfb.forward_backward.last_microbatch import obstacle_to_overlap, overlaps
from jaxfb.models import cudnn, splash, splash_gather
from jaxfb.models.config import TransformerConfig, num_params, seen_share
from jaxfb.models.layout import layers_of_stages
from jaxfb.models.pattern import stack_of
from jaxfb.models.trained_flops import TrainedFlops, runs_backward, trained_flops
from jaxfb.models.transformer import init_params, transformer
from jaxfb.planner.topology import Topology
from jaxfb.recomputation import remat_parts
from jaxfb.schedules import Kind, Schedule, default_name, kind_of, make
from jaxfb.trainable import name_of, parted, pruned
from jaxfb.training.from_config.dtypes import AnyConfig, param_dtype
from jaxfb.training.from_config.optimizer import optimizer_of_any_length
from jaxfb.types import outer_params


def held_numbers(config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns (parameters of layers, of embedding and head) that a device computes with, most of them gathered.

    Leading layers and those of multi-token prediction are among the layers; in a pipeline all stages have them, as
    embedding and head, but uncut.
    """
    mesh = config.mesh
    outer = sizes.vocab_size * sizes.hidden_size * (1 if sizes.tied_embeddings else 2)
    experts = _numbers_of_experts(sizes)
    layers = num_params(sizes) - outer - experts + experts / mesh.expert
    beside = _numbers_beside_stages(sizes, mesh.expert) if mesh.pipe > 1 else 0
    layers = (layers - beside) * share_of_layers(config, sizes)
    return layers / mesh.tensor, (outer / mesh.pipe + beside) / mesh.tensor


def held_experts(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many of the layers' parameters that `held_numbers` counts are experts'."""
    mesh = config.mesh
    return _numbers_of_experts(sizes) * share_of_layers(config, sizes) / (mesh.expert * mesh.tensor)


def _numbers_of_experts(sizes: TransformerConfig) -> int:
    with_experts = sum(number for one, number in stack_of(sizes).counted() if one.num_experts)
    with_experts += sizes.mtp_depth * bool(stack_of(sizes).period[-1].num_experts)
    return 3 * with_experts * sizes.num_experts * sizes.hidden_size * sizes.expert_mlp_size


@lru_cache(maxsize=64)
def _numbers_beside_stages(sizes: TransformerConfig, expert: int) -> float:
    """Returns the parameters of leading layers and of multi-token prediction, experts cut over an axis of a size."""
    outer = outer_params(jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    named = [
        (name_of(path), leaf.size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(outer)
        if name_of(path).startswith(("leading.", "mtp."))
    ]
    return sum(size / expert if ".experts." in name else size for name, size in named)


Counted = Callable[[Config, TransformerConfig], tuple[float, float]]


def stored(numbers: Counted, config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns what `held_numbers` or `trained_numbers` counts as a device stores it: each has a share of everything, of
    experts as of the rest.
    """
    layers, outer = numbers(replace(config, mesh=replace(config.mesh, expert=1)), sizes)
    return layers / num_shards(config), outer / num_shards(config)


def share_of_layers(config: Config, sizes: TransformerConfig) -> float:
    """Returns the share of the layers that a device stores and runs: for each stage, those of the longest."""
    counts = config.parallel.layers_per_stage
    if counts is None:
        return 1 / config.mesh.pipe
    counts = layers_of_stages(counts, sizes) if isinstance(counts, str) else counts
    return config.chunks * max(counts) / sum(counts)


def layers_here(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many layers the arrays of a device are for."""
    return sizes.num_layers * share_of_layers(config, sizes)


def trained_numbers(config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns how many of those that `held_numbers` counts are trained."""
    held, patterns = held_numbers(config, sizes), trained_patterns(config)
    if patterns is None:
        return held
    layers, outer = _number(sizes, patterns)
    share, tensor = share_of_layers(config, sizes), config.mesh.tensor
    return min(layers * share / tensor, held[0]), min(outer / (config.mesh.pipe * tensor), held[1])


@lru_cache(maxsize=16)
def _number(sizes: TransformerConfig, patterns: tuple[str, ...]) -> tuple[int, int]:
    """Returns how many parameters of the layers, and beside them, the patterns match."""
    matched = pruned(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    return _count(matched["layers"]), _count(outer_params(matched))


def copied_numbers(config: Config, sizes: TransformerConfig) -> tuple[float, float]:
    """Returns how many of those that `held_numbers` counts are not read where they are stored: all that are gathered,
    and otherwise those that are stored in another dtype than they are computed in.
    """
    held, trained = held_numbers(config, sizes), trained_numbers(config, sizes)
    if num_shards(config) > 1:
        return held
    computed, of_trained = jnp.dtype(config.precision.compute_dtype), jnp.dtype(param_dtype(config))
    of_frozen = jnp.dtype(config.precision.frozen_dtype or of_trained)
    layers, outer = (
        (of_trained != computed) * few + (of_frozen != computed) * (whole - few)
        for whole, few in zip(held, trained, strict=True)
    )
    return layers, outer


def flops_counted(config: Config, sizes: TransformerConfig) -> TrainedFlops:
    """Returns the operations of a token that the config's trained parameters need."""
    return trained_flops(sizes, config.data.sequence_length, trained_patterns(config))


def has_backward(config: Config, sizes: TransformerConfig) -> bool:
    """Returns whether the layers have a backward: not where only what is behind them is trained, such as the head."""
    return runs_backward(sizes, trained_patterns(config))


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_shards(config: Config) -> int:
    """Returns how many devices share out the parameters of a stage and of a shard of `tensor`."""
    return config.mesh.fsdp * config.mesh.expert * config.mesh.context


def gathers_layers(config: Config) -> bool:
    """Returns True if a layer's weights are whole only while the layer runs."""
    return num_shards(config) > 1 and config.parallel.fsdp_gather != "step"


def share_gathered(config: Config, sizes: TransformerConfig) -> float:
    """Returns the share of a device's layers whose weights stay gathered while others are not."""
    gather = config.parallel.fsdp_gather
    if num_shards(config) == 1 or isinstance(gather, str):
        return 0.0
    return config.chunks * gather / layers_here(config, sizes)


def gathers_before_use(config: Config, topology: Topology) -> bool:
    """Returns True if a layer's weights are gathered while the layer before it runs."""
    parallel = config.parallel
    kind = topology.chip.kind if topology.chip else None
    return num_shards(config) > 1 and gathers_ahead(
        parallel.gather_ahead, kind, parallel.fsdp_gather, config.optimizer.sharding
    )


def reduces_beside(config: Config, topology: Topology) -> bool:
    """Returns True if the last microbatch's backward reduces the layers' gradients."""
    mesh, gather = config.mesh, config.parallel.fsdp_gather
    unfit = mesh.pipe > 1 and (schedule_kind(config).by_device or config.parallel.pieces > 1)
    obstacle = obstacle_to_overlap(schedule_name(config) if unfit else None, config.optimizer.sharding)
    reduces = mesh.data > 1 or (gather == "step" and num_shards(config) > 1)
    kind = topology.chip.kind if topology.chip else None
    return overlaps(config.parallel.overlap_grad_reduce, kind, obstacle, reduces, mesh.pipe > 1)


def share_ahead(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the share of a layer that a second place is kept for, since it is gathered before its use."""
    asked, kind = config.parallel.gather_ahead, topology.chip.kind if topology.chip else None
    by_default = asked is None and halves_pay(kind, config.mesh.tensor, config.mesh.context)
    in_halves = asked == "half" or by_default
    if not gathers_before_use(config, topology):
        return 0.0
    return _share_of_first_half(sizes) if in_halves and len(stack_of(sizes).period) == 1 else 1.0


@lru_cache(maxsize=16)
def _share_of_first_half(sizes: TransformerConfig) -> float:
    """Returns the share of a layer's parameters that its second half does not read alone."""
    halves = transformer(sizes).halves
    assert halves is not None  # a period of several layers has none
    layers = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))["layers"]
    first, second = (_count(part) for part in parted(halves.second_params, layers))
    return first / (first + second)


def tokens_of_microbatch(config: Config) -> int:
    """Returns the tokens of a microbatch on one device."""
    return _rows_per_microbatch(config) * config.data.sequence_length // config.mesh.context


def tokens_of_piece(config: Config) -> int:
    """Returns the tokens that a layer of a device runs at a time."""
    return tokens_of_microbatch(config) // config.parallel.pieces


def layers_by_remat(config: Config, sizes: TransformerConfig) -> list[tuple[str, float]]:
    """Returns (a word of `remat`, the number of a device's layers that it is for)."""
    *counted, (last, _) = remat_parts(config.parallel.remat)
    parts = [(word, float(config.chunks * (number or 0))) for word, number in counted]
    return [*parts, (last, layers_here(config, sizes) - sum(number for _, number in parts))]


def mean_over_layers(config: Config, sizes: TransformerConfig, of_word: Callable[[str], float]) -> float:
    """Returns the mean of a number that each word of `remat` has."""
    parts = layers_by_remat(config, sizes)
    return sum(of_word(word) * layers for word, layers in parts) / layers_here(config, sizes)


def hidden_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns the numbers of a token's hidden state on one device."""
    return sizes.hidden_size / (config.mesh.tensor if sizes.sequence_parallel else 1)


def widest_of_attention(sizes: TransformerConfig) -> int:
    """Returns the most numbers of a token that a product into attention gives, or the hidden state if that has more."""
    expanded = _expanded_size(sizes) * sizes.num_heads if sizes.latent else 0
    return max(expanded, sizes.num_heads * sizes.head_size, sizes.hidden_size)


def kept_hidden_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the numbers of a token's hidden state that a device keeps for the backward: in the slots of a pipeline
    XLA for TPUs cuts it over `tensor`.
    """
    cut = config.mesh.pipe > 1 and topology.platform == "tpu"
    return sizes.hidden_size / config.mesh.tensor if cut else hidden_width(config, sizes)


def schedule_name(config: Config) -> str:
    return config.schedule or default_name(config.chunks, config.parallel.pieces)


def schedule_kind(config: Config) -> Kind:
    return kind_of(schedule_name(config))


def product_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers a layer's products with weights give, a token, in the mean."""
    width = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_size
    if sizes.latent:
        width = _latent_width(sizes) + sizes.hidden_size
    of_mlps = sum(number * _mlp_width(one) for one, number in stack_of(sizes).counted())
    return width + 3 * of_mlps / sizes.num_layers


def dense_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers a token has in the middle of a layer's MLP without experts, in the mean."""
    of_mlps = sum(number * one.mlp_size for one, number in stack_of(sizes).counted() if not one.num_experts)
    return of_mlps / sizes.num_layers


def inner_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers the last products of a layer's MLP or experts multiply, a token, in the mean."""
    of_experts = sum(
        number * one.experts_per_token * one.expert_mlp_size
        for one, number in stack_of(sizes).counted()
        if one.num_experts
    )
    return dense_width(sizes) + of_experts / sizes.num_layers


def kept_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token a layer keeps of its products for the backward, in the mean.

    Beside its input: what attention is made from, its answer before and after the last product, and both halves of an
    MLP's middle, of experts with the space that there is for rows. An MLP's answer is not needed again.
    """
    answer = _size_of_answer(config, sizes, topology)
    width = _attention_width(sizes, answer) + 2 * _middle_width(config, sizes)
    return width / config.mesh.tensor + kept_hidden_width(config, sizes, topology)


def saved_width(config: Config, sizes: TransformerConfig, topology: Topology, remat: str) -> float:
    """Returns how many numbers of a token wait, in a layer, for a pass that takes the weights' gradients alone.

    The gradients of what the layer's products give, and what they multiply: of attention and of an MLP the normed
    input and the answer in front of the last product. With every residual kept, the gradients alone.
    """
    width, middle = _attention_width(sizes), _middle_width(config, sizes)
    hidden = kept_hidden_width(config, sizes, topology)
    if remat == "none":
        values = sizes.num_heads * (sizes.latent.value_size if sizes.latent else sizes.head_size)
        return (width - values + 2 * middle) / config.mesh.tensor + 2 * hidden
    return (width + 3 * middle) / config.mesh.tensor + 4 * hidden


def _attention_width(sizes: TransformerConfig, size_of_answer: int | None = None) -> int:
    """Returns how many numbers of a token attention is made from, and its answer before the last product.

    size_of_answer: of one head, if not that of its values.
    """
    if sizes.latent:
        return _latent_width(sizes) + sizes.num_heads * (size_of_answer or sizes.latent.value_size)
    sides = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
    return sides + sizes.num_heads * (size_of_answer or sizes.head_size)


def _size_of_answer(config: Config, sizes: TransformerConfig, topology: Topology) -> int | None:
    """Returns the numbers of a head's answer where a kernel gives it in 16 bits: as many as of its keys, on a TPU in
    whole tiles.
    """
    if computed_bytes(config) > 2 or not runs_flash(config, sizes, topology):
        return None
    tile = splash.LANES if topology.platform == "tpu" else 1
    return -(-sizes.head_size // tile) * tile


def padding_width(config: Config, sizes: TransformerConfig, topology: Topology) -> int:
    """Returns how many numbers of a token are zeros or fill tiles in what a kernel of attention reads and gives."""
    if (size := _size_of_answer(config, sizes, topology)) is None:
        return 0
    values = sizes.latent.value_size if sizes.latent else sizes.head_size
    of_keys, heads = size - sizes.head_size, sizes.num_heads
    return (2 * heads + sizes.num_kv_heads) * of_keys + sizes.num_kv_heads * (size - values)


def _middle_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many numbers of a token are in the middle of an MLP, or of experts with the space for their rows, in
    the mean.
    """
    middle = sum(
        number * (one.shared_expert_size + _experts_width(config, one) if one.num_experts else one.mlp_size)
        for one, number in stack_of(sizes).counted()
    )
    return middle / sizes.num_layers


def _experts_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many numbers of a token one of an expert's first products gives, empty rows included."""
    return row_space(config, sizes) * sizes.experts_per_token * sizes.expert_mlp_size


def row_space(config: Config, sizes: TransformerConfig) -> float:
    """Returns the rows that a device's experts have space for at a time, over those that its tokens' choices make."""
    axis = config.mesh.expert
    return axis if sizes.expert_buffer is None else min(sizes.expert_buffer, axis)


def stored_bytes(config: Config) -> int:
    """Returns the bytes of a trained parameter, and of each of its moments."""
    return jnp.dtype(param_dtype(config)).itemsize


def computed_bytes(config: AnyConfig) -> int:
    """Returns the bytes of a number that a layer computes with: of gathered weights and of activations."""
    return jnp.dtype(config.precision.compute_dtype).itemsize


def summed_bytes(config: Config) -> int:
    """Returns the bytes of a number of the sum of gradients."""
    given = config.precision.accum_dtype
    return stored_bytes(config) if given is None else jnp.dtype(given).itemsize


def reduced_bytes(config: Config) -> int:
    """Returns the bytes of a number of a gradient on its way over fsdp."""
    given = config.precision.reduce_dtype if config.parallel.fsdp_gather != "step" else None
    return summed_bytes(config) if given is None else jnp.dtype(given).itemsize


def state_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Returns the bytes that the config's optimizer keeps of a trained number, in the mean: eight of adamw."""
    patterns = trained_patterns(config)
    asked = repr((config.optimizer, config.lr, sizes, patterns))
    if asked not in _STATES:
        params = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
        params = params if patterns is None else pruned(patterns, params)
        kept = jax.tree.leaves(jax.eval_shape(optimizer_of_any_length(config).init, params))
        _STATES[asked] = sum(leaf.size * leaf.dtype.itemsize for leaf in kept if leaf.ndim) / _count(params)
    return _STATES[asked] * stored_bytes(config) / 4


_STATES: dict[str, float] = {}
"""Bytes of optimizer state a trained number of four bytes, by what it depends on."""


def _latent_width(sizes: TransformerConfig) -> int:
    """Returns the numbers of a token's short vectors, queries, keys and values in latent attention."""
    latent = sizes.latent
    assert latent is not None
    expanded = sizes.head_size + _expanded_size(sizes)
    return latent.norm_params + latent.rotary_size + sizes.num_heads * expanded


def _expanded_size(sizes: TransformerConfig) -> int:
    """Returns the numbers of a head's key and value that are made from a token's short vector."""
    latent = sizes.latent
    assert latent is not None
    return sizes.head_size - latent.rotary_size + latent.value_size


def _mlp_width(sizes: TransformerConfig) -> int:
    if not sizes.num_experts:
        return sizes.mlp_size
    return sizes.experts_per_token * sizes.expert_mlp_size + sizes.shared_expert_size


def _rows_per_microbatch(config: Config) -> int:
    assert config.batch.rows_per_microbatch is not None  # `make_verdict` fills it in
    return config.batch.rows_per_microbatch


def num_microbatches(config: Config) -> float:
    mesh = config.mesh
    return config.batch.rows / (mesh.data * mesh.fsdp * mesh.expert) / _rows_per_microbatch(config)


def short_schedule(config: Config) -> Schedule:
    """Returns the schedule of a config's pipeline for at most twice as many microbatches as there are stages: more
    take no more slots, and repeat the same ticks.
    """
    pipe, pieces = config.mesh.pipe, config.parallel.pieces
    number = min(max(1, int(num_microbatches(config))), 2 * pipe)
    return _made(schedule_name(config), pipe, number, config.chunks, pieces)


@lru_cache(maxsize=64)
def _made(name: str, stages: int, microbatches: int, chunks: int, pieces: int) -> Schedule:
    return make(name, stages, microbatches, chunks, pieces)


def attention_flops(config: Config, sizes: TransformerConfig) -> float:
    """Returns the operations of attention's scores and of its output in the forward of all layers, a token."""
    length = config.data.sequence_length
    value_size = sizes.latent.value_size if sizes.latent else sizes.head_size
    seen = seen_share(sizes, length) * length * sizes.num_layers / 2
    return 2 * sizes.num_heads * (sizes.head_size + value_size) * seen


def turns_of_layers(config: Config) -> float:
    """Returns how often a microbatch's worth of layers runs: more than once in a pipeline, which fills and drains."""
    if config.mesh.pipe == 1:
        return 1.0
    idle = schedule_kind(config).fill(config.mesh.pipe)
    return 1 + idle / (config.chunks * num_microbatches(config) * config.parallel.pieces)


def runs_flash(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns True if attention never makes scores: GPUs run cuDNN's and a TPU splash, where they can."""
    dtype, mesh = jnp.dtype(config.precision.compute_dtype), config.mesh
    if topology.platform == "cpu" or sizes.attention == "xla":
        return False
    attends = attends_over(config, sizes, topology)
    if topology.platform == "gpu":
        return attends != "ring" and dtype.itemsize == 2 and sizes.variant.has_plain_scores
    if attends is None:
        if sizes.num_kv_heads // mesh.context % mesh.tensor and mesh.context > 1:
            return False
        return splash.refused_sizes(dtype, config.data.sequence_length, sizes.head_size) is None
    kernels = attends == "all_gather" or (attends == "ring" and sizes.window is None)
    return kernels and _context_refusal(config, sizes, attends == "all_gather") is None


def attends_over(config: Config, sizes: TransformerConfig, topology: Topology) -> str | None:
    """Returns how devices of a context axis attend to each other's keys; None where each attends to whole sequences, as
    with all_to_all.
    """
    if config.mesh.context == 1:
        return None
    method = context_method(config, sizes, topology)
    return None if method == "all_to_all" else method


def scores_at_once(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns True if a device makes all scores of its queries at once, those that are masked too: to gathered keys,
    without kernels.
    """
    gathered = attends_over(config, sizes, topology) == "all_gather"
    return gathered and not runs_flash(config, sizes, topology)


def context_method(config: Config, sizes: TransformerConfig, topology: Topology) -> str:
    """Returns how devices of a context axis attend to each other's tokens, as `models.attend.context_method`."""
    if sizes.context_attention != "auto":
        return sizes.context_attention
    if topology.platform == "gpu":
        return _method_of_gpus(config, sizes)
    kernels = topology.platform == "tpu" and sizes.attention != "xla"
    return "all_gather" if kernels and _context_refusal(config, sizes, gathers=True) is None else "ring"


def _method_of_gpus(config: Config, sizes: TransformerConfig) -> str:
    mesh, half = config.mesh, config.data.sequence_length // (2 * config.mesh.context)
    dtype = jnp.dtype(config.precision.compute_dtype)
    query = jax.ShapeDtypeStruct((1, half, sizes.num_heads, sizes.head_size), dtype)
    asked = "cudnn" if sizes.attention == "auto" else sizes.attention  # the GPU is not at hand
    if not cudnn.runs(asked, query, packed=True, plain=sizes.variant.has_plain_scores):
        return "ring"
    return "all_gather" if sizes.num_kv_heads % (mesh.context * mesh.tensor) else "all_to_all"


def _context_refusal(config: Config, sizes: TransformerConfig, gathers: bool) -> str | None:
    """Returns why a TPU's kernels cannot attend over the context axis, or None."""
    dtype, length = (
        jnp.dtype(config.precision.compute_dtype),
        config.data.sequence_length // config.mesh.context,
    )
    refused = splash.refused_sizes(dtype, length // 2, sizes.head_size)
    return refused or (splash_gather.refused_length(length, config.mesh.context) if gathers else None)
