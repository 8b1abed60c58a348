"""The config of your own model in the trainer: `model: package.module:attribute` in place of sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxfb.config.checks import positive
from jaxfb.config.common import CommonConfig
from jaxfb.config.sections import BatchConfig, OptimizerConfig, RunConfig
from jaxfb.refusal import Refused


@dataclass(frozen=True)
class EveryConfig:
    """Evaluation by the user's own function.

    every: after so many updates, and at the end; null: at the end only.
    """

    every: int | None = None

    def __post_init__(self):
        positive("eval", every=self.every)


@dataclass(frozen=True, kw_only=True)
class CustomConfig(CommonConfig):
    """A run that trains your own model, on your own data.

    model:    "package.module:attribute": a loss function, a `Pipelined`, or a function without arguments that returns
      one; the working directory is searched too.
    params:   likewise a function of a PRNG key that returns the parameters, or the parameters themselves.
    data:     likewise arrays [rows, ...] in a tree, a sequence of rows, an iterable of rows, or a function without
      arguments that returns one of these.
    evaluate: likewise a function of the parameters that returns numbers by name; null: none.
    optimizer: as for the built-in model; null where a program hands an optax transformation to `jaxfb.Trainer`.
    """

    model: str
    params: str
    data: str
    evaluate: str | None = None
    batch: BatchConfig
    run: RunConfig
    optimizer: OptimizerConfig | None = None
    eval: EveryConfig = field(default_factory=EveryConfig)

    def __post_init__(self):
        super().__post_init__()
        if self.run.tokens is not None:
            raise Refused(
                "[run] tokens cannot be counted in rows of your own; use run.updates, samples or epochs",
                [{"run.tokens": None, f"run.{name}": 1} for name in ("updates", "samples", "epochs")],
            )


def refuse_own_model(config: Any, what: str, instead: str) -> None:
    """Refuses a config of your own model where `what` needs to know the model; `instead`: what to do."""
    if isinstance(config, CustomConfig):
        raise Refused(
            f"[model] {config.model} is a model of your own: {what} works for the built-in transformer alone; {instead}"
        )
