"""The loop of every kind of post-training: update, take the numbers of the update before, evaluate, save.

What an update is, a `Work` says; this file only runs it, resumes it, and ends it. The run's directory is that of
pre-training (`jaxfb.training.run_dir`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jaxfb.callbacks import Callback, combine
from jaxfb.checkpoint import CannotWrite, CheckpointStore
from jaxfb.config import config_to_dict
from jaxfb.display import Progress, print_table
from jaxfb.metrics import Pending, Throughput, make_writers, scalars
from jaxfb.rl.rows import Rows
from jaxfb.rl.start import Base
from jaxfb.rl.tasks import BadJudgement
from jaxfb.train_step import StepMetrics, TrainState
from jaxfb.training.agreement import package_versions
from jaxfb.training.changes import changes_between, check_changes, listing
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.ending import after_failures, what_is_saved
from jaxfb.training.guard import NonFiniteAbort, SkipGuard, listed, unsound_leaves
from jaxfb.training.interrupt import Interrupt
from jaxfb.training.report import command
from jaxfb.training.run_dir import RunDirectory, write_json
from jaxfb.training.run_lock import RunLock, claim, move_aside
from jaxfb.training.setup import abstract_params

PyTree = Any
TRAINED = ("params", "opt_state", "critic")  # what of a saved state must be finite


class Work(Protocol):
    """One kind of post-training.

    base: what it is made of. total: updates of the run. say: prints a line; the loop sets it.
    train_state: of the model that is trained.
    """

    base: Base
    total: int
    say: Callable[[str], None]
    train_state: TrainState

    def tables(self) -> Iterable[tuple[str, Iterable[tuple[str, Any]]]]:
        """Titles and tables of what was decided."""

    def to_dict(self) -> dict[str, Any]:
        """The plans, for plan.json and for `check_resume`."""

    def start(self, say: Callable[[str], None]) -> None:
        """A fresh state."""

    def read(self, number: int) -> Rows:
        """The rows of update `number`, from 0."""

    def update(self, number: int, rows: Rows | None = None) -> tuple[StepMetrics, dict[str, float]]:
        """Dispatches an update on its rows (None: reads them): numbers on the device, and others by name."""

    def evaluate(self) -> dict[str, float]:
        """Of the present parameters; empty if there is nothing to evaluate on."""

    def state(self) -> tuple[PyTree, dict[str, Any]]:
        """Arrays and JSON values that a checkpoint holds; the model's are under "params"."""

    def abstract_state(self) -> PyTree:
        """The arrays as shapes, dtypes and shardings."""

    def check_resume(self, record: dict[str, Any]) -> None:
        """ValueError if this run may not go on from a checkpoint of that record: update, plan, config, work."""

    def restore(self, state: PyTree, host: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""

    def summary(self) -> dict[str, Any]:
        """Of the end, beside the last evaluation."""

    def picture(self, directory: RunDirectory) -> None:
        """Draws what came of it."""


@dataclass(frozen=True)
class Result:
    """How a run ended: "finished" or "interrupted", after how many updates, with which last evaluation."""

    status: str
    directory: Path
    updates: int
    metrics: dict[str, float]


def run(
    make_work: Callable[[], Work],
    config: Any,
    *,
    resume: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Runs to the end, or to a signal; resumed, it ends in the same bits as one that never stopped.

    The arguments are those of `jaxfb.post_train`.

    Raises:
      ValueError: an impossible size, a saved run in the way, a checkpoint that does not fit.
      NonFiniteAbort: too many updates in a row were not finite, or the state is not; of it nothing is saved.
      CannotWrite: the disk is full or not writable; the message says which update is saved.
    """
    hooks, directory = combine(callbacks), RunDirectory.of(config)
    if not fresh and (found := directory.finished(config)):
        print(f"{directory.path} is finished: {found['updates']} updates. Start over with --fresh")
        return Result("finished", directory.path, found["updates"], found["metrics"])
    with RunLock(directory.path) as lock:
        claim(directory, lock, config, resume, fresh)
        use_compile_cache()
        work = make_work()
        if fresh:
            move_aside(directory, lock)
        with _Loop(work, directory) as loop, Interrupt() as interrupt:
            return loop.run(resume, allow_changes, hooks, interrupt)


class _Loop:
    """A run in progress, which callbacks receive (`jaxfb.callbacks.RunInProgress`); used as a context."""

    def __init__(self, work: Work, directory: RunDirectory):
        self.work, self.directory, self.config = work, directory, work.base.config
        settings = self.config.checkpoint
        # at least two: the newest is known to be good only when an update after it has been applied
        keep = max(settings.keep, 2)
        self._store = CheckpointStore(directory.checkpoints, keep, settings.keep_best, settings.asynchronous)
        self._pending, self._throughput, self._timed = Pending(), Throughput(), False
        self._on_cpu = work.base.mesh.devices.flat[0].platform == "cpu"
        self.done, self._saved, self._postponed = 0, None, False
        self._unwritten: str | None = None
        self.metrics: dict[str, float] = {}
        self.say: Callable[[str], None] = print

    @property
    def mesh(self) -> Mesh:
        return self.work.base.mesh

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        return self.work.total

    @property
    def state(self) -> TrainState:
        """The train state of the model, after `done` updates."""
        return self.work.train_state

    def sync(self) -> None:
        """Waits for the devices."""
        jax.block_until_ready(self.state)

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_) -> None:
        self._store.close()

    def run(self, resume: bool, allow_changes: bool, hooks: Callback, interrupt: Interrupt) -> Result:
        began, resumed = time.monotonic(), resume and self._resume(allow_changes)
        self.directory.create(self.config, self.work.to_dict(), self.work.base.tokenizer, self.done)
        self.work.base.chat.save(self.directory.path)
        print_table("chat", self.work.base.chat.table())
        for title, rows in self.work.tables():
            print_table(title, rows)
        self._writer = make_writers(
            self.config.log.writers,
            self.directory.path,
            config_to_dict(self.config),
            resume=self.done if resumed else None,
        )
        with Progress(self.work.total, self.done) as progress:
            self._progress, self.say, self.work.say = progress, progress.say, progress.say
            if resumed:
                progress.say(f"resuming {self.directory.path} after update {self.done} of {self.work.total}")
            else:
                self.work.start(progress.say)
            hooks.on_train_start(self)
            if not resumed:
                self._evaluate(hooks)
                self._save(hooks)
            self._updates(hooks, self._guard(), interrupt)
        with self._noticing():
            self._writer.close()
        if self._unwritten:
            raise CannotWrite(
                f"{self._unwritten}; {self._what_is_saved()}; make room, then go on with: {self._again()}"
            )
        if self.done < self.work.total:
            print(f"{interrupt.signal}: {self._what_is_saved()}; go on with: {self._again()}")
            return Result("interrupted", self.directory.path, self.done, self.metrics)
        self._end(time.monotonic() - began)
        hooks.on_train_end(self.done, self.metrics)
        return Result("finished", self.directory.path, self.done, self.metrics)

    def _updates(self, hooks: Callback, guard: SkipGuard, interrupt: Interrupt) -> None:
        try:
            while self.done < self.work.total and not self._unwritten and not interrupt.is_due(self.done):
                self._one(hooks, guard)
            self._arrive(self._pending.flush(), hooks, guard)
            if not guard.failed:
                self._save(hooks)
            elif self.done == self.work.total:
                raise NonFiniteAbort(
                    f"[train] the last updates of the run, {guard.failed} of them, were not finite"
                )
        except NonFiniteAbort as error:
            self._store.wait()
            raise NonFiniteAbort(f"{error}; {after_failures(self._store.latest(), self._again())}") from None
        except BadJudgement as error:  # of a rollout of which nothing has been learnt yet
            self._arrive(self._pending.flush(), hooks, guard)
            if not guard.failed:
                self._save(hooks)
            self._store.wait()
            raise BadJudgement(f"{error} ({self._what_is_saved()})") from None
        self._store.wait()

    def _one(self, hooks: Callback, guard: SkipGuard) -> None:
        hooks.on_step_start(self.done + 1)
        if self._on_cpu:  # XLA:CPU can deadlock with several updates queued
            self._arrive(self._pending.flush(), hooks, guard)
        rows = self.work.read(self.done)
        hooks.before_update(self.done + 1, rows)
        metrics = self.work.update(self.done, rows)
        self.done += 1
        self._arrive(self._pending.push(self.done, metrics), hooks, guard)
        if self._due("eval"):
            self._arrive(self._pending.flush(), hooks, guard)
            self._evaluate(hooks)
        if self._due("checkpoint") or self._postponed:
            self._arrive(self._pending.flush(), hooks, guard)
            self._postponed = guard.failed > 0
            if not self._postponed:
                self._save(hooks)

    def _arrive(self, arrived: tuple | None, hooks: Callback, guard: SkipGuard) -> None:
        if arrived is None:
            return
        step, (metrics, more) = arrived
        guard.check(step, metrics)
        record = {**_record_of(metrics), **more}
        self._count(step, record)
        due = step % self.config.log.every == 0 or step in (1, self.work.total)
        self._progress.update(step, record, self._throughput.seconds_left(self.work.total), line=due)
        if due or record["skipped"]:
            self._write(step, record)
        hooks.on_step_end(step, record)

    def _count(self, step: int, record: dict) -> None:
        """The first step of a process compiles: time is counted from its end."""
        if self._timed:
            self._throughput.update(step, int(record.get("tokens", 0)))
        else:
            self._throughput.start(step)
            self._timed = True
        if "tokens_per_second" not in record and self._throughput.tokens_per_second:
            record["tokens_per_second"] = self._throughput.tokens_per_second

    def _due(self, section: str) -> bool:
        every = getattr(self.config, section).every
        return self.done == self.work.total or (every is not None and self.done % every == 0)

    def _evaluate(self, hooks: Callback) -> None:
        found = self.work.evaluate()
        if found:
            self.metrics = found
            self._write(self.done, found)
            numbers = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in found.items())
            self._progress.say(f"{self.done}/{self.work.total}  held-out {numbers}")
        hooks.on_eval(self.done, found)
        self._throughput.start(self.done)

    def _write(self, step: int, record: Mapping[str, Any]) -> None:
        if not self._unwritten:
            with self._noticing():
                self._writer.write(step, record)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Where a record cannot be written the run ends after this update, saved."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self._unwritten = self._unwritten or f"[log] {self.directory.metrics} cannot be written: {reason}"

    def _save(self, hooks: Callback) -> None:
        if self._saved == self.done:
            return
        state, host = self.work.state()
        if bad := unsound_leaves({name: state[name] for name in TRAINED if name in state}):
            raise NonFiniteAbort(f"[train] the state after update {self.done} is not finite in {listed(bad)}")
        record = {"update": self.done, "metrics": self.metrics, "work": host, "plan": self.work.to_dict()}
        self._store.save(
            self.done,
            state,
            {**record, "config": config_to_dict(self.config), "versions": package_versions()},
        )
        self._saved = self.done
        hooks.on_save(self.done, self.directory.checkpoints / str(self.done))

    def _resume(self, allow_changes: bool) -> bool:
        if self.directory.newest_update() is None:
            return False
        newest = self._store.latest()
        if newest is not None:  # refused by key, before arrays that do not fit are refused by shape
            self._check_record(self._store.host(newest), allow_changes)
        state, host = self._store.restore(self.work.abstract_state())
        if host["update"] != newest:
            self._check_record(host, allow_changes)
        if changes := listing(changes_between(host["config"], self.config)):
            print(f"changed since update {host['update']}:{changes}")
        self.work.restore(state, host["work"])
        self.done = self._saved = host["update"]
        self.metrics = host["metrics"]
        return True

    def _check_record(self, host: dict[str, Any], allow_changes: bool) -> None:
        """Refuses to go on from a checkpoint of that record."""
        if not allow_changes:
            check_changes(host["config"], self.config, host["update"])
            self._check_same_text(host["plan"])
        self.work.check_resume(host)

    def _check_same_text(self, saved: Mapping[str, Any]) -> None:
        mine = self.work.to_dict().get("text")
        if "text" in saved and saved["text"] != mine:
            raise ValueError(
                f"[data] the saved run was trained on other rows (fingerprint {saved['text']}, these have {mine}); use "
                "its file and tokenizer, another run.dir, or --allow-changes to go on all the same"
            )

    def _what_is_saved(self) -> str:
        return what_is_saved(self.done, self.work.total, self._store.latest())

    def _again(self) -> str:
        return f"{command()} {_verb(self.config)} {self.directory.path} --resume"

    def _guard(self) -> SkipGuard:
        params = abstract_params(self.config, self.work.base.sizes)
        return SkipGuard.of(self.config, params, self._progress.say)

    def _end(self, seconds: float) -> None:
        self.work.picture(self.directory)
        summary = {"updates": self.done, "metrics": self.metrics, "seconds": round(seconds, 2)}
        write_json(self.directory.summary, {**summary, **self.work.summary()})
        contents = "  ".join(self.directory.contents())
        print(
            f"{self.done} updates in {seconds:.0f} s; everything is in {self.directory.path}:\n  {contents}"
        )


def _record_of(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of one update by name."""
    named = scalars(jax.device_get(replace(metrics, nonfinite=None)))
    named["applied_updates"] = named.pop("step")
    return {name.removeprefix("metrics/"): value for name, value in named.items()}


def _verb(config: Any) -> str:
    from jaxfb.config.post_training import COMMANDS

    return COMMANDS[type(config)]


def flat(state: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A TrainState as a dict of its fields, so that a checkpoint has its parameters under "params"."""
    return {name: value for name, value in vars(state).items() if value is not None}
