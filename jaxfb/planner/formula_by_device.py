"""Estimates by formula how long devices wait for each other under a schedule by device, whose kinds differ in cost."""

from __future__ import annotations

from functools import lru_cache

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig, flops_per_token, seen_share
from jaxfb.planner.counts import num_microbatches, schedule_kind, schedule_name
from jaxfb.schedules import make

_BACKWARD_OF_ATTENTION = 7 / 2
"""Products of attention's kernels backward over those forward; its scores are made again. All are in B."""


def waits(config: Config, sizes: TransformerConfig, again: float) -> float:
    """Returns how many times as long the layers take as if F, B and W cost the same: in each tick all wait for the
    device that has most to do. 1 where all devices compute the same kinds.

    again: how often a layer's forward runs again for its backward.
    """
    if config.mesh.pipe == 1 or not schedule_kind(config).by_device:
        return 1.0
    number = min(int(num_microbatches(config)), 2 * config.mesh.pipe)
    costs = [round(cost, 2) for cost in _costs(config, sizes, again)]
    return _waits(schedule_name(config), config.mesh.pipe, max(1, number), config.chunks, *costs)


def _costs(config: Config, sizes: TransformerConfig, again: float) -> tuple[float, float, float]:
    """Returns what F, B and W cost, in the cost of a forward without attention."""
    length = config.data.sequence_length
    forward = flops_per_token(sizes, length) / 3 - 2 * sizes.hidden_size * sizes.vocab_size
    value_size = sizes.latent.value_size if sizes.latent else sizes.head_size
    keys = seen_share(sizes, length) * length * sizes.num_layers / 2
    scores = 2 * sizes.num_heads * (sizes.head_size + value_size) * keys
    attention = scores / (forward - scores)
    whole = 1 + attention
    return whole, 1 + _BACKWARD_OF_ATTENTION * attention + again * whole, 1.0


@lru_cache(maxsize=64)
def _waits(
    name: str, stages: int, microbatches: int, chunks: int, forward: float, backward: float, weight: float
) -> float:
    schedule = make(name, stages, microbatches, chunks)
    even = (forward + backward + weight) / 3
    found, alike = (
        schedule.simulate(forward=f, backward_input=b, backward_weight=w).time
        for f, b, w in ((forward, backward, weight), (even, even, even))
    )
    return found / alike
