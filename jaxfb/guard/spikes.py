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


def middle_and_spread(before: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the robust standard deviation: 1.4826 times the median absolute deviation.

    Spikes among the values hardly move either (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993).
    """
    middle = median(before)
    spread = TO_DEVIATIONS * median(abs(other - middle) for other in before)
    return middle, max(spread, SMALLEST_SPREAD * abs(middle))


def robust_z(value: float, before: Sequence[float]) -> float:
    """Returns how many robust standard deviations `value` lies above the median of `before`."""
    middle, spread = middle_and_spread(before)
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
        self._values = self._kept({})

    def judge(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the robust z-score of each number that is a spike, by name; empty if none is.

        Args:
          metrics: with "loss" and "grad_norm", finite, of an update whose rows counted.
        """
        scores = {
            name: robust_z(metrics[name], seen) for name, seen in self._seen().items() if self._judges(seen)
        }
        for name, values in self._values.items():
            values.append(float(metrics[name]))
        return {name: score for name, score in scores.items() if score > self._threshold}

    def limits(self, without_last: bool = False) -> dict[str, float]:
        """Returns, by name, the largest number of the next update that is not a spike; infinite while none is judged.

        Args:
          without_last: judge by the values before the one that came last.
        """
        return {
            name: self._limit(seen) if self._judges(seen) else math.inf
            for name, seen in self._seen(without_last).items()
        }

    def _limit(self, seen: Sequence[float]) -> float:
        middle, spread = middle_and_spread(seen)
        return middle + self._threshold * spread

    def _seen(self, without_last: bool = False) -> dict[str, list[float]]:
        end = -1 if without_last else None
        return {name: list(values)[:end][-self._window :] for name, values in self._values.items()}

    def _kept(self, values: Mapping[str, Any]) -> dict[str, deque[float]]:
        # one more than is judged by, for `without_last`
        return {name: deque(values.get(name, ()), maxlen=self._window + 1) for name in WATCHED}

    def _judges(self, seen: Sequence[float]) -> bool:
        return 2 * len(seen) >= self._window

    def to_dict(self) -> dict[str, list[float]]:
        """Returns the values that the next update is judged by."""
        return {name: list(seen) for name, seen in self._values.items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continues from what `to_dict` returned; values that are missing count as none seen."""
        self._values = self._kept(values)
