"""The updates of a run: rows, one update, its numbers, then an evaluation and a save where they are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from jaxfb.callbacks import Callback
from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.forward_backward.arguments import deleted_leaf
from jaxfb.metrics import Pending
from jaxfb.platforms.runtime_errors import as_runtime_errors
from jaxfb.process.fault_points import reach
from jaxfb.process.forks import ending_children
from jaxfb.process.position import here
from jaxfb.training.ending import after_failures, after_fault
from jaxfb.training.guard import DeviceFault, GuardAbort, NonFiniteAbort
from jaxfb.training.guarding.guards import Guards, Spike
from jaxfb.training.job.hosts import Hosts, RefusedByAll
from jaxfb.training.job.interrupt import Interrupt
from jaxfb.training.origins import origins
from jaxfb.training.persistence.disk import bytes_of, lack_of_space
from jaxfb.training.persistence.undo import Undo
from jaxfb.training.reporting.continuing import again, saved
from jaxfb.training.session import Run
from jaxfb.update.train_state import StepMetrics

OWN = ("data_wait", "callbacks", "logging")  # phases in which a process does not wait for others


class Updates:
    """The updates of one run between its hooks.

    The hooks are called on every process. The host runs one update ahead of the device. On CPU it waits for each before
    it starts the next, since XLA:CPU can deadlock with several queued.
    """

    def __init__(self, hosts: Hosts, run_: Run, hooks: Callback, interrupt: Interrupt, undo: Undo):
        self._hosts, self._run, self._hooks, self._interrupt = hosts, run_, hooks, interrupt
        self._undo = undo
        self._work, self._pending, self._guard = run_.work, Pending(), Guards(run_)
        self._on_cpu = self._work.mesh.devices.flat[0].platform == "cpu"
        self._saves = False  # a save stays due while the latest updates failed
        self._dispatched = False  # whether an update was, in this process

    def make_all(self) -> None:
        """Makes updates to the end of the run, to a signal, or until a callback or a guard ends it."""
        run_ = self._run
        self._begin()
        try:
            self._updates()
        except GuardAbort as error:
            dumped = self._dumped(error)
            left = run_.newest_saved, again(run_)
            advice = (
                after_fault(*left) if isinstance(error, DeviceFault) else after_failures(*left, error.rate)
            )
            raise type(error)(f"{error}; {advice}{dumped}") from None
        run_.wait_saved()

    def _begin(self) -> None:
        """Makes the state that a new run begins with, and sees that there is space to save it."""
        run_ = self._run
        here.enter("initialization")
        if not run_.resumed:
            self._hosts.agree("what the run begins with", lambda: origins(run_.config))
            self._work.start(run_.say)
            if self._hosts.count > 1:
                self._guard.check_start()
        self._check_space()
        here.enter("callbacks")
        self._hooks.on_train_start(run_)
        reach("start.ready")
        self._interrupt.begun = True

    def _updates(self) -> None:
        """Makes updates until the run is finished, or a signal or a callback ends it, and saves the last one."""
        run_ = self._run
        run_.goodput.start()
        if not run_.resumed and self._work.starts_with_evaluation:
            self._evaluate()
            self._save()
        while not run_.finished and self._interrupt.signal is None and run_.stopped is None:
            self._or_back(self._one)
        self._or_back(self._save_late)
        if self._guard.failed and run_.finished:
            failed = self._guard.failed
            raise NonFiniteAbort(f"[train] the last updates of the run, {failed} of them, were not finite")

    def _dumped(self, error: GuardAbort) -> str:
        """Returns how to compute the update again that a guard has ended the run at, once a dump of it is written.

        A disk that does not take it must not hide why the run has ended, or change its exit code.
        """
        try:
            self._run.wait_saved()
            dump = self._guard.dump(error, self._pending.flush())
        except OSError as problem:
            return f"; no dump of the update was written: {problem}"
        there = dump and self._run.directory.is_kept
        return f"; the update can be computed again with: jaxfb replay {dump}" if there else ""

    def _check_space(self) -> None:
        """Ends the run, before the first update, where the disk has no space for a checkpoint."""
        run_, needed = self._run, bytes_of(self._work.state())
        where, keep = run_.directory.checkpoints, run_.config.checkpoint.keep
        if lack := self._hosts.first(lambda: lack_of_space(where, needed, keep, run_.say)):
            raise CannotWrite(lack)

    def _or_back(self, go_on: Callable[[], None]) -> None:
        """Goes on, or returns to a checkpoint where the update before turns out to be a spike."""
        try:
            go_on()
        except Spike as spike:
            self._pending = Pending()  # what was computed from the state that is given up
            self._guard.roll_back(spike)

    def _one(self) -> None:
        """Makes one update, then an evaluation and a save where they are due.

        The numbers of the previous update arrive while it runs, except before an evaluation or a save.
        """
        run_, number = self._run, self._run.done
        batch = self._read(number)
        if number + 1 in getattr(run_.config.run, "skip_updates", ()):
            self._arrive()
            run_.say(f"update {number + 1} is in run.skip_updates: its rows change nothing")
            run_.done = number + 1
        else:
            self._update(number, batch)
        self._undo.forget()
        run_.note_saved()
        self._evaluate_and_save()

    def _read(self, number: int) -> Any:
        """Returns the rows of an update, counted from 0."""
        with self._run.phases("callbacks", number + 1):
            self._hooks.on_step_start(number + 1)
        with self._run.phases("data_wait", number + 1):
            batch = self._or_save_first(lambda: self._work.read(number))
            self._run.keep_working_directory()  # which a source of rows, or a reward, may have left
        return batch

    def _evaluate_and_save(self) -> None:
        """Evaluates and saves what is done, where that is due."""
        run_ = self._run
        # asked on every process and after every update: it meets the others where there are several
        ends = self._interrupt.is_due(run_.done) or run_.stopped is not None
        evaluates, locally = run_.is_due("eval"), run_.is_due_locally()
        self._saves = self._saves or ends or run_.is_due("checkpoint")
        if evaluates or self._saves or locally:
            self._arrive()
        if evaluates:
            self._evaluate()
        if self._saves and not self._guard.failed:
            self._save()
            self._saves = False
        elif locally and not self._guard.failed:
            run_.save_locally()

    def _save_late(self) -> None:
        """Saves what is done where a signal, a hook or a record that was not written asked for it after `_one` did."""
        if self._run.done:
            self._arrive()
            if not self._guard.failed:
                self._save()

    def _update(self, number: int, batch: Any) -> None:
        """Dispatches an update, and takes the numbers of the one before."""
        with self._run.phases("callbacks", number + 1):
            self._hooks.before_update(number + 1, batch)
        reach("read")
        if self._on_cpu:
            self._arrive()
        with self._run.phases("update", number + 1):
            metrics = self._dispatch(number, batch)
        self._run.done = number + 1
        reach("update")
        self._arrive((self._run.done, metrics))

    def _dispatch(self, number: int, batch: Any) -> tuple[StepMetrics, Mapping[str, Any]]:
        """Starts an update. Before the first one has compiled there is nothing that a signal should save."""
        self._interrupt.begun = self._dispatched
        metrics = self._or_save_first(lambda: self._guard.update(number, batch))
        self._interrupt.begun = self._dispatched = True
        return metrics

    def _or_save_first(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` returns; where it refuses, such as rows that cannot be read or an update that memory
        cannot hold, saves what is done before the refusal continues. If nothing is, `Undo` takes the start back.

        On several processes that is so only of what all of them refuse, such as a reward that process 0 computes for
        all; where one refuses, the others wait in the next update, so that there is nobody to save with.
        """
        try:
            with as_runtime_errors(), ending_children():
                return read()
        except ValueError as error:
            self._arrive()
            alone = self._hosts.count > 1 and not isinstance(error, RefusedByAll)
            overwritten = deleted_leaf(self._work.train_state) is not None  # by a function of the caller
            if alone or overwritten or self._guard.failed or not self._run.done:
                raise
            self._save()
            self._run.wait_saved()
            error.args = (f"{error}; {saved(self._run)}", *error.args[1:])
            if self._hosts.count > 1:
                self._hosts.first(partial(_raise, error))  # no process ends before the others have saved
            raise

    def _arrive(self, pushed: tuple[int, Any] | None = None) -> None:
        """Takes the numbers of an update that is done: guard first, so that a record never hides a bad update.

        pushed: an update that was just started; the numbers are those of the one before.
        """
        with self._run.phases("waiting"):
            arrived = self._pending.push(*pushed) if pushed else self._pending.flush()
        if arrived is None:
            return
        step, (metrics, more) = arrived
        judged = self._guard.check(step, metrics)
        record = {**self._work.record(step - 1, metrics), **more, **judged}
        phases = self._run.phases.take(step)
        self._run.goodput.add(phases, bool(metrics.skipped))
        record = {f"{name}_seconds": value for name, value in phases.items()} | record
        record["goodput"] = self._run.goodput.share
        here.pace(sum(phases[name] for name in OWN), sum(phases.values()))
        seconds, slow = self._hosts.pace()
        if seconds is not None:
            record["host_seconds"] = seconds
        for text in slow:
            self._run.say(text)
        with self._run.phases("logging"):
            self._hooks.on_step_end(step, record)
        reach("logged")
        self._guard.undo_spike(step, record)

    def _evaluate(self) -> None:
        found = self._or_save_first(self._run.evaluate)
        here.enter("callbacks")
        self._hooks.on_eval(self._run.done, found)

    def _save(self) -> None:
        if self._hosts.count > 1 and not self._run.is_saved:
            # each process writes a part of the arrays; parts of copies that differ are of no one state
            self._guard.check_copies()
        if self._run.save():
            here.enter("callbacks")
            self._hooks.on_save(self._run.done, self._run.directory.checkpoints / str(self._run.done))


def _raise(error: Exception) -> NoReturn:
    raise error
