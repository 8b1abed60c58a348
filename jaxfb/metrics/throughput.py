"""Measures tokens per second over the last steps, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Throughput:
    """Rates over a sliding window of steps, so that the first step's compilation is soon forgotten.

    window: number of steps; at least 1.
    clock:  seconds, monotonic.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window + 1)

    def start(self, step: int) -> None:
        """Begins to count after `step`; again after a pause such as an evaluation, which is not counted."""
        self._marks.clear()
        self._marks.append((self._clock(), step, 0))

    def update(self, step: int, tokens: int) -> None:
        """Records that `step` is done and consumed so many tokens."""
        if not self._marks:
            self.start(step - 1)
        self._marks.append((self._clock(), step, self._marks[-1][2] + tokens))

    @property
    def tokens_per_second(self) -> float | None:
        """Returns tokens per second, or None before two marks."""
        seconds, _, tokens = self._span()
        return tokens / seconds if seconds else None

    @property
    def seconds_per_step(self) -> float | None:
        seconds, steps, _ = self._span()
        return seconds / steps if steps else None

    def seconds_left(self, total: int) -> float | None:
        """Returns the seconds until step number `total` is done."""
        if self.seconds_per_step is None:
            return None
        return (total - self._marks[-1][1]) * self.seconds_per_step

    def _span(self) -> tuple[float, int, int]:
        if not self._marks:
            return 0.0, 0, 0
        first, last = self._marks[0], self._marks[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]
