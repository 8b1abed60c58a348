"""Seconds of a run by phase: waiting for rows, computing, saving and the like."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from jaxfb.process.position import here

PHASES = ("data_wait", "update", "waiting", "callbacks", "evaluation", "saving", "logging")


class Phases:
    """Seconds by phase: data_wait and update of each step; evaluation, saving and logging since the step before."""

    def __init__(self):
        self._seconds: dict[int | None, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str, step: int | None = None) -> Iterator[None]:
        """Adds the time inside to a phase, of one step if it is given; `here` is in that phase meanwhile."""
        began = time.monotonic()
        here.enter(name, step)
        try:
            yield
        finally:
            self._seconds[step][name] += time.monotonic() - began
            here.enter("between two phases")

    def take(self, step: int) -> dict[str, float]:
        """Returns the seconds by phase of a step, and of what was done beside the steps since the last call."""
        return dict.fromkeys(PHASES, 0.0) | self._seconds.pop(None, {}) | self._seconds.pop(step, {})
