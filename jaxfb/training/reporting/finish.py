"""The end of a run: its last files and lines, or what continues it where it ended early."""

from __future__ import annotations

import time
from typing import Any

from jaxfb.callbacks import Callback
from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.process.os_errors import FULL
from jaxfb.process.position import here
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.interrupt import Interrupt
from jaxfb.training.reporting.continuing import again, left, saved
from jaxfb.training.run_dir import write_json
from jaxfb.training.session import Result, Run


def finish(hosts: Hosts, run_: Run, hooks: Callback, interrupt: Interrupt, began: float) -> Result:
    """Ends a run whose last update is saved; writes its last files if it is finished.

    began: the time.monotonic() at which this process began with it.

    Raises:
      CannotWrite: records were not written during the run, or the last files cannot be.
    """
    path = run_.directory.path
    if failure := interrupt.failure:
        raise CannotWrite(f"{failure}; {saved(run_)}; {interrupt.remedy}continue with: {again(run_)}")
    if not run_.finished:
        why = interrupt.signal or run_.stopped
        hosts.say(f"{why}: {left(run_)}")
        status = "interrupted" if interrupt.signal else "stopped"
        return Result(status, path, run_.done, run_.metrics)
    here.enter("the end")
    prepared = run_.work.prepare_end()
    summary = hosts.first(lambda: _written(run_, prepared, began))
    run_.remove_local()
    here.enter("callbacks")
    hooks.on_train_end(run_.done, run_.metrics)
    hosts.say(str(run_.goodput))
    if hosts.is_first:
        for line in run_.work.last_lines(run_.directory, summary):
            print(line, flush=True)
    return Result("finished", path, run_.done, run_.metrics, summary)


def _written(run_: Run, prepared: Any, began: float) -> dict[str, Any]:
    """Returns the summary once the last files are written; a disk that does not take them loses no update."""
    try:
        return _summary(run_, prepared, began)
    except OSError as error:
        where, reason = error.filename or run_.directory.path, error.strerror or str(error)
        remedy = "free some space, then " if error.errno in FULL else ""
        raise CannotWrite(
            f"[run] {where} cannot be written: {reason}; {saved(run_)}; {remedy}write what is missing with: "
            f"{again(run_)}"
        ) from error


def _summary(run_: Run, prepared: Any, began: float) -> dict[str, Any]:
    seconds = round(time.monotonic() - began, 2)
    common = {
        "updates": run_.done,
        "updates_before": run_.before or 0,
        "seconds": seconds,
        "metrics": run_.metrics,
    }
    run_.goodput.end(run_.phases.take(run_.done))
    common["goodput"] = run_.goodput.summary()
    summary = {**common, **run_.work.finish(run_, prepared)}
    write_json(run_.directory.summary, summary)
    return summary
