"""Runs every action as early as its inputs allow, in a given order on each device."""

from collections.abc import Iterator, Mapping, Sequence

from jaxfb.schedules.action import Action, Table
from jaxfb.schedules.placement import Placement

Cells = tuple[tuple[Action, ...], ...]


def earliest(orders: Sequence[Sequence[Action]], placement: Placement) -> Iterator[Cells]:
    """Yields the ticks in which each device runs its actions in order, one a tick, each as soon as its input is there.

    The orders must be possible: somewhere an action must always be able to run.
    """
    left = [list(order) for order in orders]
    last = sum(len(stages) for stages in placement) - 1
    done: set[tuple[str, int, int]] = set()
    while any(left):
        cells = tuple(_next(order, stages, last, done) for order, stages in zip(left, placement, strict=True))
        for order, cell in zip(left, cells, strict=True):
            del order[: len(cell)]
        done |= {
            (action.kind, action.microbatch, placement[device][action.chunk])
            for device, cell in enumerate(cells)
            for action in cell
        }
        yield cells


def time_of(orders: Sequence[Sequence[Action]], placement: Placement, costs: Mapping[str, float]) -> float:
    """Returns when the last device ends: each runs its actions in order, as soon as their inputs are there.

    Args:
      costs: of an action of each kind, "F", "B" and "W"; transport is free.
    """
    last = sum(map(len, placement)) - 1
    done: dict[tuple[str, int, int], float] = {}
    clocks, waiting = [0.0] * len(orders), [list(reversed(order)) for order in orders]
    while any(waiting):
        for device, order in enumerate(waiting):
            while order:
                kind, m, chunk = order[-1]
                stage = placement[device][chunk]
                source = {"F": stage - 1, "B": stage + 1}.get(kind, -1)
                ready = done.get((kind, m, source)) if 0 <= source <= last else 0.0
                if ready is None:
                    break
                clocks[device] = max(clocks[device], ready) + costs[kind]
                done[kind, m, stage] = clocks[device]
                order.pop()
    return max(clocks)


def earliest_forwards(table: Table, placement: Placement) -> Table:
    """Returns a table of the forwards of a table, each device's in their order, one a tick, without needless ticks."""
    orders = [[a for row in table for a in row[device] if a.kind == "F"] for device in range(len(placement))]
    return tuple(earliest(orders, placement))


def possible(action: Action, stages: Sequence[int], last: int, done: set[tuple[str, int, int]]) -> bool:
    """Returns whether the input of an action is there, given the (kind, microbatch, stage) that are done.

    Args:
      stages: the stages of the action's device, by chunk.
      last: the last stage of the model.
    """
    stage, m = stages[action.chunk], action.microbatch
    if action.kind == "F":
        return stage == 0 or ("F", m, stage - 1) in done
    if action.kind == "W":
        return ("B", m, stage) in done
    return ("F", m, stage) in done and (stage == last or ("B", m, stage + 1) in done)


def _next(order: Sequence[Action], stages: Sequence[int], last: int, done: set) -> tuple[Action, ...]:
    return (order[0],) if order and possible(order[0], stages, last, done) else ()
