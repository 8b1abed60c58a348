"""Draws schedules: any legal order of forwards and backwards on any legal placement of the stages. No JAX in here."""

from __future__ import annotations

from collections.abc import Iterator

from jaxfb.checking.drawing.dice import Dice
from jaxfb.schedules import Action, Schedule

Item = tuple[str, int, int]
"""(kind, microbatch, stage)."""


def random_schedule(seed: int, pipe: int, microbatches: int, chunks: int, splits: bool) -> Schedule:
    """Draws a schedule from a seed; `splits` makes weight gradients separate actions.

    In each tick a device takes up to one action of each kind of those that could run, or idles.
    """
    dice = Dice("table", seed, pipe, microbatches, chunks)
    placement = _placement(dice, pipe, chunks)
    homes = {stage: (d, c) for d, row in enumerate(placement) for c, stage in enumerate(row)}
    waiting = [
        (kind, m, stage)
        for kind in ("FBW" if splits else "FB")
        for m in range(microbatches)
        for stage in range(pipe * chunks)
    ]
    done: dict[Item, int] = {}
    table = []
    while waiting:
        cells: list[list[Action]] = [[] for _ in range(pipe)]
        for item in _chosen(dice, waiting, homes, done, len(table)):
            device, chunk = homes[item[2]]
            cells[device].append(Action(item[0], item[1], chunk))
            waiting.remove(item)
        table.append(cells)
    return Schedule.from_table(table, name="random", placement=placement)


def _chosen(dice: Dice, waiting: list[Item], homes: dict, done: dict[Item, int], tick: int) -> Iterator[Item]:
    """Yields what runs in this tick, and notes it in `done`."""
    last = len(homes) - 1
    for kind in "FBW":
        for device in sorted({device for device, _ in homes.values()}):
            of_kind = [item for item in waiting if item[0] == kind and homes[item[2]][0] == device]
            ready = [item for item in of_kind if _is_ready(item, done, tick, last)]
            if ready and dice.chance(0.8):
                item = dice.one(*ready)
                done[item] = tick
                yield item


def _is_ready(item: Item, done: dict[Item, int], tick: int, last: int) -> bool:
    """Returns whether its inputs are there: those of the same stage at once, those of another a tick later."""
    kind, m, stage = item
    here = {"B": [("F", m, stage)], "W": [("B", m, stage)]}.get(kind, [])
    before = {"F": [("F", m, stage - 1)] if stage else [], "B": [("B", m, stage + 1)] if stage < last else []}
    return all(need in done for need in here) and all(
        done.get(need, tick) < tick for need in before.get(kind, [])
    )


def _placement(dice: Dice, pipe: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Walks over the ring of devices until each was visited once for every chunk: a step to a neighbour or none."""
    while True:
        devices: list[list[int]] = [[] for _ in range(pipe)]
        device = dice.one(*range(pipe))
        for stage in range(pipe * chunks):
            devices[device].append(stage)
            free = [d for d in {(device + step) % pipe for step in (-1, 0, 1)} if len(devices[d]) < chunks]
            if not free:
                break
            device = dice.one(*sorted(free))
        if all(len(stages) == chunks for stages in devices):
            return tuple(map(tuple, devices))
