"""The keys that configs of every kind of training have: how work is laid out, recorded, saved and guarded."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxfb.config.adapters import check_trained
from jaxfb.config.guard import GuardConfig, check_rollback
from jaxfb.config.operation import CheckpointConfig, HostsConfig, LogConfig
from jaxfb.config.sections import (
    LearningRateConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
    check_pipeline,
)


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """The settings of a run whatever it trains.

    schedule: the pipeline's schedule, where mesh.pipe > 1: a name of `jaxfb schedule --compare`, or
      "package.module:function"; null is 1f1b, or interleaved with several chunks.
    chunks:   stages that each device of the pipe axis holds.
    trainable: patterns of dotted names of the parameters that are trained, such as ["layers.attention.*", "*.bias"];
      `*` also matches dots, and the name of a subtree selects everything below it. The others are frozen. null: all
      are trained, or with `lora` the adapters alone, to which these are added.
    plugins:  modules that are imported before the config is checked, for the parts of your own that they register.
    """

    lr: LearningRateConfig = field(default_factory=LearningRateConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    schedule: str | None = None
    chunks: int = 1
    trainable: tuple[str, ...] | None = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    plugins: tuple[str, ...] = ()

    def __post_init__(self):
        check_pipeline(self.mesh, self.schedule, self.chunks)
        check_trained(self)
        check_rollback(self.guard, self.checkpoint.every)
