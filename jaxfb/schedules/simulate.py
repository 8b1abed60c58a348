"""Simulates what a schedule costs (forward_backward step), without a device: time, bubble, peak memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxfb.schedules.action import Action
from jaxfb.schedules.sizes import checked_costs, checked_share


@dataclass(frozen=True)
class Simulation:
    """Result of `Schedule.simulate`; times in the unit of the costs given.

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


def simulate(
    schedule,
    *,
    forward: float = 1,
    backward_input: float = 1,
    backward_weight: float = 1,
    head: float = 0,
    attention: float = 0,
) -> Simulation:
    """Charges each tick for what the device executes that has most to do in it."""
    checked_costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight, head=head)
    checked_share("attention", attention)
    costs = kind_costs(schedule, forward, backward_input, backward_weight)
    tick_times = []
    for row, by_device in zip(schedule.table, executed_kinds(schedule), strict=True):
        cells = zip(row, by_device, strict=True)
        work = max(sum(piece_costs(schedule, cell, kinds, costs, attention)) for cell, kinds in cells)
        tick_times.append(work / schedule.num_chunks)
    last = schedule.num_stages * schedule.num_chunks - 1
    for item in range(schedule.num_items):
        tick_times[schedule.ticks["F", item, last]] += (
            head if schedule.num_pieces == 1 else head / schedule.num_pieces
        )
    time = sum(tick_times)
    ideal = schedule.num_microbatches * (sum(costs.values()) + head)
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


def piece_costs(
    schedule, cell: Sequence[Action], kinds: str, costs: Mapping[str, float], attention: float
) -> list[float]:
    """Returns what each of these kinds costs that a device executes: of its cell, or in a bubble of the first piece."""
    pieces = schedule.num_pieces
    if pieces == 1:
        return [costs[kind] for kind in kinds]
    found = {action.kind: action.microbatch % pieces for action in cell}
    shares = [(1 - attention) / pieces + attention * (2 * p + 2) / pieces**2 for p in range(pieces)]
    return [costs[kind] * shares[found.get(kind, 0)] for kind in kinds]


def kind_costs(schedule, forward: float, backward_input: float, backward_weight: float) -> dict[str, float]:
    """Returns cost by kind; a B without W beside it is the whole backward."""
    costs = {"F": forward}
    if schedule.splits_backward:
        costs |= {"B": backward_input, "W": backward_weight}
    elif schedule.has_backward:
        costs["B"] = backward_input + backward_weight
    return costs
