"""The whole config: the sections under one root, and the checks that need more than one of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxfb.config.common import CommonConfig
from jaxfb.config.model import ModelConfig
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.config.sections import (
    AutoMesh,
    BatchConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
)
from jaxfb.data.config import DataConfig
from jaxfb.models.adapted import LoRA
from jaxfb.refusal import Refused, shown


@dataclass(frozen=True, kw_only=True)
class Config(CommonConfig):
    """The settings of a training run.

    lora:     low-rank adapters to train in place of the model's own parameters; null: none.
    """

    model: ModelConfig | OwnModelConfig
    data: DataConfig
    batch: BatchConfig
    run: RunConfig
    optimizer: OptimizerConfig
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig | AutoMesh = field(default_factory=MeshConfig)
    lora: LoRA | None = None

    def __post_init__(self):
        object.__setattr__(self, "data", _with_tokenizer(self.data, getattr(self.model, "from_", None)))
        super().__post_init__()
        _check_learning_rate(self)
        _check_mixture(self)


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
            f"use lr.warmup={end - 1} or less",
            [{"lr.warmup": end - 1}],
        )
