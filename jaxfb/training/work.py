"""Defines the interface between the one training loop and each kind of training.

Pretraining, fine-tuning, preferences and rollouts are each a `Work`. The loop (`loop.py`) owns what they share: several
hosts, signals, checkpoints and resuming, the guard, logging, callbacks and evaluation at the right updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jaxfb.update.train_state import Limits
from jaxfb.update.train_step import StepMetrics, TrainState

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxfb.training.run_dir import RunDirectory
    from jaxfb.training.session import Run

PyTree = Any
Say = Callable[[str], None]
Table = tuple[str, Iterable[tuple[str, Any]]]


class Work(Protocol):
    """The interface of one kind of training.

    config:         with sections run, eval, checkpoint and log.
    command:        the subcommand that runs it, such as "train".
    mesh:           the devices.
    total:          updates of the whole run.
    tokenizer:      is saved with the run; None where there is no text.
    say:            prints a line above the progress; the loop sets it.
    limits:         with which the next update is applied, None for any; the guards set it.
    train_state:    what the next update reads; the guards put an earlier one back.
    starts_with_evaluation: the untrained parameters are evaluated and saved before the first update.
    in_program:     it has parts that a program made, so that no command can continue it.
    """

    @property
    def config(self) -> Any: ...

    @property
    def command(self) -> str: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def total(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    say: Say
    limits: Limits | None
    train_state: TrainState

    @property
    def starts_with_evaluation(self) -> bool: ...

    @property
    def in_program(self) -> bool: ...

    @property
    def abstract_params(self) -> PyTree:
        """Returns a tree with the structure of the parameters, for the names of leaves."""
        ...

    @property
    def flops_per_token(self) -> float | None:
        """Returns the operations of one token, forward and backward; None where they are not known."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Returns what must be the same on every process of the job: rows, plans, devices."""
        ...

    def tables(self) -> Iterable[Table]:
        """Returns titles and tables of what was decided, printed at the start."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as plain values: plan.json, and what a resumed run is compared with."""
        ...

    def write_start(self, directory: RunDirectory) -> None:
        """Writes what the run directory holds of this kind from the start, on process 0."""
        ...

    def start(self, say: Say) -> None:
        """Makes a fresh state."""
        ...

    def read(self, number: int) -> Any:
        """Returns the rows of update `number`, counted from 0, on the host."""
        ...

    def update(self, number: int, batch: Any, /) -> tuple[StepMetrics, Mapping[str, Any]]:
        """Dispatches one update; returns its numbers on the device, and others by name."""
        ...

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        """Returns the numbers of one update by name, once they are on the host."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present parameters; empty if there is nothing to evaluate on."""
        ...

    def state(self) -> PyTree:
        """Returns the arrays that a checkpoint holds; those of the model are under "params"."""
        ...

    def host(self, done: int) -> dict[str, Any]:
        """Returns the JSON values that a checkpoint holds beside the arrays, after `done` updates."""
        ...

    def abstract_state(self) -> PyTree:
        """Returns those arrays as shapes, dtypes and shardings."""
        ...

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        """Refuses, with ValueError, to continue from the checkpoint of that record, before its arrays are read."""
        ...

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        """Continues from the arrays and the record of a checkpoint."""
        ...

    def prepare_end(self) -> Any:
        """Computes what the end needs from the devices, on every process; `finish` receives it."""
        ...

    def finish(self, run: Run, prepared: Any) -> dict[str, Any]:
        """Draws and writes what came of it, on process 0; returns what summary.json holds beside the common keys."""
        ...

    def last_lines(self, directory: RunDirectory, summary: Mapping[str, Any]) -> Iterable[str]:
        """Returns the lines printed at the end of a finished run."""
        ...

    def close(self) -> None:
        """Releases what reads ahead."""
        ...
