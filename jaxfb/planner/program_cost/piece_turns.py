"""Counts the turns that attention takes over earlier pieces of a sequence: how many, no program of pieces contains."""

from __future__ import annotations

from jaxfb.schedules.table import Schedule

PRODUCTS = {"F": 2.0, "B": 7.0}
"""Of a block of scores: theirs and the output's; scores twice, and five gradients."""


def mean_turns(schedule: Schedule) -> float:
    """Returns the turns of the device that has most to do, averaged over the ticks: all devices wait for it.

    A turn is an earlier piece; one that runs in a bubble has none.
    """
    longest, executed = 0.0, 0.0
    for phase in schedule.phases:
        cost = sum(PRODUCTS[kind] for kind in phase.kinds)
        executed += cost * (phase.stop - phase.start)
        for row in schedule.table[phase.start : phase.stop]:
            longest += max(
                sum(PRODUCTS[action.kind] * (action.microbatch % schedule.num_pieces) for action in cell)
                for cell in row
            )
    return longest / executed
