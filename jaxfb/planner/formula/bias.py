"""Counts what cuDNN's attention takes on packed rows for its bias: memory, traffic, and products that nobody needs.

A bias names the documents of a row, [queries, keys] in the compute dtype (`jaxfb.models.attention_kernels.cudnn`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.models.attention_kernels import cudnn
from jaxfb.models.config import TransformerConfig, seen_share
from jaxfb.models.pattern import stack_of
from jaxfb.planner.attends import context_method, runs_flash
from jaxfb.planner.counts import attention_flops, computed_bytes, has_backward, rows_per_microbatch
from jaxfb.planner.topology import Topology


class Calls(NamedTuple):
    """Describes the calls of one row and layer on a device: [queries, keys] of each, and whether they are causal."""

    shapes: list[tuple[int, int]]
    causal: bool = False

    @property
    def scores(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def memory(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts the largest bias of a call; its gradient is there when other work of the layer is not."""
    if not _has_bias(config, sizes, topology):
        return 0.0
    found = _calls(config, sizes, topology, None)
    blocks = found.shapes
    if not found.causal:
        sizes_of_blocks = (cudnn.block_size(_queries(config, queries), keys) for queries, keys in blocks)
        blocks = [(size, keys) for size, (_, keys) in zip(sizes_of_blocks, blocks, strict=True)]
    return computed_bytes(config) * rows_per_microbatch(config) * max(math.prod(block) for block in blocks)


def traffic(config: Config, sizes: TransformerConfig, topology: Topology, again: float) -> float:
    """Counts bytes read and written for one token of a device, in all layers and passes: each forward writes and reads
    a bias, the backward reads it, which blocks write again for it, and writes its gradient.
    """
    if not _has_bias(config, sizes, topology):
        return 0.0
    forward = 2 * (1 + again)
    scores = _over_layers(
        config,
        sizes,
        topology,
        lambda calls: calls.scores * (forward + has_backward(config, sizes) * (2 if calls.causal else 3)),
    )
    return computed_bytes(config) * scores * config.mesh.context / config.data.sequence_length


def flops(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts those of a forward, a token, for keys that its query does not see."""
    if not _has_bias(config, sizes, topology):
        return 0.0
    made = _over_layers(config, sizes, topology, lambda calls: calls.scores / (2 if calls.causal else 1))
    length = config.data.sequence_length
    seen = seen_share(sizes, length) * sizes.num_layers * length**2 / 2
    made *= config.mesh.context if _gathers(config, sizes, topology) else 1  # else of a part of the heads
    return attention_flops(config, sizes) * (made / seen - 1)


def _has_bias(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    if topology.platform != "gpu" or not runs_flash(config, sizes, topology):
        return False
    return _gathers(config, sizes, topology) or config.data.packing != "stream"


def _gathers(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    return config.mesh.context > 1 and context_method(config, sizes, topology) == "all_gather"


def _calls(config: Config, sizes: TransformerConfig, topology: Topology, window: int | None) -> Calls:
    length = config.data.sequence_length
    if _gathers(config, sizes, topology):
        half = length // (2 * config.mesh.context)
        return Calls([(half, length // 2), (half, length)])
    if cudnn.takes_whole(_queries(config, length)):
        return Calls([(length, length)], causal=True)
    groups = cudnn.groups(length, window)
    return Calls([(group.end - group.first, group.end - group.oldest) for group in groups])


def _over_layers(
    config: Config, sizes: TransformerConfig, topology: Topology, count: Callable[[Calls], float]
) -> float:
    layers = stack_of(sizes).counted()
    return sum(number * count(_calls(config, sizes, topology, one.window)) for one, number in layers)


def _queries(config: Config, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (rows_per_microbatch(config), length, 1, 8), jnp.dtype(config.precision.compute_dtype)
    )
