"""The phase and the update that this process is in, so that a watchdog can tell when nothing moves any more.

A process is in one place at a time, so there is one `here`. Code that takes long calls `here.tick()` as it goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

START = "start-up"


class Position:
    """Keeps the place of one process.

    phase:  in words. update: from 1; 0 is before the first.
    place:  how many phases were entered. Every process of a job enters the same ones, so the lowest is behind.
    ticks:  counts every sign of progress, phases and those inside of them.
    waits:  for other processes, and so is not what they wait for.
    began:  when, in seconds since 1970.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Begins again at the start-up; the counts begin at 0."""
        self.phase, self.update, self.place, self.ticks, self.waits = START, 0, 0, 0, False
        self.began = time.time()

    def enter(self, phase: str, update: int | None = None) -> None:
        """Notes a phase, on every process of a job alike; update: None leaves it as it was."""
        self.phase, self.place, self.ticks = phase, self.place + 1, self.ticks + 1
        if update is not None:
            self.update = update

    def tick(self) -> None:
        """Notes that something was done in the present phase, on this process at least."""
        self.ticks += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the time in which this process does nothing but wait for others."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
            self.tick()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Marks the time in which this process does what the others do not; it does not count for `place`."""
        place = self.place
        try:
            yield
        finally:
            self.place = place


here = Position()
