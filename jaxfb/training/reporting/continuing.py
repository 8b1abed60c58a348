"""Sentences on how a run begins, what it leaves when it stops, and how to continue it."""

from __future__ import annotations

from typing import Any

from jaxfb.refusal import shown
from jaxfb.training.ending import length_key, what_is_saved
from jaxfb.training.reporting.report import command
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run


def after_a_loss(directory: RunDirectory, newest: int | None) -> str:
    """Returns what to do when the job has lost a process or was stopped early; `newest` is the last update saved."""
    if not directory.is_kept:
        return "start the run again"
    if directory.has_identity:
        saved = f"update {newest} is saved in {directory.path}, and later ones"
        saved = "checkpoints" if newest is None else saved
        return f"{saved} may be on the hosts' own disks: start the run again with --resume"
    if newest is None:
        return "nothing is saved yet: start the run again"
    return f"update {newest} is saved: start the run again with --resume"


def after_a_loss_of(run: Run, processes: int) -> str:
    """Returns what a process that has lost another advises, for a run in progress.

    If a callback has stopped the run on this process, it comes first: where no other process has called `run.stop`,
    all wait for each other.
    """
    advice = after_a_loss(run.directory, run.newest_saved)
    if run.stopped is None or processes == 1:
        return advice
    return (
        f"a callback of this process has called run.stop({shown(run.stopped)}), which every process must call after "
        f"the same update; {advice}"
    )


def already_finished(directory: RunDirectory, config: Any, updates: int) -> str:
    """Returns how to continue a run that has made all its updates."""
    return (
        f"{directory.path} is finished: {updates} update{'s' * (updates != 1)}. To train it longer, resume it with a "
        f"larger {length_key(config)} (--resume, or resume=True in a program); to start over, use --fresh "
        "(fresh=True)"
    )


def where_from(run: Run, resume: bool) -> str:
    """Returns from which update a run starts; resume: whether it was asked to continue."""
    if run.done > run.total:
        key = length_key(run.config)
        return (
            f"{run.directory.path} was saved after update {run.done}, beyond the {run.total} that {key} gives: it ends "
            f"there; to train it further, resume it with a larger {key}"
        )
    if run.resumed:
        return f"resuming {run.directory.path} after update {run.done} of {run.total}"
    if resume:
        return f"no checkpoint in {run.directory.path} to resume from: starting at update 0"
    return "starting"


def saved(run: Run) -> str:
    """Returns which update is saved."""
    return what_is_saved(run.done, run.total, run.newest_saved)


def left(run: Run) -> str:
    """Returns what there is to continue from, and the command for it."""
    if not run.directory.is_kept:
        return f"ended after update {run.done} of {run.total}"
    return f"{saved(run)}; continue with: {again(run)}"


def again(run: Run) -> str:
    """Returns the command, or the call, that continues a run."""
    limit = run.config.run.stop_at
    is_reached = limit is not None and limit <= run.done  # with that limit it could not be resumed
    if run.work.in_program:
        return run.work.call + ", with run.stop_at=None" * is_reached
    if not run.directory.is_kept:
        return f"{command()} {run.work.command} CONFIG --smoke"
    return f"{command()} {run.work.command} {run.directory.path} --resume" + " run.stop_at=null" * is_reached
