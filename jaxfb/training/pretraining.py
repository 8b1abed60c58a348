"""Pretraining as a `Work`: windows of packed text, one update each, and the held-out loss."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.batch_plan import BatchPlan, explain_difference
from jaxfb.config import Config, config_from_dict
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.lora import without_adapters
from jaxfb.pipeline_state import in_model_order
from jaxfb.refusal import Refused
from jaxfb.train_state import Limits
from jaxfb.train_step import StepMetrics, TrainState, TrainStep
from jaxfb.training import report
from jaxfb.training.agreement import what_is_made
from jaxfb.training.batches import HostBatch, WindowReader, parts_of_update, place
from jaxfb.training.evaluate import TERM, HeldOut
from jaxfb.training.log import named_numbers
from jaxfb.training.parameters import begun, carry_from, params_in, with_given_adapter
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run
from jaxfb.training.setup import Setup, optimizer, run_plan
from jaxfb.training.work import Say, Table

PyTree = Any


class Pretraining:
    """A language model on packed rows of text; see `work.Work`.

    setup: everything it is made of. held_out: the evaluation.
    """

    command = "train"
    starts_with_evaluation = False
    change_gradients: Callable[[PyTree, TrainState], PyTree] | None = None  # of callbacks; the loop sets it
    limits: Limits | None = None  # of the next update; the guards set it

    def __init__(self, setup: Setup, say: Say = print):
        self.setup, self.config, self.mesh = setup, setup.config, setup.mesh
        self.say = say
        self.held_out = HeldOut(setup)
        self._reader = WindowReader(setup.corpus.train, setup.plan, setup.config.data.seed, setup.mesh)
        self._steps: dict[BatchPlan, TrainStep] = {}
        self._compiled: set[BatchPlan] = set()
        self.train_state: TrainState = None  # type: ignore[assignment]

    @property
    def total(self) -> int:
        return self.setup.plan.total_updates

    @property
    def tokenizer(self) -> Any:
        return self.setup.corpus.tokenizer

    @cached_property
    def abstract_params(self) -> PyTree:
        return jax.eval_shape(lambda: self.setup.init_params(jax.random.key(0)))

    @property
    def flops_per_token(self) -> float | None:
        return self.setup.flops_per_token

    @property
    def rows_an_epoch(self) -> int:
        return len(self.setup.corpus.train)

    def facts(self) -> Mapping[str, Any]:
        return what_is_made(self.setup)

    def tables(self) -> Iterable[Table]:
        return report.start_tables(self.setup)

    def to_dict(self) -> dict[str, Any]:
        return self.setup.plan.to_dict()

    def write_start(self, directory: RunDirectory) -> None:
        """Writes the companions of the model that the run begins with, if there is one."""
        carry_from(self.config, directory)

    def start(self, say: Say) -> None:
        first, seed = self._step(self.setup.plan.window(0).plan), self.config.run.seed
        model = self.config.model
        if isinstance(model, OwnModelConfig) or model.from_ is None:
            self.train_state = first.init(with_given_adapter(self.config, self.setup.init_params), seed)
            return
        say(f"reading the weights of {model.from_}")
        abstract = without_adapters(first.abstract_state(self.setup.init_params).params)
        params = begun(self.config, params_in(model.from_, model, abstract))
        self.train_state = first.init(params, seed, donate=True)

    def read(self, number: int) -> HostBatch:
        return self._reader.read(self.setup.plan.window(number))

    def update(self, number: int, batch: HostBatch) -> tuple[StepMetrics, dict[str, Any]]:
        window = self.setup.plan.window(number)
        placed, step = place(batch, window.plan, self.mesh), self._step(window.plan)
        began = time.monotonic()
        self.train_state, metrics = step(self.train_state, placed, window.rows, self.limits)
        if window.plan not in self._compiled:
            self._compiled.add(window.plan)
            self.say(f"compiled the update of {window.plan.rows} rows in {time.monotonic() - began:.1f} s")
        return metrics, {}

    def parts_of_update(self, number: int, batch: Any) -> tuple:
        """Returns what update `number` (from 0) computes with, apart; see `batches.parts_of_update`."""
        plan = self.setup.plan.window(number).plan
        return parts_of_update(self._step(plan), self.train_state, batch, plan)

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        """Returns the numbers of an update; `tokens` are those that its loss counted."""
        window, record = self.setup.plan.window(number), named_numbers(metrics)
        if f"weights/{TERM}" not in record:
            raise Refused(
                f"[model] the loss has no term {TERM!r} but {', '.join(metrics.terms)}; name one so, with the counted "
                "tokens as its weight"
            )
        tokens = record.pop(f"weights/{TERM}")
        epoch = (window.start + window.rows) / self.rows_an_epoch
        passes = self._reader.passes(window.start + window.rows)
        of_sources = {f"epoch/{name}": value for name, value in passes.items()}
        return {**record, "tokens": tokens, "rows": window.rows, "epoch": epoch, **of_sources}

    def evaluate(self) -> dict[str, float]:
        return self.held_out.evaluate(self.train_state.params)

    def state(self) -> PyTree:
        self.train_state = in_model_order(self.train_state, donate=True)
        return self.train_state

    def host(self, done: int) -> dict[str, Any]:
        last = self.setup.plan.window(done - 1) if done else None
        return {"data": self._reader.position(last)}

    def abstract_state(self) -> PyTree:
        return self._step(self.setup.plan.train).abstract_state(self.setup.init_params)

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        self._check_same_rows(record)

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        if allow_changes:
            self._reader.seek(record["data"]["consumed_rows"])
        else:
            self._reader.restore(record["data"])
        self.train_state = state
        self._report_rate(record["config"])

    def prepare_end(self) -> str | None:
        return report.sample(self.setup, self.train_state.params)

    def finish(self, run: Run, prepared: str | None) -> dict[str, Any]:
        summary = report.summarize(self, run.metrics, prepared)
        report.write_end(run, summary)
        return summary

    def last_lines(self, directory: RunDirectory, summary: Mapping[str, Any]) -> Iterable[str]:
        return report.last_lines(self.config, directory, summary)

    def close(self) -> None:
        self._reader.close()

    def _step(self, plan: BatchPlan) -> TrainStep:
        if plan not in self._steps:
            self._steps[plan] = self.setup.train_step(plan, self.change_gradients)
        return self._steps[plan]

    def _report_rate(self, saved: dict[str, Any]) -> None:
        """Prints the learning rate of the next update where the saved config would have used another one.

        A schedule that ends with the run, made longer, has a higher rate in the middle of it.
        """
        with contextlib.suppress(ValueError):  # of a config that this jaxfb no longer reads
            new, old = self._next_rate(self.config), self._next_rate(config_from_dict(saved))
            if new != old:
                self.say(f"learning rate of the next update: {new:.3g}, by the saved config {old:.3g}")

    def _next_rate(self, config: Config) -> float:
        """Returns the learning rate that this config gives the next update; behind the end of its run the final one."""
        plan = run_plan(config, dict(self.setup.plan.by_purpose), self.rows_an_epoch)
        count = self.train_state.samples if config.lr.unit == "samples" else self.train_state.step
        with warnings.catch_warnings(action="ignore"):
            return float(optimizer(config, plan).learning_rate(jnp.asarray(int(count))))

    def _check_same_rows(self, host: Mapping[str, Any]) -> None:
        plan, saved = self.setup.plan, host["plan"]
        ramp_up = plan.to_dict()["ramp_up"]
        difference = explain_difference(
            {**saved["plans"]["train"], "ramp_up": saved["ramp_up"]}, plan.train, ramp_up=ramp_up
        )
        if difference:
            raise Refused(difference)
        update, consumed = host["update"], host["data"]["consumed_rows"]
        if update < plan.total_updates and plan.window(update).start != consumed:
            raise Refused(
                f"[run] the saved run consumed {consumed} rows in {update} updates, by this config they "
                f"would be {plan.window(update).start}: a window was cut short where this run cuts none; "
                "resume with the saved run's length"
            )
