"""Builds schedules in a V from one repeated block, for ticks that differ by device.

A microbatch passes the devices four times: forward down (chunk 0) and up (chunk 1), backward down (chunk 1) and up
(chunk 0). A `Block` gives the ticks from device to device on each of the four ways, and the ticks spent at the three
turns. Six actions of a microbatch are a device's work, so blocks of successive microbatches start six ticks apart; a
block whose actions fall on different ticks modulo 6 on every device never collides with its neighbours. How long an
activation lives, and with it the memory, is the length of the block ("Pipeline Parallelism with Controllable Memory",
arXiv:2405.15362, section 3). The bubbles at both ends are then closed: each device keeps the block's order of F and B,
or runs a B before its turn where nothing whose turn it is can run; each as early as it can, and W wherever nothing else
can run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.lockstep import Timed, tabulate
from jaxfb.schedules.earliest import possible
from jaxfb.schedules.placement import Placement, check_two_chunks, v_placement
from jaxfb.schedules.table import Schedule

PERIOD = 6
"""F, B and W of two chunks."""

WAYS = (("F", 0), ("F", 1), ("B", 1), ("B", 0))


class Block(NamedTuple):
    """The ticks of a microbatch: `steps` to the next device on each of WAYS, `turns` between one way and the next."""

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def ticks(self, num_stages: int) -> list[list[int]]:
        """Returns ticks[way][device]."""
        devices, tick, found = range(num_stages), 0, []
        for (_, chunk), step, turn in zip(WAYS, self.steps, (0, *self.turns), strict=True):
            tick += turn
            down = chunk == 0 if len(found) < 2 else chunk == 1
            found.append([tick + step * (d if down else num_stages - 1 - d) for d in devices])
            tick += step * (num_stages - 1)
        return found

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Action]]:
        """Returns F and B of every device in the order of the repeated block."""
        ticks = self.ticks(num_stages)
        timed = [
            [
                (PERIOD * m + by_device[device], Action(kind, m, chunk))
                for (kind, chunk), by_device in zip(WAYS, ticks, strict=True)
                for m in range(num_microbatches)
            ]
            for device in range(num_stages)
        ]
        return [[action for _, action in sorted(found)] for found in timed]

    def collides(self, num_stages: int) -> bool:
        """Returns whether two actions of a device fall on the same tick modulo the period."""
        ticks = self.ticks(num_stages)
        return any(len({way[d] % PERIOD for way in ticks}) < len(WAYS) for d in range(num_stages))


def v_blocks(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, blocks: Sequence[Block], most: int
) -> Schedule:
    """Returns the shortest of the schedules that these blocks make with at most `most` live activations a device.

    Raises:
      ValueError: num_chunks is not 2.
    """
    check_two_chunks(name, num_chunks, instead="zero_bubble")
    possible = [block for block in blocks if not block.collides(num_stages)]
    placement = v_placement(num_stages)
    found = [
        _timed(block.order(num_stages, num_microbatches), placement, most, reorders)
        for reorders in (False, True)
        for block in possible
    ]
    shortest = min((timed for timed in found if timed), key=lambda timed: timed[-1][0])
    return tabulate(name, shortest, placement, num_microbatches, by_device=True)


@dataclass
class _Device:
    """Keeps what a device has yet to do: F and B in order, and W whose B has run; and how many activations are live."""

    order: deque[Action]
    weights: deque[Action] = field(default_factory=deque)
    live: int = 0

    def candidates(self, reorders: bool) -> list[Action]:
        """Returns what may run now: the next of the order and, with `reorders`, the next B of each chunk."""
        found = list(islice(self.order, 1))
        backwards = (action for action in self.order if action.kind == "B") if reorders else ()
        chunks = set()
        for action in backwards:
            if action.chunk not in chunks:
                chunks.add(action.chunk)
                found.append(action)
            if len(chunks) == 2:
                break
        return found

    def take(self, can_run: Sequence[Action]) -> Action | None:
        """Takes the first of what can run, else a W, else nothing."""
        if not can_run:
            self.live -= bool(self.weights)
            return self.weights.popleft() if self.weights else None
        action = can_run[0]
        self.order.remove(action)
        self.live += action.kind == "F"
        if action.kind == "B":
            self.weights.append(action._replace(kind="W"))
        return action


def _timed(order: Sequence[Sequence[Action]], placement: Placement, most: int, reorders: bool) -> list[Timed]:
    """Returns each action with the tick in which a device runs it, one a tick; [] if the block needs more memory.

    reorders: whether a B may run before its turn.
    """
    devices = [_Device(deque(actions)) for actions in order]
    done: set[tuple[str, int, int]] = set()
    found: list[Timed] = []
    pairs = list(zip(devices, placement, strict=True))
    tick, last = 0, 2 * len(devices) - 1
    while any(device.order or device.weights for device in devices):
        can_run = [
            [a for a in device.candidates(reorders) if _possible(a, device.live, stages, last, done, most)]
            for device, stages in pairs
        ]
        taken = [(d, device.take(can)) for d, (device, can) in enumerate(zip(devices, can_run, strict=True))]
        ran = [(tick, d, action) for d, action in taken if action is not None]
        if not ran:  # every device waits for another one's memory
            return []
        done |= {(a.kind, a.microbatch, placement[d][a.chunk]) for _, d, a in ran}
        found += ran
        tick += 1
    return found


def _possible(action: Action, live: int, stages: Sequence[int], last: int, done: set, most: int) -> bool:
    return (action.kind != "F" or live < most) and possible(action, stages, last, done)
