"""The training loop, the only one: pretraining, fine-tuning, preferences and policies run through it.

    config -> work -> [rows -> one update -> its numbers] -> evaluate, save -> end

What an update is, what is saved and what is logged belong to a `Work`. On several processes every one runs this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from jaxfb.callbacks import CHANGE, Callback, combine
from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.config.operation import HostsConfig
from jaxfb.display import print_table
from jaxfb.forward_backward.arguments import deleted_leaf
from jaxfb.metrics import Pending
from jaxfb.platforms.runtime_errors import as_runtime_errors
from jaxfb.process.fault_points import reach
from jaxfb.process.launcher import tell_begun
from jaxfb.process.os_errors import FULL
from jaxfb.process.position import here
from jaxfb.refusal import Refused, boolean
from jaxfb.registry import attribute_of
from jaxfb.training.agreement import what_runs
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.continuing import (
    after_a_loss,
    after_a_loss_of,
    again,
    already_finished,
    left,
    saved,
    where_from,
)
from jaxfb.training.disk import bytes_of, lack_of_space
from jaxfb.training.ending import after_failures, after_fault
from jaxfb.training.guard import DeviceFault, GuardAbort, NonFiniteAbort
from jaxfb.training.guards import Guards, Spike
from jaxfb.training.hosts import Hosts, RefusedByAll
from jaxfb.training.interrupt import Interrupt, Stopped, keep_for_good, stopped_early
from jaxfb.training.log import Log
from jaxfb.training.open_mesh import with_mesh
from jaxfb.training.origins import origins
from jaxfb.training.run_dir import RunDirectory, write_json
from jaxfb.training.run_lock import RunLock, claim
from jaxfb.training.session import Result, Run
from jaxfb.training.undo import Undo
from jaxfb.training.work import Work
from jaxfb.update.train_state import StepMetrics

MakeWork = Callable[[Any, Hosts], Work]
OWN = ("data_wait", "callbacks", "logging")  # phases in which a process does not wait for others
_CHECK_HOST = "jaxfb.planner.host_fit", "check_host"
"""By name, since the planner is made of what the trainer runs."""
SHARED_WITHIN_SECONDS = 30  # a network file system may show late what another host wrote


@dataclass(frozen=True)
class Start:
    """The way a run begins. resume: from the newest checkpoint. fresh: after moving an older run aside.

    allow_changes: a resumed run may have a config that gives the saved parameters or rows another meaning.
    """

    resume: bool = False
    fresh: bool = False
    allow_changes: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            boolean(name, value)


def run(make_work: MakeWork, config: Any, start: Start, callbacks: Iterable[Callback] = ()) -> Result:
    """Runs to the end, to a signal, or until a callback stops it.

    Args:
      make_work: (config, hosts) -> Work; refuses what is impossible before anything is written.
      config: its section `run` names the directory.
      callbacks: called at every hook on every process, after the trainer's own logging.
    Raises:
      ValueError: an impossible size, a missing file, a saved run in run.dir or one in progress, a checkpoint that does
        not fit; before the first update run.dir is then as it was.
      LostProcess: another process of the job is gone; what was saved is whole.
      GuardAbort: a guard ends the run: too many updates in a row were not finite or the state is not (NonFiniteAbort),
        spikes come again and again (SpikeAbort), a device computes wrongly (DeviceFault); of that nothing is saved.
      CannotWrite: the disk is full or not writable; the message names the update that is saved.
    """
    hooks, directory = combine(callbacks), RunDirectory.of(config)
    reach("start")
    with Interrupt() as interrupt:
        try:
            return _run(make_work, config, start, hooks, directory, interrupt)
        except Stopped as stopped:
            keep_for_good(stopped)
            newest = stopped.newest() if stopped.newest else directory.newest_update()
            print(f"{stopped_early(str(stopped))}; {after_a_loss(directory, newest)}", flush=True)
            return Result("interrupted", directory.path, newest or 0, {})


def _run(
    make_work: MakeWork,
    config: Any,
    start: Start,
    callbacks: Callback,
    directory: RunDirectory,
    interrupt: Interrupt,
) -> Result:
    with Hosts(config.hosts) as hosts, RunLock(directory.path) as lock:
        interrupt.join()
        config = replace(config, hosts=HostsConfig())
        hosts.agree("config or code", lambda: what_runs(config, **vars(start)))
        hosts.advise(lambda: after_a_loss(directory, directory.newest_update()))
        config = with_mesh(config, hosts, directory if start.resume else None)
        if not start.fresh and (summary := hosts.first(lambda: directory.finished(config))):
            return _already_finished(hosts, directory, config, summary["updates"], summary)
        hosts.first(lambda: claim(directory, lock, config, start.resume, start.fresh))
        use_compile_cache()
        attribute_of(*_CHECK_HOST)(config, hosts.say)
        work = make_work(config, hosts)
        _change_gradients(work, callbacks)
        hosts.agree("text, plan or devices", work.facts)
        interrupt.limit(config.run.minutes, config.run.stop_at)
        with Undo(directory, lock) as undo, Run(work, directory, hosts.say) as run_:
            hosts.first(lambda: undo.begin(start.fresh))
            tell_begun()
            hosts.advise(lambda: after_a_loss_of(run_, hosts.count))
            try:
                with as_runtime_errors():
                    return _Loop(hosts, run_, callbacks, interrupt, undo).start(start)
            except Stopped as stopped:  # checkpoints that were passed over as damaged are known by now
                stopped.newest = lambda: run_.newest_saved
                raise


class _Loop:
    """The updates of one run between its hooks.

    Process 0 logs; the caller's hooks are called on every process. The host runs one update ahead of the device. On CPU
    it waits for each before it starts the next, since XLA:CPU can deadlock with several queued.
    """

    def __init__(self, hosts: Hosts, run_: Run, callbacks: Callback, interrupt: Interrupt, undo: Undo):
        self._hosts, self._run, self._callbacks, self._interrupt = hosts, run_, callbacks, interrupt
        self._undo = undo
        self._work, self._pending = run_.work, Pending()
        self._on_cpu = self._work.mesh.devices.flat[0].platform == "cpu"
        self._began = time.monotonic()
        self._saves = False  # a save stays due while the latest updates failed
        self._dispatched = False  # whether an update was, in this process

    def start(self, start: Start) -> Result:
        hosts, run_ = self._hosts, self._run
        if start.resume:
            run_.resume(start.allow_changes)
        hosts.agree("what they resume from", lambda: {"update": run_.done})
        if run_.finished and hosts.first(lambda: run_.directory.summary.is_file() and not run_.unwritten):
            return _already_finished(hosts, run_.directory, run_.config, run_.done, None)
        if not run_.finished:
            _check_stop(run_.config.run.stop_at, run_.done)
        plan, tokenizer = self._work.to_dict(), self._work.tokenizer
        hosts.first(lambda: run_.directory.create(run_.config, plan, tokenizer, run_.done))
        hosts.first(lambda: self._work.write_start(run_.directory))
        _check_shared(hosts, run_.directory)
        run_.note_directory()
        run_.open_local()
        if hosts.is_first:
            for title, rows in self._work.tables():
                print_table(title, rows)
        hosts.say(where_from(run_, start.resume))
        with Log(run_, self._interrupt.fail) if hosts.is_first else nullcontext(Callback()) as log:
            self._hooks = combine([log, self._callbacks])
            self._guard = Guards(run_)
            self._train()
        return self._end()

    def _train(self) -> None:
        run_ = self._run
        self._begin()
        try:
            self._updates()
        except GuardAbort as error:
            dumped = self._dumped(error)
            advice = after_fault if isinstance(error, DeviceFault) else after_failures
            raise type(error)(f"{error}; {advice(run_.newest_saved, again(run_))}{dumped}") from None
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
        """Makes one update. The numbers of the previous one arrive while it runs, except before an evaluation or a
        save.
        """
        run_, number, phases = self._run, self._run.done, self._run.phases
        with phases("callbacks", number + 1):
            self._hooks.on_step_start(number + 1)
        with phases("data_wait", number + 1):
            batch = self._or_save_first(lambda: self._work.read(number))
        if number + 1 in getattr(run_.config.run, "skip_updates", ()):
            self._arrive()
            run_.say(f"update {number + 1} is in run.skip_updates: its rows change nothing")
            run_.done = number + 1
        else:
            self._update(number, batch)
        self._undo.forget()
        run_.note_saved()
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
            with as_runtime_errors():
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
        self._hooks.on_eval(self._run.done, self._or_save_first(self._run.evaluate))

    def _save(self) -> None:
        if self._hosts.count > 1 and not self._run.is_saved:
            # each process writes a part of the arrays; parts of copies that differ are of no one state
            self._guard.check_copies()
        if self._run.save():
            self._hooks.on_save(self._run.done, self._run.directory.checkpoints / str(self._run.done))

    def _end(self) -> Result:
        hosts, run_, path = self._hosts, self._run, self._run.directory.path
        if failure := self._interrupt.failure:
            remedy = self._interrupt.remedy
            raise CannotWrite(f"{failure}; {saved(run_)}; {remedy}continue with: {again(run_)}")
        if not run_.finished:
            why = self._interrupt.signal or run_.stopped
            hosts.say(f"{why}: {left(run_)}")
            status = "interrupted" if self._interrupt.signal else "stopped"
            return Result(status, path, run_.done, run_.metrics)
        prepared = self._work.prepare_end()
        summary = hosts.first(lambda: self._written_end(prepared))
        run_.remove_local()
        self._hooks.on_train_end(run_.done, run_.metrics)
        hosts.say(str(run_.goodput))
        if hosts.is_first:
            for line in self._work.last_lines(run_.directory, summary):
                print(line, flush=True)
        return Result("finished", path, run_.done, run_.metrics, summary)

    def _written_end(self, prepared: Any) -> dict[str, Any]:
        """Returns the summary once the last files are written; a disk that does not take them loses no update."""
        try:
            return self._summary(prepared)
        except OSError as error:
            where, reason = error.filename or self._run.directory.path, error.strerror or str(error)
            remedy = "free some space, then " if error.errno in FULL else ""
            raise CannotWrite(
                f"[run] {where} cannot be written: {reason}; {saved(self._run)}; {remedy}write what is missing with: "
                f"{again(self._run)}"
            ) from error

    def _summary(self, prepared: Any) -> dict[str, Any]:
        run_ = self._run
        seconds = round(time.monotonic() - self._began, 2)
        common = {
            "updates": run_.done,
            "updates_before": run_.before or 0,
            "seconds": seconds,
            "metrics": run_.metrics,
        }
        run_.goodput.end(run_.phases.take(run_.done))
        common["goodput"] = run_.goodput.summary()
        summary = {**common, **self._work.finish(run_, prepared)}
        write_json(run_.directory.summary, summary)
        return summary


def _raise(error: Exception) -> NoReturn:
    raise error


def _change_gradients(work: Work, callbacks: Callback) -> None:
    """Makes the callbacks' `change_gradients` a part of every compiled update."""
    if callbacks.change_gradients is None:
        return
    if not hasattr(work, CHANGE):
        raise Refused(
            f"[callbacks] change_gradients is for jaxfb.Trainer and `jaxfb train`, not for `jaxfb {work.command}`; "
            "leave it out, or change the gradients in the optimizer"
        )
    setattr(work, CHANGE, callbacks.change_gradients)


def _check_stop(stop_at: int | None, done: int) -> None:
    """Refuses a limit that was reached before the run continues."""
    if stop_at is not None and stop_at <= done:
        raise Refused(
            f"[run] stop_at={stop_at} is not after update {done}, which is saved; use run.stop_at={done + 1} or more, "
            "or run.stop_at=null"
        )


def _check_shared(hosts: Hosts, directory: RunDirectory) -> None:
    """Refuses a run.dir that is not one directory for all processes: each writes its part of a checkpoint there."""
    if hosts.count == 1:
        return
    mark = hosts.first(directory.mark)
    there = "there" if directory.shows(mark, SHARED_WITHIN_SECONDS) else "missing"
    fact = {f"what process 0 wrote to {directory.path}": there}
    hosts.agree("run.dir, which must be one directory for all", lambda: fact)
    hosts.first(directory.unmark)


def _already_finished(
    hosts: Hosts, directory: RunDirectory, config: Any, updates: int, summary: dict | None
) -> Result:
    hosts.say(already_finished(directory, config, updates))
    return Result("finished", directory.path, updates, (summary or {}).get("metrics", {}), summary)
