"""Puts all guards of a run behind one interface, which the training loop calls around each update.

update -> [repeated, copies compared] -> its numbers -> [finite?] -> [spike?]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfb.guard.devices import differing_replicas
from jaxfb.refusal import Refused
from jaxfb.training.guard import DeviceFault, GuardAbort, SkipGuard, SpikeAbort, by_path, listed
from jaxfb.training.guarding.dump import write_dump
from jaxfb.training.guarding.rerun import update_twice
from jaxfb.training.guarding.spike_guard import SCORE, SpikeGuard
from jaxfb.training.session import Run
from jaxfb.update.train_state import StepMetrics


class Spike(Exception):
    """An update whose effect is to be undone: the loop returns to a checkpoint and continues behind its rows."""

    def __init__(self, update: int):
        super().__init__(f"spike at update {update}")
        self.update = update


class Guards:
    """The guards that the config of a run asks for.

    run: what they watch.
    """

    def __init__(self, run: Run):
        self._run, self._config = run, run.config.guard
        self._skips = SkipGuard.of(run.config, run.work.abstract_params, lambda text: run.say(text))
        self._spikes = SpikeGuard(self._config, run.kept.get("spikes", {}))
        self._rollbacks: dict[int, int] = {}
        self._compared: int | None = None
        # of the latest two updates, since the numbers of one arrive during the next
        self._batches: dict[int, Any] = {}
        self._latest: tuple[int, StepMetrics | None] = (0, None)
        self._past = 0  # rows up to this update are consumed, whatever checkpoint was returned to

    @property
    def failed(self) -> int:
        """Returns how many updates in a row, up to the latest, were not finite; nothing is saved unless it is 0."""
        return self._skips.failed

    def update(self, number: int, batch: Any) -> tuple[StepMetrics, Mapping[str, Any]]:
        """Computes update `number` (from 0), twice where that is due, and compares the copies where that is due.

        Raises:
          DeviceFault: a device computes wrongly, or copies differ.
        """
        self._batches = {update: self._batches[update] for update in self._batches if update == number}
        self._batches[number + 1] = batch
        self._latest = (number + 1, None)
        self._run.work.limits = self._spikes.limits(number + 1)
        if _is_due(self._config.verify_every, number + 1):
            result = self._repeated(number, batch)
        else:
            result = self._run.work.update(number, batch)
        if _is_due(self._config.compare_replicas_every, number + 1):
            self._latest = (number + 1, jax.device_get(result[0]))  # a dump of this update has its numbers
            self._compare(number + 1)
        return result

    def check_start(self) -> None:
        """Refuses a state to begin with whose copies are not the same on every process; all of them must call it.

        Raises:
          ValueError: names the arrays and the devices.
        """
        if where := self._differing(self._run.work.state()):
            raise Refused(
                f"[hosts] the processes do not begin with the same state: copies differ in {where}; give all the same "
                "weights, by model.from, start.run, lora.adapter or the params of jaxfb.Trainer"
            )

    def check_copies(self) -> None:
        """Compares the copies of what is about to be saved, in a job of several processes; all of them must call it.

        Raises:
          DeviceFault: they differ, so that the parts which the processes write would be of no one state.
        """
        update = self._run.done
        if where := self._differing(self._run.work.state()):
            raise DeviceFault(
                f"[guard] update {update} is not saved: copies that must be equal differ in {where}; replace the "
                "device and continue from a checkpoint before that"
            )
        self._compared = update

    def check(self, update: int, metrics: StepMetrics) -> dict[str, float]:
        """Judges the numbers of an update, on the host; returns what its record adds.

        Raises:
          NonFiniteAbort: too many updates in a row were not finite.
        """
        self._latest = (update, metrics)
        self._skips.check(update, metrics)
        found = self._spikes.judge(update, metrics, self._run.say)
        self._run.kept = {"spikes": self._spikes.to_dict()}
        return found

    def undo_spike(self, update: int, record: Mapping[str, Any]) -> None:
        """Raises Spike where the update was one, the policy is to roll back and there is a checkpoint to return to."""
        if self._config.spikes == "rollback" and any(name.startswith(SCORE) for name in record):
            if self._run.newest_saved is None:
                self._run.say(f"update {update}: a spike, but there is no checkpoint to roll back to")
                return
            raise Spike(update)

    def roll_back(self, spike: Spike) -> None:
        """Returns to the newest checkpoint and continues behind the rows of the spike.

        Raises:
          SpikeAbort: too many returns to that checkpoint.
        """
        self._run.wait_saved()
        self._check_rollbacks(spike, self._run.newest_saved or 0)
        saved = self._run.roll_back(spike.update)
        self._check_rollbacks(spike, saved)  # an older one, where the newest is damaged
        self._rollbacks[saved] = self._rollbacks.get(saved, 0) + 1
        self._past = spike.update
        self._spikes.restore(self._run.kept.get("spikes", {}))
        self._run.say(
            f"update {spike.update}: rolled back to the state of update {saved}; the rows of updates {saved + 1} to "
            f"{spike.update} change nothing, and the run continues behind them"
        )

    def _check_rollbacks(self, spike: Spike, saved: int) -> None:
        """Raises SpikeAbort where the run has returned to a checkpoint as often as it may."""
        count = self._rollbacks.get(saved, 0) + 1
        if count > self._config.max_rollbacks:
            raise SpikeAbort(
                f"[guard] update {spike.update} is spike number {count} after checkpoint {saved}, above "
                f"guard.max_rollbacks={self._config.max_rollbacks}"
            )

    def dump(self, error: GuardAbort, later: tuple[int, Any] | None) -> Path | None:
        """Writes what is needed to compute the update that ended the run again; returns the directory.

        Args:
          later: the numbers of an update that was dispatched after it, (update, (metrics, more)), or None.
        """
        update, metrics = self._latest
        skipped = metrics is not None and _failed(metrics)
        if later is not None and _failed(later[1][0]):
            update, metrics = later[0], later[1][0]
        is_known = skipped and (later is None or _failed(later[1][0]))
        saved = self._run.newest_saved
        if not update or (saved is None and not is_known):
            return None
        past = max(saved or 0, self._past)
        batch = self._batches.get(update)
        return write_dump(self._run, update, str(error), metrics, batch, past, is_known)

    def _repeated(self, number: int, batch: Any) -> Any:
        result, verdict = update_twice(self._run.work, number, batch)
        if verdict.cause == "device":
            raise DeviceFault(f"[guard] update {number + 1}: {verdict}")
        if verdict.cause != "none":
            self._run.say(f"update {number + 1}: {verdict}")
        metrics, more = result
        return metrics, {**more, "guard/repeated": 1, "guard/differed": int(bool(verdict.leaves))}

    def _compare(self, update: int) -> None:
        if not (where := self._differing(self._run.state)):
            self._compared = update
            return
        before = f"since update {self._compared}" if self._compared else "since the start of this process"
        raise DeviceFault(
            f"[guard] update {update}: copies that must be equal differ {before}, in {where}; replace the device and "
            "continue from a checkpoint before that"
        )

    def _differing(self, state: Any) -> str:
        """Returns which arrays have copies that are not the same bits, and on which devices; empty if none have."""
        leaves = by_path(state)
        cut = {name: leaf for name, leaf in leaves.items() if _is_cut(leaf)}
        bad = differing_replicas(cut)
        devices = sorted({device for ids in bad.values() for device in ids})
        return f"{listed(list(bad))}, on {_places(self._run.mesh, devices)}" if bad else ""


def _is_cut(leaf: Any) -> bool:
    """Returns whether it is an array on a mesh, of which devices keep parts or copies."""
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _failed(metrics: StepMetrics) -> bool:
    """Returns whether the update was skipped because something was not finite, which `before` can undo."""
    return bool(metrics.nonfinite.any)


def _is_due(every: int | None, update: int) -> bool:
    return every is not None and update % every == 0


def _places(mesh: Mesh, devices: list[int]) -> str:
    """Returns `device 5 (data 1, fsdp 0)`, for each of them."""
    named = []
    for place, device in np.ndenumerate(mesh.devices):
        if device.id in devices:
            sizes = zip(mesh.axis_names, mesh.devices.shape, place, strict=True)
            where = ", ".join(f"{name} {index}" for name, size, index in sizes if size > 1)
            named.append(f"device {device.id} ({where})")
    return ", ".join(named)
