"""A run in progress: the train state, how many windows of rows it has consumed, and how both are saved."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, Window, explain_difference
from jaxfb.checkpoint import CheckpointStore
from jaxfb.config import Config, config_from_dict, config_to_dict
from jaxfb.train_step import StepMetrics, TrainState, TrainStep
from jaxfb.training.agreement import package_versions
from jaxfb.training.batches import HostBatch, WindowReader, place
from jaxfb.training.changes import changes_between, check_changes, listing
from jaxfb.training.evaluate import HeldOut
from jaxfb.training.guard import NonFiniteAbort, listed, unsound_leaves
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.setup import Setup, optimizer, run_plan


class Run:
    """What the loop works on, and what callbacks receive at the start.

    setup:     everything it is made of. directory: where it lives.
    state:     the train state after `done` windows (on the devices; donated by the next update).
    done:      global batches consumed, applied or skipped; also the name of a checkpoint.
    held_out:  the evaluation.
    metrics:   of the last evaluation.
    resumed:   whether `done` and `state` are those of a checkpoint.
    """

    def __init__(self, setup: Setup, directory: RunDirectory, say: Callable[[str], None] = print):
        self.setup, self.directory, self.say = setup, directory, say
        settings = setup.config.checkpoint
        # At least two: the newest is known to be good only when an update after it has been applied.
        keep = max(settings.keep, 2)
        self._store = CheckpointStore(directory.checkpoints, keep, settings.keep_best, settings.asynchronous)
        self._reader = WindowReader(setup.corpus.train, setup.plan, setup.config.data.seed, setup.mesh)
        self._steps: dict[BatchPlan, TrainStep] = {}
        self._compiled: set[BatchPlan] = set()
        self._waits: dict[int, float] = {}
        self._saved: int | None = None
        self.held_out = HeldOut(setup)
        self.state: TrainState = None  # type: ignore[assignment]
        self.done, self.resumed = 0, False
        self.metrics: dict[str, float] = {}
        self.metrics_at: int | None = None

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def mesh(self) -> Mesh:
        return self.setup.mesh

    @property
    def total(self) -> int:
        """Windows of the whole run."""
        return self.setup.plan.total_updates

    @property
    def rows_an_epoch(self) -> int:
        return len(self.setup.corpus.train)

    @property
    def finished(self) -> bool:
        return self.done >= self.total

    def start(self) -> None:
        """A fresh state, drawn from the seed."""
        self.state = self._step(self.setup.plan.window(0).plan).init(
            self.setup.init_params, self.setup.config.run.seed
        )

    def resume(self, allow_changes: bool = False) -> bool:
        """Restores state and position of the newest checkpoint that can be read; False if there is none.

        The mesh and the cut into microbatches may differ from the saved run's, the rows of an update may not. Every
        key of the config that differs is printed.

        Args:
          allow_changes: accept a config that gives the saved parameters or rows another meaning.
        Raises:
          ValueError: the checkpoint is of another model, optimizer or seed, or would go on with other rows.
        """
        if self.directory.newest_update() is None:
            return False
        setup = self.setup
        abstract = self._step(setup.plan.train).abstract_state(setup.init_params)
        newest = self._store.latest()
        if newest is not None:  # refused before arrays are read, which may take minutes
            self._store.check_fit(abstract, newest)
            self._check_record(self._store.host(newest), allow_changes)
        state, host = self._store.restore(abstract)
        if bad := unsound_leaves((state.params, state.opt_state)):
            raise ValueError(
                f"[checkpoint] update {host['update']} of {self.directory.checkpoints} is not finite in {listed(bad)}; "
                f"move its directory away to go on from an earlier one{self._earlier(host['update'])}"
            )
        if host["update"] != newest:
            self._check_record(host, allow_changes)
        if changes := listing(changes_between(host["config"], setup.config)):
            self.say(f"changed since update {host['update']}:{changes}")
        if allow_changes:
            self._reader.seek(host["data"]["consumed_rows"])
        else:
            self._reader.restore(host["data"])
        self.state, self.done, self._saved = state, host["update"], host["update"]
        self.metrics, self.metrics_at = host["metrics"], host["update"] if host["metrics"] else None
        self.resumed = True
        self._say_rate(host["config"])
        return True

    def windows(self) -> Iterator[Window]:
        """The windows still to come."""
        return self.setup.plan.windows(self.done)

    def read(self, window: Window) -> HostBatch:
        """The rows of a window, on the host; how long they were waited for is in `waited`."""
        began = time.monotonic()
        batch = self._reader.read(window)
        self._waits[window.update + 1] = time.monotonic() - began
        return batch

    def waited(self, step: int) -> float:
        """Seconds that an update's rows were waited for; asked once."""
        return self._waits.pop(step, 0.0)

    def sync(self) -> None:
        """Waits for the devices; for a profile, and nothing in the loop."""
        jax.block_until_ready(self.state)

    def update(self, window: Window, batch: HostBatch) -> StepMetrics:
        """Dispatches one update; its numbers are on the device and perhaps still to be computed."""
        placed, step = place(batch, window.plan, self.setup.mesh), self._step(window.plan)
        began = time.monotonic()
        self.state, metrics = step(self.state, placed, window.rows)
        self.done = window.update + 1
        if window.plan not in self._compiled:
            self._compiled.add(window.plan)
            self.say(f"compiled the update of {window.plan.rows} rows in {time.monotonic() - began:.1f} s")
        return metrics

    def is_due(self, section: str) -> bool:
        """Whether `eval` or `checkpoint` happens after this update: every so many, and at the end."""
        every = getattr(self.setup.config, section).every
        return self.finished or (every is not None and self.done % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Held-out loss of the present parameters."""
        self.metrics, self.metrics_at = self.held_out.evaluate(self.state.params), self.done
        return self.metrics

    def save(self) -> bool:
        """Hands the state to the checkpoint writer; False if this very state is saved already.

        Raises:
          NonFiniteAbort: the state holds a nan or an inf, and is not saved.
          CannotWrite: it cannot be written, or the one before could not.
        """
        if self._saved == self.done:
            return False
        if bad := unsound_leaves((self.state.params, self.state.opt_state)):
            raise NonFiniteAbort(f"[train] the state after update {self.done} is not finite in {listed(bad)}")
        self._store.save(self.done, self.state, self._host())
        self._saved = self.done
        return True

    def wait_saved(self) -> None:
        """Returns when the last save is on the disk; CannotWrite if it failed."""
        self._store.wait()

    def newest_saved(self) -> int | None:
        """The update of the newest checkpoint that is complete."""
        return self._store.latest()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_) -> None:
        self._reader.close()
        self._store.close()

    def _step(self, plan: BatchPlan) -> TrainStep:
        if plan not in self._steps:
            self._steps[plan] = self.setup.train_step(plan)
        return self._steps[plan]

    def _host(self) -> dict[str, Any]:
        """What a checkpoint holds beside the state: position, evaluation, config, plan and versions."""
        setup = self.setup
        last = setup.plan.window(self.done - 1) if self.done else None
        return {
            "update": self.done,
            "data": self._reader.position(last),
            "metrics": self.metrics if self.metrics_at == self.done else {},
            "config": config_to_dict(setup.config),
            "plan": setup.plan.to_dict(),
            "versions": {**package_versions(), "platform": jax.devices()[0].platform},
        }

    def _earlier(self, update: int) -> str:
        steps = [str(step) for step in self._store.steps() if step < update]
        return f" ({', '.join(steps)})" if steps else ", of which there is none"

    def _say_rate(self, saved: dict[str, Any]) -> None:
        """Prints the learning rate of the next update where the saved config would have used another one.

        A schedule that ends with the run, made longer, has a higher rate in the middle of it.
        """
        with contextlib.suppress(ValueError):  # of a config that this jaxfb no longer reads
            new, old = self._next_rate(self.setup.config), self._next_rate(config_from_dict(saved))
            if new != old:
                self.say(f"learning rate of the next update: {new:.3g}, by the saved config {old:.3g}")

    def _next_rate(self, config: Config) -> float:
        """The learning rate that this config gives the next update; behind the end of its run the final one."""
        plan = run_plan(config, dict(self.setup.plan.plans), self.rows_an_epoch)
        count = self.state.samples if config.lr.unit == "samples" else self.state.step
        with warnings.catch_warnings(action="ignore"):
            return float(optimizer(config, plan).learning_rate(int(count)))

    def _check_record(self, host: dict[str, Any], allow_changes: bool) -> None:
        self._check_same_rows(host)
        if not allow_changes:
            check_changes(host["config"], self.setup.config, host["update"])

    def _check_same_rows(self, host: dict[str, Any]) -> None:
        plan, saved = self.setup.plan, host["plan"]
        ramp_up = plan.to_dict()["ramp_up"]
        difference = explain_difference(
            {**saved["plans"]["train"], "ramp_up": saved["ramp_up"]}, plan.train, ramp_up=ramp_up
        )
        if difference:
            raise ValueError(difference)
        update, consumed = host["update"], host["data"]["consumed_rows"]
        if update < plan.total_updates and plan.window(update).start != consumed:
            raise ValueError(
                f"[run] the saved run consumed {consumed} rows in {update} updates, by this config they "
                f"would be {plan.window(update).start}: a window was cut short where this run cuts none; "
                "resume with the saved run's length"
            )
