"""Ticks of the lockstep schedules on the ring of stages.

All devices walk the ticks of one program, so a tick costs the maximum over devices; F and B therefore share a
tick instead of alternating. The forward items (microbatch, chunk) form one queue; the item at position k runs
on device d at tick k + d. Backward items form the same queue with the chunks reversed and walk from the last
device to the first, beginning at tick `backward_start`. An output is usable on another device one tick later,
so the chunks of one microbatch must be at least P positions apart.
"""

from collections.abc import Sequence
from functools import partial

from jaxfb.schedules.action import KINDS, Action
from jaxfb.schedules.placement import Placement
from jaxfb.schedules.table import Schedule

Timed = tuple[int, int, Action]
"""(tick, device, action)."""


def group_sizes(num_stages: int, num_microbatches: int) -> list[int]:
    """Returns microbatches that visit a chunk one after another, before the next chunk's turn.

    A group of at least P leaves no hole between its chunks. M that is not a multiple of P is dealt evenly
    over M // P groups (9 on 4 devices: 5 + 4), which costs no tick; a group of the remainder alone would cost
    (V - 1) * (P - M % P) ticks each way. M < P is one group, whose holes cannot be avoided.
    """
    count = max(num_microbatches // num_stages, 1)
    size, extra = divmod(num_microbatches, count)
    return [size + 1] * extra + [size] * (count - extra)


def queue(num_stages: int, num_microbatches: int, num_chunks: int) -> dict[tuple[int, int], int]:
    """Returns the position of each (microbatch, nth chunk visited), in order of position."""
    return queue_of(group_sizes(num_stages, num_microbatches), num_stages, num_chunks)


def queue_of(groups: Sequence[int], num_stages: int, num_chunks: int) -> dict[tuple[int, int], int]:
    """Returns the same for groups of any sizes."""
    positions, start, first = {}, 0, 0
    for size in groups:
        pitch = max(size, num_stages)
        for visit in range(num_chunks):
            for i in range(size):
                positions[first + i, visit] = start + visit * pitch + i
        start, first = start + num_chunks * size, first + size
    return positions


def backward_start(num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Returns the tick in which the last device may start: its first microbatch leaves the last chunk (P*V - 1)."""
    pitch = max(num_stages, *group_sizes(num_stages, num_microbatches))
    return (num_chunks - 1) * pitch + num_stages - 1


def forwards(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Timed]:
    """Runs F of the item at position k on device d at tick k + d."""
    positions = queue(num_stages, num_microbatches, num_chunks)
    return [(k + d, d, Action("F", m, c)) for (m, c), k in positions.items() for d in range(num_stages)]


def backwards(num_stages: int, num_microbatches: int, num_chunks: int, start: int) -> list[Timed]:
    """Runs B of the item at position k on device d at tick start + k + P - 1 - d."""
    positions = queue(num_stages, num_microbatches, num_chunks)
    return [
        (start + k + num_stages - 1 - d, d, Action("B", m, num_chunks - 1 - visit))
        for (m, visit), k in positions.items()
        for d in range(num_stages)
    ]


def tabulate(
    name: str,
    timed: Sequence[Timed],
    placement: Placement,
    num_microbatches: int,
    by_device: bool = False,
    num_pieces: int = 1,
) -> Schedule:
    """Returns the schedule that runs these actions in these ticks; a cell is in the order in which a tick runs it."""
    table = [[[] for _ in placement] for _ in range(1 + max(tick for tick, _, _ in timed))]
    for tick, device, action in timed:
        table[tick][device].append(action)
    in_order = partial(sorted, key=lambda action: KINDS.index(action.kind))
    cells = tuple(tuple(tuple(in_order(cell)) for cell in row) for row in table)
    sizes = len(placement), num_microbatches, len(placement[0])
    return Schedule(name, *sizes, cells, placement, by_device, num_pieces)
