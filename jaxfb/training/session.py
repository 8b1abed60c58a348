"""A run in progress: which updates are done, what is saved, and how long everything took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import config_to_dict
from jaxfb.process.fault_points import reach
from jaxfb.process.position import here
from jaxfb.training.goodput import Goodput
from jaxfb.training.guard import NonFiniteAbort, listed, trained, unsound_leaves
from jaxfb.training.job.versions import version_changes, versions
from jaxfb.training.persistence.changes import changes_between, listing, skipped_too_late
from jaxfb.training.persistence.local_tier import LocalTier, local_tier
from jaxfb.training.persistence.resume import CheckpointSources
from jaxfb.training.persistence.run_lock import OpenDirectory
from jaxfb.training.persistence.working_directory import WorkingDirectory
from jaxfb.training.phases import Phases
from jaxfb.training.run_dir import RunDirectory

if TYPE_CHECKING:
    from jaxfb.training.work import Work


@dataclass(frozen=True)
class Result:
    """The end of a run: how it ended, and its numbers.

    status:  "finished", "interrupted" by a signal or a limit of time, or "stopped" by a callback.
    updates: of the run, consumed so far. metrics: of the last evaluation. summary: as in summary.json, if finished.
    """

    status: str
    directory: Path
    updates: int
    metrics: Mapping[str, float]
    summary: dict[str, Any] | None = None


class Run(AbstractContextManager["Run"]):
    """The state of a run in progress, which callbacks receive at the start.

    work:      what is trained. config, directory: its settings, and where it lives.
    done:      global batches consumed, applied or skipped; also the name of a checkpoint.
    metrics:   of the last evaluation.
    before:    `done` of the checkpoint that the run goes on from; None without one.
    say:       prints a line above the progress.
    phases:    where the time goes.
    kept:      JSON values that the guards save with each checkpoint.
    versions:  of all that decides the bits beside the config, read at the start: a save must not need more open files.
    unwritten: records that metrics.jsonl did not take; saved with each checkpoint, and written when the run continues.
    goodput:   the share of the time that went into applied updates, and what took the rest.
    ending:    receives what is to be called when the run ends in any way, after all is saved.
    """

    def __init__(self, work: Work, directory: RunDirectory, say: Callable[[str], None] = print):
        self.work, self.directory, self.config = work, directory, work.config
        self.say = say
        settings = self.config.checkpoint
        # At least two: the newest is known to be good only when an update after it has been applied.
        keep = max(settings.keep, 2)
        self._store = CheckpointStore(
            directory.checkpoints, keep, settings.keep_best, settings.asynchronous, settings.best_is
        )
        self.done = 0
        self.before: int | None = None
        self.metrics: dict[str, float] = {}
        self.stopped: str | None = None
        self.phases = Phases()
        self.goodput = Goodput(here.began, here.now)
        self.ending = ExitStack()
        self.kept: dict[str, Any] = {}
        self.versions = versions()
        self.unwritten: list[dict[str, Any]] = []
        self._local: LocalTier | None = None
        self._opened: OpenDirectory | None = None
        self._working = WorkingDirectory()
        self._found: Mapping[str, Any] | None = None  # the record of the checkpoint that the run goes on from
        self._saved: int | None = None
        self._noted = False  # in the run directory, that there are checkpoints
        self._evaluated_at: int | None = None

    @property
    def say(self) -> Callable[[str], None]:
        return self.work.say

    @say.setter
    def say(self, say: Callable[[str], None]) -> None:
        self.work.say = say

    @property
    def mesh(self) -> Any:
        return self.work.mesh

    @property
    def resumed(self) -> bool:
        """Returns whether the state was a checkpoint's at first."""
        return self.before is not None

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Returns arrays of the last evaluation by name, where it returned some; they go into no record."""
        return getattr(self.work, "outputs", {})

    @property
    def state(self) -> Any:
        """Returns the train state after `done` updates, on the devices; the next update donates it."""
        return self.work.train_state

    @property
    def total(self) -> int:
        """Returns the number of updates of the whole run."""
        return self.work.total

    @property
    def finished(self) -> bool:
        return self.done >= self.total

    def stop(self, reason: str) -> None:
        """Ends the run after the update in progress, saved; for callbacks.

        On several processes every one must call it after the same update. Where one alone does, it saves while the
        others compute: all wait for each other until hosts.stuck_after ends the job.
        """
        self.stopped = reason

    def tick(self) -> None:
        """Tells the watchdog that something moves; for callbacks that take longer than hosts.stuck_after."""
        here.tick()

    def sync(self) -> None:
        """Waits for the devices; for a profile, and nothing in the loop."""
        jax.block_until_ready(self.state)

    def resume(self, allow_changes: bool) -> None:
        """Restores state and position of the newest checkpoint that can be read, if there is one.

        The mesh and the cut into microbatches may differ from the saved run's, the rows of an update may not. Every
        key of the config that differs is printed.

        Args:
          allow_changes: accept a config that gives the saved parameters or rows another meaning.
        Raises:
          ValueError: the checkpoint is of another model, optimizer or seed, or would continue with other rows; or the
            checkpoints of a saved run are gone.
        """
        sources = CheckpointSources(self.work, self.directory, self._store, allow_changes)
        found = sources.newest()
        self._local = sources.local
        if found is None:
            return
        state, record, is_local = found
        if changes := listing(changes_between(record["config"], self.config)):
            self.say(f"changed since update {record['update']}:{changes}")
        if changes := listing(version_changes(record.get("versions", {}))):
            self.say(f"saved with other versions, so that numbers may differ from here on:{changes}")
        if late := skipped_too_late(record["config"], self.config, record["update"]):
            self.say(late)
        self.work.restore(state, record, allow_changes)
        reach("restore.done")
        self._take_up(record)
        if is_local:  # it is not in the run directory
            self._saved = self._store.latest()
        if "goodput" in record:
            self.goodput.restore(record["goodput"])
        self.done = self.before = record["update"]
        self._found = record
        self.unwritten = record.get("unwritten", [])

    def note_directory(self) -> None:
        """Notes which directory is the run's: what lies at its path later may be another run."""
        self._opened = OpenDirectory(self.directory.path)

    def keep_working_directory(self) -> None:
        """Changes back to the working directory of the start, in case a function of the caller has changed it."""
        self._working.keep(self.say)

    def check_directory(self) -> None:
        """Checks that what lies at the run's path is still its own directory.

        Raises:
          CannotWrite: it was moved away or removed, even if another run lies there now.
        """
        self.keep_working_directory()
        if self._is_displaced():
            raise self._displaced()

    def _is_displaced(self) -> bool:
        return self._opened is not None and self._opened.is_replaced()

    def _displaced(self) -> CannotWrite:
        return CannotWrite(
            f"[run] dir={self.directory.path} was removed or replaced while the run was in progress; nothing more "
            "is written to it; put it back, or start again in another run.dir"
        )

    def open_local(self) -> None:
        """Begins with local checkpoints, where the config asks for them; a new run forgets older ones."""
        if self._local is None or not self.resumed:
            settings = self.config.checkpoint.local
            self._local = local_tier(settings, self.directory, new=not self.resumed, say=self.say)

    def is_due_locally(self) -> bool:
        """Returns whether this update is to be saved on the hosts' own disks."""
        return self._local is not None and self.done % self.config.checkpoint.local.every == 0

    def save_locally(self) -> None:
        """Hands the state to the writers of the hosts' own disks.

        Raises:
          NonFiniteAbort: the state holds a nan or an inf; nothing is saved of it.
        """
        with self.phases("saving"):
            state = self._sound_state()
            if self._local is not None:
                self._local.save(self.done, self._saved, state, self.record(self.done))

    def roll_back(self, past: int) -> int:
        """Restores the newest checkpoint and continues with the rows behind update `past`; returns its update."""
        self.wait_saved()
        abstract = self.work.abstract_state()
        jax.tree.map(lambda leaf: leaf.delete(), self.state)  # there may be memory for one state alone
        state, record = self._store.restore(abstract)
        self.work.restore(state, record, False)
        self._take_up(record)
        self.done = past
        return record["update"]

    def _take_up(self, record: Mapping[str, Any]) -> None:
        """Continues with the evaluation and the guards' values of a checkpoint."""
        self._saved = record["update"]
        self.metrics, self._evaluated_at = record["metrics"], self._saved if record["metrics"] else None
        self.kept = record.get("guard", {})

    def is_due(self, section: str) -> bool:
        """Returns whether `eval` or `checkpoint` happens after this update: every so many, and at the end."""
        every = getattr(self.config, section).every
        return self.finished or (every is not None and self.done % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present parameters and keeps the numbers."""
        reach("eval")
        with self.phases("evaluation"):
            found = self.work.evaluate()
        reach("eval.done")
        if found:
            self._look_for_best(found)
            self.metrics, self._evaluated_at = found, self.done
        return found

    def _look_for_best(self, found: Mapping[str, float]) -> None:
        """Prints, at the first evaluation of a process, where it lacks the number that the config asks for."""
        settings = self.config.checkpoint
        metric = settings.keep_best
        is_asked = metric not in (None, type(settings)().keep_best)
        if self._evaluated_at is None and is_asked and metric not in found:
            self.say(
                f"[checkpoint] keep_best={metric} is no number of this evaluation, so none is kept as the best; "
                f"use one of {', '.join(sorted(found))}"
            )

    @property
    def is_saved(self) -> bool:
        """Returns whether this very state was handed to the checkpoint writer."""
        return self._saved == self.done

    def save(self) -> bool:
        """Hands the state to the checkpoint writer; False if this very state is saved already.

        Raises:
          NonFiniteAbort: the state holds a nan or an inf; nothing is saved of it.
          CannotWrite: this save failed, or the one before, or the run directory is gone.
        """
        if self.is_saved:
            return False
        self.check_directory()
        if not self.directory.is_run():
            raise self._displaced()
        with self.phases("saving"):
            self._store.save(self.done, self._sound_state(), self._record_to_save())
        self._saved = self.done
        return True

    def _record_to_save(self) -> Mapping[str, Any]:
        """Returns what a checkpoint of this state has beside its arrays.

        A state of a longer run, which ends at once with fewer updates, keeps its record: no position is planned for it.
        """
        if self._found is not None and self.done > self.total:
            return self._found
        return self.record(self.done)

    def _sound_state(self) -> Any:
        state = self.work.state()
        if bad := unsound_leaves(trained(state)):
            raise NonFiniteAbort(f"[train] the state after update {self.done} is not finite in {listed(bad)}")
        return state

    def wait_saved(self) -> None:
        """Returns when the last save is on the disk; CannotWrite if it failed."""
        with self.phases("saving"):
            self._store.wait()
            self.note_saved()

    def note_saved(self) -> None:
        """Notes in the run directory that it has checkpoints, as soon as the first one is complete."""
        is_to_note = self._saved is not None and not self._noted and jax.process_index() == 0
        if is_to_note and not self._is_displaced():
            self._noted = self.directory.note_saved()

    @property
    def newest_saved(self) -> int | None:
        """Returns the update of the newest checkpoint that is complete."""
        return self._store.latest()

    def __exit__(self, *error) -> None:
        with self.ending:
            self.work.close()
            here.enter("saving")
            if self._local is not None:
                self._local.wait()
            if self._opened is not None:
                self._opened.close()
            self._store.__exit__(*error)

    def remove_local(self) -> None:
        """Removes the local checkpoints of a run whose last one is in the run directory."""
        if self._local is not None:
            self._local.remove()

    def record(self, done: int) -> dict[str, Any]:
        """Returns the values that a checkpoint after `done` updates has beside its arrays, as JSON.

        These are position, evaluation, config, plan and versions.
        """
        return {
            "update": done,
            "metrics": self.metrics if self._evaluated_at == self.done else {},
            "config": config_to_dict(self.config),
            "plan": self.work.to_dict(),
            "versions": self.versions,
            "guard": self.kept,
            "goodput": self.goodput.save(),
            "unwritten": list(self.unwritten),
            **self.work.host(done),
        }
