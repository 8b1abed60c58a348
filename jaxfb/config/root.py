"""The whole config: the sections under one root, and the checks that need more than one of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxfb.config.adapters import check_trained
from jaxfb.config.guard import GuardConfig, check_rollback
from jaxfb.config.model import ModelConfig
from jaxfb.config.operation import CheckpointConfig, HostsConfig, LogConfig
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.config.sections import (
    AutoMesh,
    BatchConfig,
    EvalConfig,
    LearningRateConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    check_pipeline,
)
from jaxfb.data.config import DataConfig
from jaxfb.models.adapted import LoRA
from jaxfb.refusal import Refused, shown


@dataclass(frozen=True)
class Config:
    """The settings of a training run.

    schedule: of the pipeline, where mesh.pipe > 1: a name of `jaxfb schedule --compare`, or "package.module:function";
      null is 1f1b, or interleaved with several chunks.
    chunks:   parts of the model on each stage.
    lora:     low-rank adapters to train in place of the model's own parameters; null: none.
    trainable: patterns of dotted names of the parameters that are trained, such as ["layers.attention.*", "*.bias"];
      `*` stands for dots too, and a name for all below it. The others are frozen. null: all are trained, or with
      `lora` the adapters alone, to which these are added.
    plugins:  modules that are imported before the config is checked, for the parts of your own that they register.
    """

    model: ModelConfig | OwnModelConfig
    data: DataConfig
    batch: BatchConfig
    run: RunConfig
    optimizer: OptimizerConfig
    lr: LearningRateConfig = field(default_factory=LearningRateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig | AutoMesh = field(default_factory=MeshConfig)
    schedule: str | None = None
    chunks: int = 1
    lora: LoRA | None = None
    trainable: tuple[str, ...] | None = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    plugins: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "data", _with_tokenizer(self.data, getattr(self.model, "from_", None)))
        check_pipeline(self.mesh, self.schedule, self.chunks)
        check_rollback(self.guard, self.checkpoint.every)
        _check_learning_rate(self)
        _check_mixture(self)
        check_trained(self)


def _with_tokenizer(data: DataConfig, source: str | None) -> DataConfig:
    """Returns the settings with the tokenizer of the model that the run begins with, unless they name another.

    Raises:
      ValueError: that model has none, and there is text to be read.
    """
    if source is None or data.tokenizer != "bpe":
        return data
    file = Path(source) / "tokenizer.json"
    if os.path.isfile(file):  # unlike pathlib's, False for what cannot be a name
        return replace(data, tokenizer=str(file))
    if all(one.source == "tokens" for one in (data.mixture.values() or [data])):
        return data
    raise Refused(
        f"[data] {shown(source)} has no tokenizer.json, and a tokenizer that is trained on the text would not "
        "give the ids of the model; use data.tokenizer=path/to/tokenizer.json, or data.source=tokens"
    )


def _check_mixture(config: Config) -> None:
    if config.data.mixture and config.run.epochs is not None:
        raise Refused(
            f"[run] epochs={config.run.epochs}: the sources of a mixture end at different times; use "
            "run.updates or run.tokens"
        )


def _check_learning_rate(config: Config) -> None:
    peak = config.optimizer.learning_rate
    for name in ("initial", "final"):
        if getattr(config.lr, name) > peak:
            raise Refused(
                f"[lr] {name}={getattr(config.lr, name)} is above optimizer.learning_rate={peak}, the peak; "
                f"use at most {peak}",
                [{f"lr.{name}": peak}],
            )
    end = config.lr.total or (config.run.updates if config.lr.unit == "updates" else None)
    if end is not None and config.lr.warmup >= end:
        raise Refused(
            f"[lr] warmup={config.lr.warmup} must be below the {end} {config.lr.unit} it is part of; "
            f"use at most {end - 1}",
            [{"lr.warmup": end - 1}],
        )
