"""The config of your own model in the trainer: `model: package.module:attribute` in place of sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxfb.config.adapters import check_trained
from jaxfb.config.checks import positive
from jaxfb.config.guard import GuardConfig, check_rollback
from jaxfb.config.operation import CheckpointConfig, HostsConfig, LogConfig
from jaxfb.config.sections import (
    BatchConfig,
    LearningRateConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    check_pipeline,
)
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
class CustomConfig:
    """A run that trains your own model, on your own data.

    model:    "package.module:attribute": a loss function, a `Pipelined`, or a function without arguments that returns
      one; the working directory is searched too.
    params:   likewise a function of a PRNG key that returns the parameters, or the parameters themselves.
    data:     likewise arrays [rows, ...] in a tree, a sequence of rows, an iterable of rows, or a function without
      arguments that returns one of these.
    evaluate: likewise a function of the parameters that returns numbers by name; null: none.
    optimizer: as for the built-in model; null where a program hands an optax transformation to `jaxfb.Trainer`.
    schedule: of the pipeline, where mesh.pipe > 1; null is 1f1b, or interleaved with several chunks.
    chunks:   parts of the model on each stage.
    trainable: patterns of dotted names of the parameters that are trained, such as ["layers.attention.*", "*.bias"];
      `*` stands for dots too, and a name for all below it. The others are frozen. null: all are trained.
    plugins:  modules that are imported before the config is checked, for the parts of your own that they register.
    """

    model: str
    params: str
    data: str
    evaluate: str | None = None
    batch: BatchConfig
    run: RunConfig
    optimizer: OptimizerConfig | None = None
    lr: LearningRateConfig = field(default_factory=LearningRateConfig)
    eval: EveryConfig = field(default_factory=EveryConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: str | None = None
    chunks: int = 1
    trainable: tuple[str, ...] | None = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(keep_best=None))
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    plugins: tuple[str, ...] = ()

    def __post_init__(self):
        check_pipeline(self.mesh, self.schedule, self.chunks)
        check_trained(self)
        check_rollback(self.guard, self.checkpoint.every)
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
