"""Zero-bubble (forward_backward step): weight gradients leave the backward's chain and wait for nobody."""

from jaxfb.schedules.action import Action
from jaxfb.schedules.lockstep import Timed, queue
from jaxfb.schedules.one_f_one_b import one_f_one_b


def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Timed]:
    """1F1B with B the input gradient alone, and W of an item on *every* device when device 0 runs its B.

    So W never waits for anyone and costs M*V ticks, not M*V + P - 1: time
    (M*V + P - 1) * (f + b_input) / V + M * b_weight. Device 0, whose buffers are the largest, holds its
    activations no longer than under 1F1B, so a program with equal buffers everywhere needs no more residual
    slots.
    """
    one_backward = one_f_one_b(num_stages, num_microbatches, num_chunks)
    return one_backward + weights(num_stages, num_microbatches, num_chunks, one_backward)


def weights(num_stages: int, num_microbatches: int, num_chunks: int, timed: list[Timed]) -> list[Timed]:
    """W in the order of B, in the last M*V ticks: no holes even where M < P leaves some between the B."""
    items = list(queue(num_stages, num_microbatches, num_chunks))
    start = 1 + max(tick for tick, _, _ in timed) - len(items)
    return [
        (start + i, d, Action("W", m, num_chunks - 1 - visit))
        for i, (m, visit) in enumerate(items)
        for d in range(num_stages)
    ]
