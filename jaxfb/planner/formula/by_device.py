"""Estimates by formula how long devices wait for each other under a schedule by device, whose kinds differ in cost."""

from __future__ import annotations

from functools import lru_cache

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.planner.counts import attention_flops, schedule_kind, short_schedule
from jaxfb.schedules import Schedule

_BACKWARD_OF_ATTENTION = 7 / 2
"""Products of the backward of attention's kernels over those of the forward, whose scores it makes again. All are in
B."""


def waits(config: Config, sizes: TransformerConfig, again: float) -> float:
    """Returns how many times as long the layers take as if F, B and W cost the same: in each tick all devices wait for
    the one with most to do. 1 where all devices compute the same kinds.

    again: how often a layer's forward runs again for its backward.
    """
    if config.mesh.pipe == 1 or not schedule_kind(config).by_device:
        return 1.0
    costs = tuple(round(cost, 2) for cost in _costs(config, sizes, again))
    return _waits(short_schedule(config), costs)


def _costs(config: Config, sizes: TransformerConfig, again: float) -> tuple[float, float, float]:
    """Returns what F, B and W cost, where a forward without attention costs 1."""
    head = 2 * sizes.hidden_size * sizes.vocab_size
    forward = flops_per_token(sizes, config.data.sequence_length) / 3 - head
    scores = attention_flops(config, sizes)
    attention = scores / (forward - scores)
    whole = 1 + attention
    return whole, 1 + _BACKWARD_OF_ATTENTION * attention + again * whole, 1.0


@lru_cache(maxsize=64)
def _waits(schedule: Schedule, costs: tuple[float, ...]) -> float:
    return _time(schedule, costs) / _time(schedule, (sum(costs) / 3,) * 3)


def _time(schedule: Schedule, costs: tuple[float, ...]) -> float:
    forward, backward_input, backward_weight = costs
    return schedule.simulate(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight
    ).time
