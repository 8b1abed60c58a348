"""Runs forwards as early as possible (forward_backward step): what is left of a table without its backwards."""

from collections.abc import Iterator, Sequence

from jaxfb.schedules.action import Action, Table
from jaxfb.schedules.placement import Placement

Cells = tuple[tuple[Action, ...], ...]


def earliest_forwards(table: Table, placement: Placement) -> Table:
    """Returns a table of the forwards of a table, each device's in their order, one a tick, without needless ticks."""
    orders = [[a for row in table for a in row[device] if a.kind == "F"] for device in range(len(placement))]
    return tuple(_ticks(orders, placement))


def _ticks(orders: Sequence[list[Action]], placement: Placement) -> Iterator[Cells]:
    done: set[tuple[int, int]] = set()
    while any(orders):
        cells = tuple(_next(order, stages, done) for order, stages in zip(orders, placement, strict=True))
        for order, cell in zip(orders, cells, strict=True):
            del order[: len(cell)]
        done |= {
            (action.microbatch, placement[device][action.chunk])
            for device, cell in enumerate(cells)
            for action in cell
        }
        yield cells


def _next(order: Sequence[Action], stages: Sequence[int], done: set) -> tuple[Action, ...]:
    if not order:
        return ()
    stage = stages[order[0].chunk]
    return (order[0],) if stage == 0 or (order[0].microbatch, stage - 1) in done else ()
