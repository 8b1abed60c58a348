"""Zero-bubble: weight gradients leave the backward's chain and wait for nobody."""

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.lockstep import Timed, queue, tabulate
from jaxfb.schedules.builders.one_f_one_b import paired_ticks
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.table import Schedule


@schedule_kind(
    "zero_bubble",
    chunks=lambda asked: (1, asked) if asked > 1 else (1,),
    fill=lambda stages: 2 / 3 * (stages - 1),
    splits_backward=True,
)
def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs 1F1B with B the input gradient alone, and W of an item on *every* device when device 0 runs its B.

    So W never waits for anyone and costs M*V ticks, not M*V + P - 1: time
    (M*V + P - 1) * (f + b_input) / V + M * b_weight. Device 0, whose buffers are the largest, holds its
    activations no longer than under 1F1B, so a program with equal buffers everywhere needs no more residual
    slots.
    """
    timed = paired_ticks(num_stages, num_microbatches, num_chunks)
    timed += weights(num_stages, num_microbatches, num_chunks, timed)
    return tabulate("zero_bubble", timed, loop_placement(num_stages, num_chunks), num_microbatches)


def weights(num_stages: int, num_microbatches: int, num_chunks: int, timed: list[Timed]) -> list[Timed]:
    """Runs W in the order of B, in the last M*V ticks: no holes even where M < P leaves some between the B."""
    items = list(queue(num_stages, num_microbatches, num_chunks))
    start = 1 + max(tick for tick, _, _ in timed) - len(items)
    return [
        (start + i, d, Action("W", m, num_chunks - 1 - visit))
        for i, (m, visit) in enumerate(items)
        for d in range(num_stages)
    ]
