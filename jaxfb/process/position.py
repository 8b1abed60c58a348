"""The phase and the update that this process is in, so that a watchdog can tell when nothing moves any more.

A process is in one place at a time, so there is one `here`. Code that takes long calls `here.tick()` as it goes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

START = "start-up"
WINDOW = 10  # updates


class Position:
    """Keeps the place of one process.

    phase:  in words. update: from 1; 0 is before the first.
    place:  how many phases were entered. Every process of a job enters the same ones, so the lowest is behind.
    ticks:  counts every sign of progress, phases and those inside of them.
    waits:  for other processes, and so is not what they wait for.
    began:  when, in seconds since 1970.
    own, whole: seconds of an update that this process spends on its own (rows, callbacks, logging), and all of them;
      means over the latest WINDOW updates, 0 before.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Begins again at the start-up; the counts begin at 0."""
        self.phase, self.update, self.place, self.ticks, self.waits = START, 0, 0, 0, False
        self.began, self._counted_from = time.time(), time.monotonic()
        self.own, self.whole = 0.0, 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def enter(self, phase: str, update: int | None = None) -> None:
        """Notes a phase, on every process of a job alike; update: None leaves it as it was."""
        self.phase, self.place, self.ticks = phase, self.place + 1, self.ticks + 1
        if update is not None:
            self.update = update

    def now(self) -> float:
        """Returns seconds since 1970 by the clock at `began`: one that is set during the run changes no duration."""
        return self.began + time.monotonic() - self._counted_from

    def tick(self) -> None:
        """Notes that something was done in the present phase, on this process at least."""
        self.ticks += 1

    def pace(self, own: float, whole: float) -> None:
        """Notes the seconds of one update."""
        self._latest.append((own, whole))
        if len(self._latest) == WINDOW:
            self.own, self.whole = (sum(values) / WINDOW for values in zip(*self._latest, strict=True))

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
