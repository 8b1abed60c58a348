"""Implements what several kinds of training share of the loop's interface, `work.Work`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan, explain_difference
from jaxfb.refusal import Refused
from jaxfb.training.batches import parts_of_update, place
from jaxfb.training.ending import where_it_lies
from jaxfb.training.log import named_numbers
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run
from jaxfb.training.work import Say
from jaxfb.update.pipeline_state import in_model_order
from jaxfb.update.train_state import Limits
from jaxfb.update.train_step import StepMetrics, TrainState, TrainStep

PyTree = Any


class BaseWork:
    """The part of a `Work` that does not depend on the kind."""

    config: Any
    starts_with_evaluation = False
    in_program = False
    limits: Limits | None = None

    def __init__(self):
        self.say: Say = print
        self.train_state: TrainState = None  # type: ignore[assignment]  # until `start` or `restore`

    def apply(
        self, step: TrainStep, batch: Any, rows: int | None = None
    ) -> tuple[StepMetrics, dict[str, float]]:
        """Applies one update to the state; returns its numbers and, with log.split_update, the seconds of its parts."""
        if not self.config.log.split_update:
            self.train_state, metrics = step(self.train_state, batch, rows, self.limits)
            return metrics, {}
        self.train_state, metrics, seconds = step.timed(self.train_state, batch, rows, self.limits)
        return metrics, {f"{name}_seconds": value for name, value in seconds.items()}

    def write_start(self, directory: RunDirectory) -> None:
        """Writes nothing besides the files of every run."""

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        return named_numbers(metrics)

    def state(self) -> PyTree:
        self.train_state = in_model_order(self.train_state, donate=True)
        return self.train_state

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json contains about this kind of training."""
        return {"applied_updates": int(self.train_state.step)}

    def plot(self, directory: RunDirectory) -> None:
        """Draws what came of the run."""

    def prepare_end(self) -> Any:
        return self.summary()

    def finish(self, run: Run, prepared: Any) -> dict[str, Any]:
        self.plot(run.directory)
        return prepared

    def last_lines(self, directory: RunDirectory, summary: Mapping[str, Any]) -> Iterable[str]:
        yield from where_it_lies(directory, summary)

    def close(self) -> None:
        """Does nothing, since nothing reads ahead."""


class WindowedWork(BaseWork):
    """Updates on windows of rows, each by the compiled step of the window's batch plan.

    run_plan: rows of each update. change_gradients: of callbacks; the loop sets it.
    """

    command = "train"
    change_gradients: Callable[[PyTree, TrainState], PyTree] | None = None

    def __init__(self, mesh: Mesh, run_plan: RunPlan):
        super().__init__()
        self.mesh, self.run_plan = mesh, run_plan
        self._steps: dict[BatchPlan, TrainStep] = {}
        self._compiled: set[BatchPlan] = set()

    @property
    def total(self) -> int:
        return self.run_plan.total_updates

    def to_dict(self) -> dict[str, Any]:
        return self.run_plan.to_dict()

    def update(self, number: int, batch: Any) -> tuple[StepMetrics, dict[str, Any]]:
        window = self.run_plan.window(number)
        placed, step = place(batch, window.plan, self.mesh), self.step_of(window.plan)
        began = time.monotonic()
        metrics, seconds = self.apply(step, placed, window.rows)
        if window.plan not in self._compiled:
            self._compiled.add(window.plan)
            self.say(f"compiled the update of {window.plan.rows} rows in {time.monotonic() - began:.1f} s")
        return metrics, seconds

    def parts_of_update(self, number: int, batch: Any) -> tuple:
        """Returns what update `number` (from 0) computes with, apart; see `batches.parts_of_update`."""
        plan = self.run_plan.window(number).plan
        return parts_of_update(self.step_of(plan), self.train_state, batch, plan)

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        saved, ramp_up = record["plan"], self.to_dict()["ramp_up"]
        before = {**saved["plans"]["train"], "ramp_up": saved["ramp_up"]}
        if difference := explain_difference(before, self.run_plan.train, ramp_up=ramp_up):
            raise Refused(difference)

    def step_of(self, plan: BatchPlan) -> TrainStep:
        """Returns the step for updates of this plan, made once."""
        if plan not in self._steps:
            self._steps[plan] = self.make_step(plan)
        return self._steps[plan]

    @abstractmethod
    def make_step(self, plan: BatchPlan) -> TrainStep:
        """Returns a step for updates of this plan."""
