"""Defines the interface between the one training loop and each kind of training, with what most kinds have in common.

Pretraining, fine-tuning, preferences and rollouts are each a `Work`. The loop (`loop.py`) owns what they share: several
hosts, signals, checkpoints and resuming, the guard, logging, callbacks and evaluation at the right updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from jax.sharding import Mesh

from jaxfb.metrics import draw_or_say, plot_losses
from jaxfb.training.ending import where_it_lies
from jaxfb.training.log import named_numbers
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run
from jaxfb.update.pipeline_state import in_model_order
from jaxfb.update.train_state import Limits, StepMetrics, TrainState
from jaxfb.update.train_step import TrainStep

PyTree = Any
Say = Callable[[str], None]
Table = tuple[str, Iterable[tuple[str, Any]]]


class Work(ABC):
    """The interface of one kind of training; what has a body does not depend on the kind.

    config:         with sections run, eval, checkpoint and log.
    command:        the subcommand that runs it, such as "train".
    mesh:           the devices.
    total:          updates of the whole run.
    tokenizer:      is saved with the run; None where there is no text.
    abstract_params: a tree with the structure of the parameters, for the names of leaves.
    flops_per_token: operations of one token, forward and backward; None where they are not known.
    say:            prints a line above the progress; the loop sets it.
    limits:         with which the next update is applied, None for any; the guards set it.
    train_state:    what the next update reads; the guards put an earlier one back.
    starts_with_evaluation: the untrained parameters are evaluated and saved before the first update.
    in_program:     it has parts that a program made, so that no command can continue it, but `call` does.
    """

    config: Any
    command: str
    mesh: Mesh
    total: int
    tokenizer: Any
    abstract_params: PyTree
    flops_per_token: float | None
    limits: Limits | None = None
    starts_with_evaluation = False
    in_program = False
    call = "trainer.train(resume=True)"

    def __init__(self):
        self.say: Say = print
        self.train_state: TrainState = None  # type: ignore[assignment]  # until `start` or `restore`

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Returns what must be the same on every process of the job: rows, plans, devices."""

    @abstractmethod
    def tables(self) -> Iterable[Table]:
        """Returns titles and tables of what was decided, printed at the start."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as plain values: plan.json, and what a resumed run is compared with."""

    def write_start(self, directory: RunDirectory) -> None:  # noqa: B027
        """Writes what the run directory holds of this kind from the start, on process 0; here nothing."""

    @abstractmethod
    def start(self, say: Say) -> None:
        """Makes a fresh state."""

    @abstractmethod
    def read(self, number: int) -> Any:
        """Returns the rows of update `number`, counted from 0, on the host."""

    @abstractmethod
    def update(self, number: int, batch: Any, /) -> tuple[StepMetrics, Mapping[str, Any]]:
        """Dispatches one update; returns its numbers on the device, and others by name."""

    def apply(
        self, step: TrainStep, batch: Any, rows: int | None = None
    ) -> tuple[StepMetrics, dict[str, float]]:
        """Applies one update to the state; returns its numbers and, with log.split_update, the seconds of its parts."""
        if not self.config.log.split_update:
            self.train_state, metrics = step(self.train_state, batch, rows, self.limits)
            return metrics, {}
        self.train_state, metrics, seconds = step.timed(self.train_state, batch, rows, self.limits)
        return metrics, {f"{name}_seconds": value for name, value in seconds.items()}

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        """Returns the numbers of one update by name, once they are on the host."""
        return named_numbers(metrics)

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluates the present parameters; empty if there is nothing to evaluate on."""

    def state(self) -> PyTree:
        """Returns the arrays that a checkpoint holds; those of the model are under "params"."""
        self.train_state = in_model_order(self.train_state, donate=True)
        return self.train_state

    @abstractmethod
    def host(self, done: int) -> dict[str, Any]:
        """Returns the JSON values that a checkpoint holds beside the arrays, after `done` updates."""

    @abstractmethod
    def abstract_state(self) -> PyTree:
        """Returns those arrays as shapes, dtypes and shardings."""

    @abstractmethod
    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        """Refuses, with ValueError, to continue from the checkpoint of that record, before its arrays are read."""

    @abstractmethod
    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        """Continues from the arrays and the record of a checkpoint."""

    def summary(self) -> dict[str, Any]:
        """Returns what summary.json contains about this kind of training."""
        return {"applied_updates": int(self.train_state.step)}

    def plot(self, directory: RunDirectory) -> None:
        """Draws what came of the run, where matplotlib is installed."""
        if find_spec("matplotlib"):
            plot_losses(directory.metrics, directory.picture)

    def prepare_end(self) -> Any:
        """Computes what the end needs from the devices, on every process; `finish` receives it."""
        return self.summary()

    def finish(self, run: Run, prepared: Any) -> dict[str, Any]:
        """Draws and writes what came of it, on process 0; returns what summary.json holds beside the common keys."""
        draw_or_say(lambda: self.plot(run.directory), run.say)
        return prepared

    def last_lines(self, directory: RunDirectory, summary: Mapping[str, Any]) -> Iterable[str]:
        """Returns the lines printed at the end of a finished run."""
        return where_it_lies(directory, summary)

    def close(self) -> None:  # noqa: B027
        """Releases what reads ahead; here nothing."""
