"""Implements what pre-training and your own models share: updates on windows of rows."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan, explain_difference, explain_shift
from jaxfb.refusal import Refused
from jaxfb.training.rows.batches import parts_of_update, place
from jaxfb.training.work import Work
from jaxfb.update.train_state import StepMetrics, TrainState
from jaxfb.update.train_step import TrainStep

PyTree = Any


class WindowedWork(Work):
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
        position = record["data"]
        consumed = position.get("start", position.get("consumed_rows"))  # of rows of your own, of packed ones
        if consumed is None:  # saved by an older version
            return
        if shift := explain_shift(self.run_plan, record["update"], consumed):
            raise Refused(shift)

    def step_of(self, plan: BatchPlan) -> TrainStep:
        """Returns the step for updates of this plan, made once."""
        if plan not in self._steps:
            self._steps[plan] = self.make_step(plan)
        return self._steps[plan]

    @abstractmethod
    def make_step(self, plan: BatchPlan) -> TrainStep:
        """Returns a step for updates of this plan."""
