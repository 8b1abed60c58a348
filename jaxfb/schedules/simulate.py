"""Simulates what a schedule costs, without a device: time, bubble, peak memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxfb.schedules.costs import Costs


@dataclass(frozen=True)
class Simulation:
    """Holds the result of `Schedule.simulate`; times in the unit of the costs given.

    Attributes:
      time: of one step: the sum over ticks of the longest that a device takes for what it executes in the tick.
      ideal_time: of one step if no device ever idled: M microbatches of everything.
      bubble_fraction: 1 - ideal_time / time, in 0 .. 1.
      peak_live_activations: by device, the most chunk activations (each 1 / num_chunks of a device's layers, of one
        piece) whose F has run and whose last reader, B or W, has not.
      tick_times: cost of each tick.
    """

    time: float
    ideal_time: float
    bubble_fraction: float
    peak_live_activations: tuple[int, ...]
    tick_times: tuple[float, ...]


def simulate(schedule, costs: Costs) -> Simulation:
    """Charges each tick for what the device executes that has most to do in it."""
    tick_times = []
    for row, by_device in zip(schedule.table, executed_kinds(schedule), strict=True):
        cells = zip(row, by_device, strict=True)
        work = max(sum(costs.of_cell(schedule, cell, kinds)) for cell, kinds in cells)
        tick_times.append(work / schedule.num_chunks)
    last = schedule.num_stages * schedule.num_chunks - 1
    for item in range(schedule.num_items):
        tick_times[schedule.ticks["F", item, last]] += costs.of_head(schedule)
    time = sum(tick_times)
    ideal = schedule.num_microbatches * (sum(costs.by_kind(schedule).values()) + costs.head)
    return Simulation(
        time=time,
        ideal_time=ideal,
        bubble_fraction=1 - ideal / time if time else 0.0,
        peak_live_activations=schedule.slots.num["residual"],
        tick_times=tuple(tick_times),
    )


def executed_kinds(schedule) -> Iterator[tuple[str, ...]]:
    """Yields, tick by tick, the kinds that each device executes: all of its phase, or those of its own cell."""
    for phase in schedule.phases:
        for row in schedule.table[phase.start : phase.stop]:
            own = tuple("".join(action.kind for action in cell) for cell in row)
            yield own if schedule.by_device else (phase.kinds,) * schedule.num_stages
