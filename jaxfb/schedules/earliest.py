"""Runs every action as early as its inputs allow (forward_backward step), in a given order on each device."""

from collections.abc import Iterator, Sequence

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
