"""The section `guard`: what watches the numbers of a run beside the check for nan and inf. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxfb.config.checks import positive
from jaxfb.refusal import Refused

SMALLEST_WINDOW = 8


@dataclass(frozen=True)
class GuardConfig:
    """Settings of the guards over a run's numbers, besides `run.max_nonfinite`.

    spikes:  what happens when the loss or the gradient norm of an update lies far above those before it: "warn" prints
      it, "skip" does not apply that update, "rollback" restores the newest checkpoint and continues after the rows of
      that update, "off" does not look.
    spike_threshold: a spike is so many robust standard deviations (1.4826 times the median absolute deviation) above
      the median of the latest updates.
    spike_window:    over how many updates the median is taken; the first half window of a run is not judged.
    max_rollbacks:   end the run (exit code 78) after so many returns to one checkpoint.
    verify_every:    run every so many updates twice from the same state and compare all bits; on a difference a third
      run decides whether the fault was transient. Needs memory for a copy of the state. null: never.
    compare_replicas_every: compare parameters that must be equal on several devices, every so many updates. null:
      never.
    """

    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    spike_threshold: float = 10.0
    spike_window: int = 64
    max_rollbacks: int = 3
    verify_every: int | None = None
    compare_replicas_every: int | None = None

    def __post_init__(self):
        positive("guard", spike_threshold=self.spike_threshold, max_rollbacks=self.max_rollbacks)
        positive("guard", verify_every=self.verify_every, compare_replicas_every=self.compare_replicas_every)
        if self.spike_window < SMALLEST_WINDOW:
            raise Refused(
                f"[guard] spike_window={self.spike_window} is too short for a median; use {SMALLEST_WINDOW} or more",
                [{"spike_window": SMALLEST_WINDOW}],
            )


def check_rollback(guard: GuardConfig, saves_every: int | None) -> None:
    """Refuses to roll back in a run that saves only at its end."""
    if guard.spikes == "rollback" and saves_every is None:
        raise Refused(
            "[guard] spikes=rollback needs checkpoints to return to, but checkpoint.every=null; use "
            "checkpoint.every=100, or guard.spikes=warn",
            [{"checkpoint.every": 100}, {"guard.spikes": "warn"}],
        )
