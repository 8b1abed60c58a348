"""Spikes: a loss or a gradient norm far above those of the updates before it. Plain Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

WATCHED = ("loss", "grad_norm")
TO_DEVIATIONS = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

SMALLEST_SPREAD = 0.01
"""Of the median: a curve that is flatter than this is taken to be as rough as this."""


def robust_z(value: float, before: Sequence[float]) -> float:
    """Returns how many robust standard deviations `value` lies above the median of `before`.

    The deviation is 1.4826 times the median absolute deviation, so that spikes among `before` hardly move it
    (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993).
    """
    middle = median(before)
    spread = TO_DEVIATIONS * median(abs(other - middle) for other in before)
    spread = max(spread, SMALLEST_SPREAD * abs(middle))
    return (
        (value - middle) / spread if spread else math.copysign(math.inf, value - middle) * (value != middle)
    )


class SpikeDetector:
    """Judges the loss and the gradient norm of each update by those of the latest `window` updates.

    Spikes join the values that later updates are judged by: the median hardly moves, and a curve that stays on a new
    level is normal after half a window. The state is a few lists of numbers, saved with each checkpoint, so that a
    resumed run judges as an uninterrupted one.
    """

    def __init__(self, window: int, threshold: float):
        self._window, self._threshold = window, threshold
        self._values = {name: deque(maxlen=window) for name in WATCHED}

    def judge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the robust z-score of each number that is a spike, by name; empty if none is.

        Args:
          metrics: with "loss" and "grad_norm", finite, of an update that was applied.
        """
        scores = {
            name: robust_z(metrics[name], seen) for name, seen in self._values.items() if self._judges(seen)
        }
        for name, seen in self._values.items():
            seen.append(float(metrics[name]))
        return {name: score for name, score in scores.items() if score > self._threshold}

    def _judges(self, seen: Sequence[float]) -> bool:
        return 2 * len(seen) >= self._window

    def to_dict(self) -> dict[str, list[float]]:
        """Returns the values that the next update is judged by."""
        return {name: list(seen) for name, seen in self._values.items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Goes on from what `to_dict` returned; values that are missing count as none seen."""
        self._values = {name: deque(values.get(name, ()), maxlen=self._window) for name in WATCHED}
