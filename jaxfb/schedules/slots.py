"""Buffer slots of a table: how many of each kind a device needs, and who uses which.

Five buffers, each a ring on every device; a value occupies one slot from the tick that writes it to the tick
of its last reader, both included (a tick writes before it reads):

  residual    what a forward leaves for its backward: written by F, read by B, and by W where the table has W
  activation  an input on its way: written when it arrives, the tick after the previous stage's F; read by F
  gradient    an output gradient on its way: written when it arrives, the tick after the next stage's B, or,
              on the last stage, in the tick of F itself, by the loss; read by B
  cotangent   what B leaves for W (the gradients at the outputs of the weights' products): written by
              B, read by W
  cache       where sequences are cut into pieces, the keys and values of a microbatch and their gradients: written by
              F and by B of every piece, from F of its first piece to B of the same (without a backward, to F of
              its last)

Intervals are coloured greedily by start, lowest free slot first, which is optimal: the number of slots is the
largest number of intervals that overlap. What F and B write in a bubble goes to a slot that nothing occupies in that
tick; as a rule there is one, since it is another tick that needs all of them. Where each device runs its own cell, a
bubble writes nothing.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

BUFFERS = ("residual", "activation", "gradient", "cotangent", "cache")
WRITTEN_BY = {"residual": "F", "cotangent": "B"}
"""The kinds that write to a buffer on every device, valid or not, and never as an arrival."""
WITH_SPARE = ("activation", "gradient")
"""The buffers that have a slot more, for what nobody reads."""

Item = tuple[int, int]
"""(microbatch, stage); of sequences in pieces (piece, stage), and for a cache the first piece."""


class Interval(NamedTuple):
    start: int
    stop: int
    item: Item


@dataclass(frozen=True)
class Slots:
    """Lists the buffer slots that each device needs, and the slot that each item uses.

    num[buffer][device] slots are needed; number[buffer][microbatch, stage] is the one an item uses.

    idle[buffer][tick, device] is the one that a bubble may write to.
    """

    num: dict[str, tuple[int, ...]]
    number: dict[str, dict[Item, int]]
    idle: dict[str, dict[tuple[int, int], int]]

    def most(self, buffer: str) -> int:
        """Returns the most slots that any device needs, bubbles included: buffers have one shape on all devices."""
        idle = self.idle.get(buffer, {}).values()
        return max([*self.num[buffer], *(1 + slot for slot in idle)])


def slots_of(schedule) -> Slots:
    """Colours the intervals of a valid schedule, buffer by buffer and device by device."""
    num, number, idle = {}, {}, {}
    for buffer, by_device in intervals(schedule).items():
        coloured = [colour(found) for found in by_device]
        num[buffer] = tuple(count for count, _ in coloured)
        number[buffer] = {item: slot for _, slots in coloured for item, slot in slots.items()}
        if buffer in WRITTEN_BY and number[buffer] and not schedule.by_device:
            idle[buffer] = unoccupied(schedule, by_device, number[buffer], WRITTEN_BY[buffer])
    return Slots(num, number, idle)


def intervals(schedule) -> dict[str, list[list[Interval]]]:
    """Returns intervals(schedule)[buffer][device]: when each item occupies a slot."""
    ticks, last = schedule.ticks, schedule.num_stages * schedule.num_chunks - 1
    found = {buffer: [[] for _ in range(schedule.num_stages)] for buffer in BUFFERS}

    def add(buffer, stage, start, stop, microbatch):
        device, _ = schedule.device_chunk_of(stage)
        found[buffer][device].append(Interval(start, stop, (microbatch, stage)))

    for (kind, m, stage), tick in ticks.items():
        if kind == "F" and stage > 0:
            add("activation", stage, ticks["F", m, stage - 1] + 1, tick, m)
        if kind == "F" and ("B", m, stage) in ticks:
            reader = ticks.get(("W", m, stage), ticks["B", m, stage])
            add("residual", stage, tick, reader, m)
        if kind == "B":
            arrival = ticks["F", m, stage] if stage == last else ticks["B", m, stage + 1] + 1
            add("gradient", stage, arrival, tick, m)
        if kind == "F" and schedule.num_pieces > 1 and m % schedule.num_pieces == 0:
            last_piece = ticks["F", m + schedule.num_pieces - 1, stage]
            add("cache", stage, tick, ticks.get(("B", m, stage), last_piece), m)
        if kind == "W":
            add("cotangent", stage, ticks["B", m, stage], tick, m)
    return found


def unoccupied(
    schedule, by_device: list[list[Interval]], number: dict[Item, int], kind: str
) -> dict[tuple[int, int], int]:
    """Returns (tick, device) of every bubble of that kind -> the lowest slot that no interval occupies then."""
    valid = {
        (tick, schedule.device_chunk_of(s)[0]) for (k, _, s), tick in schedule.ticks.items() if k == kind
    }
    ticks = [
        tick for phase in schedule.phases if kind in phase.kinds for tick in range(phase.start, phase.stop)
    ]
    slots: dict[tuple[int, int], int] = {}
    for device, found in enumerate(by_device):
        bubbles = [tick for tick in ticks if (tick, device) not in valid]
        free = lowest_free(found, number, bubbles)
        slots |= {(tick, device): slot for tick, slot in zip(bubbles, free, strict=True)}
    return slots


def lowest_free(found: list[Interval], number: dict[Item, int], ticks: list[int]) -> list[int]:
    """Returns the lowest slot that none of these intervals occupies, for each of these ticks, which are in order."""
    starting = sorted((start, number[item]) for start, _, item in found)[::-1]
    stopping = sorted((stop, number[item]) for _, stop, item in found)[::-1]
    occupied = [0] * len({slot for _, slot in starting})
    free, lowest = list(range(len(occupied))), []
    for tick in ticks:
        while starting and starting[-1][0] <= tick:
            occupied[starting.pop()[1]] += 1
        while stopping and stopping[-1][0] < tick:
            slot = stopping.pop()[1]
            occupied[slot] -= 1
            heapq.heappush(free, slot)
        while free and occupied[free[0]]:
            heapq.heappop(free)  # it is pushed again when its interval stops
        lowest.append(free[0] if free else len(occupied))
    return lowest


def colour(found: list[Interval]) -> tuple[int, dict[Item, int]]:
    """Returns (number of slots, slot by item) of one device's intervals."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    slots: dict[Item, int] = {}
    count = 0
    for start, stop, item in sorted(found):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free, count = [count], count + 1
        slots[item] = heapq.heappop(free)
        heapq.heappush(busy, (stop, slots[item]))
    return count, slots
