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
from jaxfb.forward_backward.layers.ahead import gathers_ahead, halves_pay
from jaxfb.forward_backward.layers.last_microbatch import obstacle_to_overlap, overlaps
from jaxfb.models.config import TransformerConfig, num_params, seen_share
from jaxfb.models.layout import layers_of_stages
from jaxfb.models.pattern import stack_of
from jaxfb.models.trained_flops import TrainedFlops, runs_backward, trained_flops
from jaxfb.models.transformer import init_params, transformer
from jaxfb.planner.topology import Topology
from jaxfb.recomputation import remat_parts
from jaxfb.schedules import Kind, Schedule, default_name, kind_of, make
from jaxfb.trainable import matches, name_of, parted, pruned
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


def trains_norms(config: Config, sizes: TransformerConfig) -> bool:
    """Returns whether the scales of norms in front of or behind a layer's parts are trained."""
    patterns = trained_patterns(config)
    return patterns is None or _match_norms(sizes, patterns)


@lru_cache(maxsize=16)
def _match_norms(sizes: TransformerConfig, patterns: tuple[str, ...]) -> bool:
    params = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))["layers"]
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path({"layers": params})]
    norms = [name for name in names if name.endswith("_norm.scale") and ".attention." not in name]
    return any(matches(pattern, name) for pattern in patterns for name in norms)


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
    return rows_per_microbatch(config) * config.data.sequence_length // config.mesh.context


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


def schedule_name(config: Config) -> str:
    return config.schedule or default_name(config.chunks, config.parallel.pieces)


def schedule_kind(config: Config) -> Kind:
    return kind_of(schedule_name(config))


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


def rows_per_microbatch(config: Config) -> int:
    """Returns the rows of a replica's microbatch, which are known once the layout is."""
    assert config.batch.rows_per_microbatch is not None  # filled in once a layout has a plan
    return config.batch.rows_per_microbatch


def num_microbatches(config: Config) -> float:
    mesh = config.mesh
    return config.batch.rows / (mesh.data * mesh.fsdp * mesh.expert) / rows_per_microbatch(config)


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
