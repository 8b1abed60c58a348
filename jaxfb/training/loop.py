"""The training loop, the only one: pretraining, fine-tuning, preferences and policies run through it.

    config -> work -> begin or resume -> [rows -> one update -> its numbers -> evaluate, save] -> finish

The part in brackets is `updates.py`. What an update is, what is saved and what is logged belong to a `Work`. On several
processes every one runs this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from jaxfb.callbacks import CHANGE, HOOKS, Callback, callback, combine
from jaxfb.config.operation import HostsConfig
from jaxfb.display import print_table
from jaxfb.platforms.runtime_errors import as_runtime_errors
from jaxfb.process.fault_points import reach
from jaxfb.process.launcher import tell_begun
from jaxfb.refusal import Refused, boolean
from jaxfb.registry import attribute_of
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.job.agreement import what_runs
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.interrupt import Interrupt, Stopped, keep_for_good, stopped_early
from jaxfb.training.log import Log
from jaxfb.training.open_mesh import with_mesh
from jaxfb.training.persistence.run_lock import RunLock, claim
from jaxfb.training.persistence.undo import Undo
from jaxfb.training.reporting.continuing import after_a_loss, after_a_loss_of, already_finished, where_from
from jaxfb.training.reporting.finish import finish
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Result, Run
from jaxfb.training.updates import Updates
from jaxfb.training.work import Work

MakeWork = Callable[[Any, Hosts], Work]
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
                    return _go_through(hosts, run_, callbacks, interrupt, undo, start)
            except Stopped as stopped:  # checkpoints that were passed over as damaged are known by now
                stopped.newest = lambda: run_.newest_saved
                raise


def _go_through(
    hosts: Hosts, run_: Run, callbacks: Callback, interrupt: Interrupt, undo: Undo, start: Start
) -> Result:
    """Begins or resumes a run whose work is known, makes its updates and ends it."""
    began = time.monotonic()
    if start.resume:
        run_.resume(start.allow_changes)
    hosts.agree("what they resume from", lambda: {"update": run_.done})
    if run_.finished and hosts.first(lambda: run_.directory.summary.is_file() and not run_.unwritten):
        return _already_finished(hosts, run_.directory, run_.config, run_.done, None)
    if not run_.finished:
        _check_stop(run_.config.run.stop_at, run_.done)
    _open(hosts, run_)
    if hosts.is_first:
        for title, rows in run_.work.tables():
            print_table(title, rows)
    hosts.say(where_from(run_, start.resume))
    with Log(run_, interrupt.fail) if hosts.is_first else nullcontext(Callback()) as log:
        keep = dict.fromkeys(HOOKS, lambda *_: run_.keep_working_directory())
        hooks = combine([log, callbacks, callback(**keep)])
        Updates(hosts, run_, hooks, interrupt, undo).make_all()
    return finish(hosts, run_, hooks, interrupt, began)


def _open(hosts: Hosts, run_: Run) -> None:
    """Makes the run's directory, and writes what is known at the start; process 0 does."""
    plan, tokenizer = run_.work.to_dict(), run_.work.tokenizer
    hosts.first(lambda: run_.directory.create(run_.config, plan, tokenizer, run_.done))
    hosts.first(lambda: run_.work.write_start(run_.directory))
    _check_shared(hosts, run_.directory)
    run_.note_directory()
    run_.open_local()


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
