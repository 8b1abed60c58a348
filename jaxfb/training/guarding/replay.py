"""Computes the update of a dump again and compares its numbers bit for bit: `jaxfb replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import config_from_dict
from jaxfb.guard.locate import Place, first_nonfinite
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.guard import described
from jaxfb.training.guarding.dump import Dump, bits_of, read_dump
from jaxfb.training.guarding.spike_guard import SpikeGuard
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.versions import version_changes
from jaxfb.training.work import Work
from jaxfb.types import Pipelined
from jaxfb.update.train_state import StepMetrics

PyTree = Any


@dataclass(frozen=True)
class Replay:
    """The result of computing an update again.

    is_same: all numbers of the update are the bits of the run; None where the dump does not have them.
    causes:  what was not finite -> paths of the leaves, as `StepMetrics.nonfinite_causes`.
    place:   where the first value that is not finite appeared, and in which microbatch; None where nothing is, or
      the model is not cut into layers.
    """

    update: int
    is_same: bool | None
    metrics: StepMetrics
    causes: dict[str, list[str]]
    place: tuple[Place, int] | None


def replay(
    path: str | Path,
    make_work: Callable[[Any, Hosts], Work],
    overrides: Sequence[str] = (),
) -> Replay:
    """Computes the update of a dump again, on as many devices as the run had.

    Args:
      path: the directory of the dump.
      make_work: (config, hosts) -> Work, as the run was made; its data must be there.
      overrides: "key=value", of the section hosts.
    Raises:
      FileNotFoundError: a dump or checkpoint is missing. ValueError: another number of devices, other data.
    """
    dump = read_dump(path)
    config = config_from_dict(
        dump.config, [*overrides, "run.max_nonfinite=null"]
    )  # no guard is to end this one
    with Hosts(config.hosts) as hosts:
        _report_differences(dump)
        use_compile_cache()
        work = make_work(config, hosts)
        work.say = print
        try:
            return _replayed(dump, work)
        finally:
            work.close()


def _replayed(dump: Dump, work: Work) -> Replay:
    state, record = CheckpointStore(dump.checkpoint).restore(work.abstract_state(), dump.step)
    work.restore(state, record, False)
    skipped = getattr(work.config.run, "skip_updates", ())
    spikes = SpikeGuard(work.config.guard, record.get("guard", {}).get("spikes", {}))
    for number in range(dump.past, dump.update - 1):
        batch = work.read(number)
        if number + 1 not in skipped:
            work.limits = spikes.limits(number + 1)
            metrics = jax.device_get(work.update(number, batch)[0])
            spikes.judge(number + 1, metrics, lambda text: None)
    work.limits = spikes.limits(dump.update)
    batch = dump.rows(jax.process_index())
    batch = work.read(dump.update - 1) if batch is None else batch
    place = _located(work, dump.update - 1, batch)
    metrics = jax.device_get(work.update(dump.update - 1, batch)[0])
    is_same = bits_of(metrics) == dump.numbers if dump.numbers else None
    causes = metrics.nonfinite_causes(work.abstract_params)
    return Replay(dump.update, is_same, metrics, causes, place if causes else None)


def report(found: Replay) -> list[str]:
    """Returns what a replay showed as lines."""
    numbers = f"loss {float(found.metrics.loss):.6g}, gradient norm {float(found.metrics.grad_norm):.6g}"
    same = {
        True: "the same bits as in the run",
        False: "NOT the bits of the run",
        None: "not known of the run",
    }
    lines = [f"update {found.update} computed again: {numbers}: {same[found.is_same]}"]
    if found.causes:
        lines.append(f"not finite: {described(found.causes)}")
    if found.place:
        place, microbatch = found.place
        lines.append(f"first value that is not finite: {place}, in microbatch {microbatch}")
    return lines


def _located(work: Work, number: int, batch: PyTree) -> tuple[Place, int] | None:
    """Returns where the first value that is not finite appears, microbatch by microbatch; None if unknown."""
    parts = getattr(work, "parts_of_update", None)
    if parts is None or jax.process_count() > 1:
        return None
    model, params, microbatches, keys = parts(number, batch)
    if not isinstance(model, Pipelined):
        return None
    for index in range(jax.tree.leaves(microbatches)[0].shape[0]):
        one = lambda leaf: leaf[index]  # noqa: B023, E731
        if place := first_nonfinite(model, params, *jax.tree.map(one, (microbatches, keys))):
            return place, index
    return None


def _report_differences(dump: Dump) -> None:
    for name, saved, here in version_changes(dump.versions):
        print(f"the run had {name} {saved}, here it is {here}: the bits may differ")
    if jax.device_count() != dump.devices:
        print(f"the run had {dump.devices} devices, here are {jax.device_count()}: the bits may differ")
