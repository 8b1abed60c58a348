"""Estimates how long products in loops wait for permutes over a tensor axis (sequence parallelism on TPUs).

With the options of `jaxfb/platforms/compiler.py` the compiler makes a loop of a product and the gather before it or the
scatter behind it: a turn multiplies two devices' tokens while the next ones come from the neighbours on both sides. A
short product, such as that of attention's output, is over before.
"""

from __future__ import annotations

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig
from jaxfb.planner.counts import (
    computed_bytes,
    has_backward,
    layers_here,
    num_microbatches,
    tokens_of_microbatch,
    turns_of_layers,
)
from jaxfb.planner.formula.time import exposed_share, forwards_again, tensor_seconds
from jaxfb.planner.formula.widths import dense_width
from jaxfb.planner.topology import Topology
from jaxfb.platforms import compiler

_WAITS = 1.36
"""How many times as long as counted here the compiled loops of 70B and 405B on v5p wait: 1.33 to 1.38."""
_BETWEEN_TWO = 0.7
"""Share of the collectives between two devices that nothing hides; there are no loops then (70B on v6e:4x8)."""


def loop_seconds(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the time that a step's loops wait, less what `exposed_seconds` counts of their permutes."""
    chip, size = topology.chip, config.mesh.tensor
    if chip is None or size == 1 or not sizes.sequence_parallel or chip.kind not in compiler.TENSOR_TABLE:
        return 0.0
    collectives = tensor_seconds(config, sizes, chip)
    counted = exposed_share(config, sizes, topology) * collectives
    if size == 2:
        return max(0.0, _BETWEEN_TWO * collectives - counted)
    tokens = tokens_of_microbatch(config)
    permute = computed_bytes(config) * tokens * sizes.hidden_size / size / (chip.axis_bandwidth / 2)
    heads, middle = sizes.num_heads, dense_width(sizes)
    widths = (heads + 2 * sizes.num_kv_heads) * sizes.head_size, heads * sizes.head_size, 2 * middle, middle
    products = (2 * tokens * sizes.hidden_size * width / size / chip.flops for width in widths if width)
    waits = sum(_waited(product, permute, size) for product in products)
    of_layers = turns_of_layers(config)
    runs = (
        layers_here(config, sizes)
        * of_layers
        * num_microbatches(config)
        * (2 + forwards_again(config, sizes) if has_backward(config, sizes) else 1)
    )
    return max(0.0, waits * runs - counted)


def _waited(product: float, permute: float, size: int) -> float:
    """Returns the seconds that a loop waits for its permutes, at most what one collective in place of the loop takes.

    product: seconds of the whole product. permute: seconds of one turn's permute, which uses one of two links; a
      collective uses both.
    """
    turns = size // 2
    waited = _WAITS * max(0.0, turns * permute - (1 - 1 / turns) * product)
    return min(waited, (size - 1) / 2 * permute)
