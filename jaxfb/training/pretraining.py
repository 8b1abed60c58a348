"""Pretraining as a `Work`: windows of packed text, one update each, and the held-out loss."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.batch_plan import BatchPlan
from jaxfb.config import Config, config_from_dict
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.lora import without_adapters
from jaxfb.refusal import Refused
from jaxfb.training.evaluate import TERM, HeldOut
from jaxfb.training.from_config.optimizer import optimizer
from jaxfb.training.from_config.plans import run_plan
from jaxfb.training.job.agreement import what_is_made
from jaxfb.training.log import named_numbers
from jaxfb.training.parameters import begun, carry_from, params_in, with_given_adapter
from jaxfb.training.reporting import report
from jaxfb.training.rows.batches import HostBatch, WindowReader
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run
from jaxfb.training.setup import Setup
from jaxfb.training.windowed_work import WindowedWork
from jaxfb.training.work import Say, Table
from jaxfb.update.train_state import StepMetrics
from jaxfb.update.train_step import TrainStep

PyTree = Any


class Pretraining(WindowedWork):
    """A language model on packed rows of text; see `work.Work`.

    setup: everything it is made of. held_out: the evaluation.
    """

    def __init__(self, setup: Setup, say: Say = print):
        super().__init__(setup.mesh, setup.plan)
        self.setup, self.config, self.say = setup, setup.config, say
        self.held_out = HeldOut(setup)
        self._reader = WindowReader(setup.corpus.train, setup.plan, setup.config.data.seed, setup.mesh)

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

    def write_start(self, directory: RunDirectory) -> None:
        """Writes the companions of the model that the run begins with, if there is one."""
        carry_from(self.config, directory)

    def start(self, say: Say) -> None:
        first, seed = self.step_of(self.run_plan.window(0).plan), self.config.run.seed
        model = self.config.model
        if isinstance(model, OwnModelConfig) or model.from_ is None:
            self.train_state = first.init(with_given_adapter(self.config, self.setup.init_params), seed)
            return
        say(f"reading the weights of {model.from_}")
        abstract = without_adapters(first.abstract_state(self.setup.init_params).params)
        params = begun(self.config, params_in(model.from_, model, abstract))
        self.train_state = first.init(params, seed, donate=True)

    def read(self, number: int) -> HostBatch:
        return self._reader.read(self.run_plan.window(number))

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        """Returns the numbers of an update; `tokens` are those that its loss counted."""
        window, record = self.run_plan.window(number), named_numbers(metrics)
        if f"weights/{TERM}" not in record:
            raise Refused(
                f"[model] the loss has no term {TERM!r} but {', '.join(metrics.terms)}; name one so, with the counted "
                "tokens as its weight"
            )
        tokens = record.pop(f"weights/{TERM}")
        epoch = window.end / self.rows_an_epoch
        passes = self._reader.passes(window.end)
        of_sources = {f"epoch/{name}": value for name, value in passes.items()}
        return {**record, "tokens": tokens, "rows": window.rows, "epoch": epoch, **of_sources}

    def evaluate(self) -> dict[str, float]:
        return self.held_out.evaluate(self.train_state.params)

    def host(self, done: int) -> dict[str, Any]:
        last = self.run_plan.window(done - 1) if done else None
        return {"data": self._reader.position(last)}

    def abstract_state(self) -> PyTree:
        return self.step_of(self.run_plan.train).abstract_state(self.setup.init_params)

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        try:
            self._reader.restore(record["data"])
        except ValueError:
            if not allow_changes:
                raise
            self._reader.seek(record["data"]["consumed_rows"])
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

    def make_step(self, plan: BatchPlan) -> TrainStep:
        return self.setup.train_step(plan, self.change_gradients)

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
