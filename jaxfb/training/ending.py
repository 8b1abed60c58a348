"""Words what a run leaves when it ends: the same sentences for pre-training and post-training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxfb.config.sections import LENGTHS
from jaxfb.display import duration
from jaxfb.training.run_dir import RunDirectory


def what_is_saved(done: int, total: int, newest: int | None) -> str:
    """Returns what there is to continue from, after `done` of `total` updates, with `newest` the last one saved."""
    if newest == done:
        return f"saved after update {done} of {total}"
    if done == 0:
        return "ended before the first update"
    return f"update {done} of {total} is not saved, since the latest updates failed; {_newest(newest)} saved"


def after_failures(newest: int | None, again: str, rate: str = "optimizer.learning_rate") -> str:
    """Returns what a run that was given up leaves, and how to continue.

    again: the command for it. rate: the key of the learning rate that may be too high.
    """
    if newest is None:
        return f"nothing is saved: lower {rate} or look at the data, then start again"
    return (
        f"nothing was saved since update {newest}, whose state is finite: lower {rate} or look at the data, then "
        f"continue from it with: {again}"
    )


def after_fault(newest: int | None, again: str) -> str:
    """Returns how to continue after a device was found to be broken; `again` is the command for it."""
    return f"{_newest(newest)} saved; to continue without that device: {again}"


def _newest(update: int | None) -> str:
    return "nothing is" if update is None else f"update {update} is"


def where_it_lies(where: RunDirectory, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields how long the run was and, unless its directory is removed at once, where everything lies."""
    length = f"{_updates(summary)} in {duration(summary['seconds'])}"
    if not where.is_kept:
        yield length
        return
    yield f"{length}; everything is in {where.path}:"
    yield "  " + "  ".join(where.contents())


def _updates(summary: Mapping[str, Any]) -> str:
    """Returns how many updates a run has, and how many of them this process applied, as words."""
    done, before = summary["updates"], summary["updates_before"]
    counted = f"{done} update{'s' * (done != 1)}"
    return f"{counted}, the last {done - before} of them" if 0 < before < done else counted


def length_key(config: Any) -> str:
    """Returns the key that sets how long a run of this config is."""
    if hasattr(config, "rollout"):
        return "rollout.rollouts"
    keys = ((section, name) for section in ("run", "batch") for name in LENGTHS)
    return next(f"{s}.{name}" for s, name in keys if getattr(getattr(config, s), name, None) is not None)
