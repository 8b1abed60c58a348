"""Saves and restores a run: the train state, and beside it where the data stood and under which config.

The last of the steps data -> batch plan -> forward_backward -> gradients -> one update -> checkpoint.
Orbax writes the arrays (asynchronously, committed by one rename); this file adds what it leaves open: a
manifest of every leaf, compared *before* loading because Orbax casts dtypes silently, a checksum of every leaf that
does not depend on the mesh, compared after, errors that are never swallowed, and the way back to the newest step that
can be read whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from functools import partial as partial_of
from pathlib import Path
from typing import Any, cast

import jax
from orbax.checkpoint import v1 as ocp

from jaxfb.checkpoint.abandoned import SaveThreads
from jaxfb.checkpoint.cannot_write import CannotWrite, cannot_write, why_not_named
from jaxfb.checkpoint.damage import damage
from jaxfb.checkpoint.manifest import (
    WHO,
    Mismatch,
    abstract_leaf,
    as_json,
    check_sums,
    check_writable,
    named_leaves,
    sealed,
    shapes_of,
    with_sharding_of_its_rank,
)
from jaxfb.checkpoint.old_steps import pass_over_failed_removals
from jaxfb.checkpoint.record import RECORD, context
from jaxfb.checkpoint.saved_steps import FORMAT, SavedSteps, unless_prevented
from jaxfb.checkpoint.step_directories import DAMAGED_SUFFIX, remove_unfinished, steps_in, unused
from jaxfb.checkpoint.together import NOT_OF_A_FILE, gathered, read_by_all
from jaxfb.checkpoint.write_errors import WriteErrors, quiet_late_answers, wait_for
from jaxfb.parallel.totals import checksums
from jaxfb.process.fault_points import reach, watch_renames
from jaxfb.refusal import INT64, Missing, Refused, StorageError, boolean, instance, integer
from jaxfb.update.pipeline_state import as_saved

log = logging.getLogger(__name__)
write_errors = WriteErrors()


class CheckpointStore(SavedSteps):
    """The checkpoints of one run: `directory/<step>/`, each either complete or invisible.

    Keeps the newest `keep` steps, and the one whose `host["metrics"][keep_best]` is best.

    Args:
      directory: created at the first save. Tried in order by `restore`: newest complete step first.
      keep: number of newest steps to keep, at least 1.
      keep_best: name of a metric; steps saved without it cannot be best. None: keeps none.
      asynchronous: `save` returns once the arrays are copied from the devices, so that their buffers may be
        donated to the next step at once. A failed write is raised by the next `save`, `wait` or `close`.
      best_is: whether the "lowest" or the "highest" value of the metric is best; None: the highest where its name ends
        in "accuracy".

    `save`, `restore`, `wait` and `close` are made by every process of a run, in the same order; any process may
    look at `steps`, `latest`, `best` and `host` alone.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 3,
        keep_best: str | None = "eval/loss",
        asynchronous: bool = True,
        best_is: str | None = None,
    ):
        super().__init__(directory, keep_best, best_is)
        self._keep = integer("keep", keep, who=WHO)
        self.asynchronous = boolean("asynchronous", asynchronous, who=WHO)
        self._writer: ocp.training.Checkpointer | None = None
        self._pending: ocp.AsyncResponse | None = None
        self._pending_step: int | None = None
        self._threads = SaveThreads()

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Saves one step as a whole: arrays and host values are committed together or not at all.

        Args:
          step: names the checkpoint; a larger number is newer.
          state: pytree of jax.Array (sharded in any way, PRNG key arrays included).
          host: a JSON-able dict, such as data position, config, metrics, versions; equal on every process.
        Raises:
          ValueError: the step exists, a leaf is not an array, or `host` is not JSON.
          CannotWrite: this save failed, or the previous asynchronous one.
        """
        self.wait()
        step = integer("step", step, who=WHO, least=0, most=INT64)
        instance("host", host, Mapping, "a dict of values that JSON has", who=WHO)
        check_writable(state, named_leaves(state))
        leaves = named_leaves(as_saved(state))
        content = {"format": FORMAT, "step": step, "leaves": shapes_of(leaves), "host": as_json(host)}
        writer = self._writer_for(step)
        reach("save")
        write_errors.forget(self.directory)
        self._threads = SaveThreads()
        self._pending = self._begun(writer, step, leaves, content)
        self._threads.begun()
        if self._pending is None:
            raise Refused(
                f"[checkpoint] step {step} is not above the newest one that is saved, {self.latest()}; use a larger one"
            )
        self._pending_step = step
        reach("save.writing")
        if not self.asynchronous:
            self.wait()

    def restore(
        self, abstract_state: Any, step: int | None = None, partial: bool = False
    ) -> tuple[Any, dict]:
        """Restores a step onto the mesh the abstract state names, whatever mesh it was saved from.

        A save that this store has begun is waited for.

        Args:
          abstract_state: tree of jax.ShapeDtypeStruct or arrays; each leaf's sharding is where it will live
            (a leaf without one goes to the first local device).
          step: the step, or None for the newest that can be read; steps passed over are logged as warnings.
          partial: the checkpoint may hold leaves that are not asked for (`{"params": ...}` to generate text).
        Returns:
          (state like abstract_state, the host dict given to `save`). The arrays are bitwise those saved.
        Raises:
          FileNotFoundError: there is no such step, or none that can be read.
          StorageError: the given step is damaged; or a process may not read a step, or has too many files open, which
            is not damage, so that no older step is taken.
          ValueError: names, shapes or dtypes differ; the message lists them.
          CannotWrite: the save that was waited for failed.
        """
        boolean("partial", partial, who=WHO)
        self.wait()
        reach("restore")
        # a state that is none is refused: the checkpoints are not what is damaged
        named_leaves(abstract_state)
        abstract_state = as_saved(abstract_state)
        if step is not None:
            integer("step", step, who=WHO, least=0, most=INT64)
            return self._load_given(step, abstract_state, partial)
        reasons = []
        for candidate in self._candidates():
            try:
                found = self._load(candidate, abstract_state, partial)
                self._damaged.discard(candidate)  # whatever kept it from being read before is over
                return found
            except (Mismatch, *NOT_OF_A_FILE):
                raise
            except Exception as error:  # damage shows up as any of a dozen storage errors
                reasons.append(f"step {candidate} {damage(self.directory / str(candidate), error)}")
                log.warning("[checkpoint] skipping a checkpoint of %s: %s", self.directory, reasons[-1])
                self._damaged.add(candidate)
        remedy = "; copy a whole one back, or train again with --fresh" if reasons else ""
        raise Missing(self._no_step(None) + remedy + "".join(f"\n  {reason}" for reason in reasons))

    def wait(self) -> None:
        """Returns when the last save is committed.

        Raises:
          CannotWrite: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            if jax.process_count() > 1:
                wait_for(pending.result, lambda: write_errors.of(self.directory))
            else:
                pending.result()
            self._check_named()
            reach("save.done")
        except BaseException as error:
            self._abandon_writer()
            # A lost process shows up as an error of the runtime; that is for whoever watches the processes.
            if not isinstance(error, Exception) or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise self._cannot_write(self._pending_step, error) from error

    def close(self) -> None:
        """Waits, then releases the writer. The store can still be read afterwards."""
        self.wait()  # which gives a writer up whose save failed
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        try:
            self.close()
        except CannotWrite as failed:
            if kind is None:
                raise
            log.warning("%s", failed)  # what has ended the context is not to be replaced

    def _check_named(self) -> None:
        """Raises unless the last save has its name: Orbax reports no error where a thread of it was cancelled, or
        where its files were removed.
        """
        path = self.directory / str(self._pending_step)
        if jax.process_index() == 0 and not path.is_dir():
            raise StorageError(why_not_named(self.directory))

    def _writer_for(self, step: int) -> ocp.training.Checkpointer:
        """Returns the writer, opened at the first save; refuses a step that is saved already."""
        try:
            if self._damaged:  # found since the writer was opened, for which they still count
                self.close()
            writer = self._writer or self._open_writer()
        except OSError as error:
            raise self._cannot_write(step, error) from error
        if (self.directory / str(step)).exists():
            raise Refused(
                f"[checkpoint] step {step} is already saved in {self.directory}; resume from it, or train "
                "into another run directory"
            )
        return writer

    def _begun(
        self,
        writer: ocp.training.Checkpointer,
        step: int,
        leaves: Mapping[str, Any],
        content: Mapping[str, Any],
    ) -> ocp.AsyncResponse | None:
        """Starts to write a step; None where Orbax will not, because a newer one is saved."""
        try:
            return _begun_save(writer, step, leaves, content, self._score(content["host"]))
        except OSError as error:
            self._abandon_writer()
            raise self._cannot_write(step, error) from error
        except BaseException:  # such as Ctrl-C, or no checksums; Orbax would raise it again at the next save
            self._abandon_writer()
            raise

    def _abandon_writer(self) -> None:
        """Replaces the writer, because Orbax repeats a failed save's error at every later call."""
        writer, self._writer = self._writer, None
        # of several processes the others may not come to the end of the save, for which closing would wait
        if writer is not None and jax.process_count() == 1:
            self._threads.end_waiting()
            with contextlib.suppress(Exception):
                writer.close()

    def _open_writer(self) -> ocp.training.Checkpointer:
        self._threads.wait_until_ended()
        self._clear()
        watch_renames(self.directory)
        logging.getLogger("absl").addFilter(write_errors)
        quiet_late_answers()
        policies: Any = ocp.training.preservation_policies
        keep = [policies.LatestN(self._keep)]
        if self.keep_best is not None:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics["score"],
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            keep.append(best)
        self._writer = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=cast(Any, ocp.training.save_decision_policies.FixedIntervalPolicy(1)),
            preservation_policy=policies.AnyPreservationPolicy(keep),
            context=context(),
            cleanup_tmp_directories=False,  # done by _clear, which waits for writes that are under way
        )
        pass_over_failed_removals(self._writer)
        return self._writer

    def _clear(self) -> None:
        """Sets aside what cannot be read and removes what an earlier save left unfinished, on process 0."""
        if jax.process_index() == 0:
            self._set_aside_damaged()
            remove_unfinished(self.directory)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("jaxfb set aside damaged checkpoints")
        self._damaged.clear()  # whatever has one of these numbers from now on is another checkpoint

    def _set_aside_damaged(self) -> None:
        """Renames what cannot be read, so that it neither counts as newest nor blocks its step number."""
        for step in steps_in(self.directory):
            if step in self._damaged or not self._is_complete(step):
                target = unused(self.directory / f"{step}{DAMAGED_SUFFIX}")
                (self.directory / str(step)).rename(target)
                log.warning("[checkpoint] step %d cannot be read; set aside as %s", step, target)

    def _candidates(self) -> list[int]:
        """Returns the steps to try, newest first: those whose directory every process sees."""
        there = [set(steps) for steps in gathered(steps_in(self.directory))]
        return sorted(set.intersection(*there), reverse=True)

    def _load_given(self, step: int, abstract_state: Any, partial: bool) -> tuple[Any, dict]:
        """Does as `_load`; damage, which shows up as any of a dozen storage errors, is a StorageError."""
        try:
            return self._load(step, abstract_state, partial)
        except (Refused, StorageError, *NOT_OF_A_FILE):
            raise
        except Exception as error:
            found = damage(self.directory / str(step), error)
            raise StorageError(f"[checkpoint] step {step} of {self.directory} {found}") from error

    def _load(self, step: int, abstract_state: Any, partial: bool) -> tuple[Any, dict]:
        """Returns state and host values of a step that every process can read; none has it if one cannot."""
        path = self.directory / str(step)
        read = unless_prevented(path)(partial_of(self._read, step, abstract_state, partial))
        record, loaded = read_by_all(read, step, lambda error: damage(path, error))
        check_sums(record.get("sums", {}), loaded, step)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), list(loaded.values()))
        return state, record["host"]

    def _read(self, step: int, abstract_state: Any, partial: bool) -> tuple[dict, dict[str, Any]]:
        """Returns the record of a step, and its arrays by name; this process alone reads, and waits for no other."""
        self.check_fit(abstract_state, self.existing(step), partial)
        record = self._record(step)
        wanted = {name: abstract_leaf(leaf) for name, leaf in named_leaves(abstract_state).items()}
        skipped = {name: ocp.PLACEHOLDER for name in record["leaves"] if name not in wanted}
        with context(alone=True):
            path = self.directory / str(step)
            loaded = ocp.load_checkpointables(path, {"state": {**wanted, **skipped}})["state"]
        return record, {name: with_sharding_of_its_rank(loaded[name]) for name in wanted}

    def _cannot_write(self, step: int | None, error: BaseException) -> CannotWrite:
        steps = None
        with contextlib.suppress(OSError):  # such as too many open files, which is the reason as well
            steps = self.steps()
        return cannot_write(self.directory, step, steps, error)


def _begun_save(
    writer: ocp.training.Checkpointer,
    step: int,
    leaves: Mapping[str, Any],
    content: Mapping[str, Any],
    metrics: dict | None,
) -> ocp.AsyncResponse | None:
    """Starts to write a step; its arrays are summed up on the devices while Orbax writes what it took off."""
    record: Future = Future()
    try:
        pending = writer.save_checkpointables_async(step, {"state": leaves, RECORD: record}, metrics=metrics)
        whole = sealed({**content, "sums": checksums(leaves)})
    except BaseException as error:  # Orbax's thread, if it was started, waits for the record
        with _unless_cancelled():
            record.set_exception(error)
        raise
    with _unless_cancelled():
        record.set_result(whole)
    return pending


def _unless_cancelled() -> contextlib.AbstractContextManager:
    """Passes over a record for which Orbax's thread waits no more: the save has failed, and its result tells why."""
    return contextlib.suppress(InvalidStateError)
