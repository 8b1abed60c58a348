"""Writes a dump when a guard ends a run, so that the update can be computed again elsewhere: `jaxfb replay`.

<run>/dumps/update-<n>/dump.json         reason, numbers, config, versions, where the state comes from
                       rows-<process>.npz   the rows of that update which a process had
                       state/<n-1>/         the state before it, where that is still known
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.checkpoint.together import gathered
from jaxfb.config import config_to_dict
from jaxfb.refusal import Missing, Refused, StorageError
from jaxfb.training.guard import by_path
from jaxfb.training.run_dir import write_json
from jaxfb.training.session import Run
from jaxfb.update.train_state import StepMetrics, TrainState

PyTree = Any
FORMAT = 1


@dataclass(frozen=True)
class Dump:
    """A dump that was read.

    update:     the one that failed, from 1. reason: the sentence with which the run ended.
    numbers:    the bits of that update's StepMetrics by path; empty where they are not known.
    config, versions, devices: of the run; plain nested values, and the number of devices of the whole job.
    tree:       the structure of the rows that were kept (see `_described`); None where they were not.
    checkpoint: the directory of the checkpoints to start from, of this dump or of the run. step: which of them.
    past:       with that state, the rows up to this update are consumed.
    """

    path: Path
    update: int
    reason: str
    numbers: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    devices: int
    tree: Any
    checkpoint: Path
    step: int
    past: int

    def rows(self, process: int) -> PyTree | None:
        """Returns the rows of that update which the process had; None where they were not kept.

        Raises:
          StorageError: their file is damaged.
        """
        path = self.path / f"rows-{process}.npz"
        if self.tree is None or not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _rebuilt(self.tree, [arrays[f"a{index}"] for index in range(len(arrays))])
        except (OSError, MemoryError):  # of the machine, not of what the file holds
            raise
        except Exception:  # a damaged archive raises errors of zipfile, zlib and NumPy
            raise StorageError(
                f"[replay] {path} is damaged; remove it, and the rows are read from the run's data again"
            ) from None


def bits_of(metrics: StepMetrics) -> dict[str, str]:
    """Returns dtype and bytes of every number of an update, by path, so that a nan compares equal to the same nan."""
    arrays = {name: np.asarray(leaf) for name, leaf in by_path(metrics).items()}
    return {name: f"{array.dtype}:{array.tobytes().hex()}" for name, array in arrays.items()}


def before(state: TrainState, metrics: StepMetrics) -> TrainState:
    """Returns the state before an update that was not finite: only a counter and the loss scale changed."""
    count = lambda old, new: jax.device_put(np.asarray(new, old.dtype), old.sharding)  # noqa: E731
    scale = state.loss_scale
    if scale is not None:
        scale = replace(scale, scale=count(scale.scale, metrics.loss_scale))
    return replace(
        state,
        nonfinite_updates=count(state.nonfinite_updates, metrics.nonfinite_updates - 1),
        zero_weight_updates=count(state.zero_weight_updates, metrics.zero_weight_updates),
        loss_scale=scale,
    )


def write_dump(
    run: Run, update: int, reason: str, metrics: StepMetrics | None, batch: PyTree, past: int, is_known: bool
) -> Path:
    """Writes a dump of update `update` (from 1); every process of a job calls it.

    Args:
      metrics: of that update, on the host; None where they are not known.
      batch: its rows on this process; None where they are not known.
      past: rows up to this update are consumed when the state of the newest checkpoint continues.
      is_known: the state of the run is that before the update, but for counters.
    """
    path = run.directory.path / "dumps" / f"update-{update:06d}"
    _empty(path)
    origin = {"checkpoint": str(run.directory.checkpoints.absolute()), "step": run.newest_saved, "past": past}
    if is_known and metrics is not None:
        run.work.train_state = before(run.work.train_state, metrics)
        with CheckpointStore(path / "state", keep=1, keep_best=None, asynchronous=False) as store:
            store.save(update - 1, run.work.state(), run.record(update - 1))
        origin = {"checkpoint": "state", "step": update - 1, "past": update - 1}
    tree = _save_rows(path / f"rows-{jax.process_index()}.npz", batch)
    if jax.process_index() == 0:
        values = {
            "format": FORMAT,
            "update": update,
            "reason": reason,
            "numbers": {} if metrics is None else bits_of(metrics),
            "config": config_to_dict(run.config),
            "versions": run.versions,
            "devices": jax.device_count(),
            "tree": tree,
            **origin,
        }
        write_json(path / "dump.json", values)
    return path


def read_dump(path: str | Path) -> Dump:
    """Returns a dump; its arrays are read later.

    Raises:
      FileNotFoundError: there is none. ValueError: it is none of this version's.
    """
    path = Path(path)
    file = path / "dump.json" if path.is_dir() else path
    if not file.is_file():
        there = sorted([*path.glob("dumps/update-*"), *path.parent.glob("update-*")])
        known = f" such as {there[-1]}" if there else " that a guard left when it ended a run"
        raise Missing(f"[replay] {path} is not a dump; use a directory RUN/dumps/update-N{known}")
    try:
        values = json.loads(file.read_text())
        if values.pop("format") != FORMAT:
            raise KeyError("format")
        checkpoint, step = values.pop("checkpoint"), values.pop("step")
        if checkpoint == "state":
            checkpoint = file.parent / "state"
        if step is None:
            raise Refused(
                f"[replay] {file} names no checkpoint: nothing had been saved, so there is no state to start from"
            )
        return Dump(file.parent, checkpoint=Path(checkpoint), step=step, **values)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise Refused(f"[replay] {file} is damaged, or of another version of jaxfb") from None


def _empty(path: Path) -> None:
    """Makes a directory, without what a run that ended at the same update before has left there.

    Every process calls it, since process 0 does it for all.
    """
    failure = None
    if jax.process_index() == 0:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            path.mkdir(parents=True)
        except OSError as error:
            failure = f"{path}: {error.strerror or error}"
    if (failure := gathered(failure)[0]) is not None:
        raise StorageError(failure)


def _save_rows(path: Path, batch: PyTree) -> Any:
    """Writes the arrays of a batch; returns its tree as JSON, or None where it cannot be written as such."""
    arrays: list[np.ndarray] = []
    try:
        tree = _described(batch, arrays)
    except TypeError:
        return None
    named: dict[str, Any] = {f"a{index}": array for index, array in enumerate(arrays)}
    np.savez(path, **named)  # of numbers alone, so nothing is pickled
    return tree


def _described(tree: PyTree, arrays: list[np.ndarray]) -> Any:
    """Returns a tree as JSON, with each array as its index in `arrays`, which is extended; TypeError where it cannot.

    Dicts with strings as keys are dicts; a list or tuple is a list of its kind ("list", "tuple") and its values.
    """
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {key: _described(value, arrays) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return [type(tree).__name__, *(_described(value, arrays) for value in tree)]
    array = np.asarray(tree) if hasattr(tree, "dtype") else None
    if array is None or array.dtype.kind not in "biufc":
        raise TypeError
    arrays.append(array)
    return len(arrays) - 1


def _rebuilt(tree: Any, arrays: list[np.ndarray]) -> PyTree:
    if isinstance(tree, dict):
        return {key: _rebuilt(value, arrays) for key, value in tree.items()}
    if isinstance(tree, list):
        kind, *values = tree
        return {"list": list, "tuple": tuple}[kind](_rebuilt(value, arrays) for value in values)
    return arrays[tree]
