"""Judges the numbers of each update, and under the policy "skip" sets the limits with which the next one is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxfb.config.guard import GuardConfig
from jaxfb.guard.spikes import SpikeDetector
from jaxfb.update.train_state import Limits, StepMetrics

SCORE = "spike/"  # how the records name a number that is a spike
Say = Callable[[str], None]


class SpikeGuard:
    """Looks for spikes by the settings of a run.

    Limits of an update come from the updates up to the last but one, since the numbers of the last one may not have
    arrived when the next one is dispatched. So they depend on the run alone, and a resumed run has the same ones.
    """

    def __init__(self, config: GuardConfig, kept: Mapping[str, Any]):
        self._policy = config.spikes
        self._detector, self._last = SpikeDetector(config.spike_window, config.spike_threshold), 0
        self.restore(kept)

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continues from what `to_dict` returned; an empty dict: from nothing."""
        self._detector.restore(kept)
        self._last = kept.get("last", 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the next updates are judged by, as JSON values."""
        return {**self._detector.to_dict(), "last": self._last}

    def limits(self, update: int) -> Limits | None:
        """Returns the limits of update `update` (from 1); None unless spikes are skipped."""
        if self._policy != "skip":
            return None
        return Limits(**self._detector.limits(without_last=self._last == update - 1))

    def judge(self, update: int, metrics: StepMetrics, say: Say) -> dict[str, float]:
        """Reports a spike; returns what the record of the update adds. Metrics are on the host."""
        is_skipped = metrics.spike is not None and bool(metrics.spike)
        if self._policy == "off" or (metrics.skipped and not is_skipped):
            return {}
        numbers = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm)}
        scores = self._detector.judge(numbers)
        self._last = update
        if is_skipped:
            what = " and ".join(f"{name} {number:.4g}" for name, number in numbers.items())
            say(f"update {update} skipped as a spike: {what}")
        elif self._policy != "skip":
            for name, score in scores.items():
                say(
                    f"update {update}: {name} {numbers[name]:.4g} is {score:.0f} robust standard deviations above the "
                    "median of the updates before"
                )
        return {f"{SCORE}{name}": score for name, score in scores.items()}
