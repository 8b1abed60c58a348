"""Low-rank adapters in plain Python: their settings, and the sizes of a transformer that has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.config_checks import check_rate
from jaxfb.refusal import FLOAT32, INT32, Refused, integer, is_several, number, shown

A, B = "lora_a", "lora_b"
ADAPTERS = "adapters"
"""The name, among the arrays of experts, of their adapters."""
EXPERTS = ("gate", "up", "down")
PATTERNS = (f"*.{A}", f"*.{B}")
"""The parameters of adapters, as patterns of `trainable`."""
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (arXiv:2106.09685): targets compute x @ kernel + alpha / rank * (x @ A) @ B, and only A and B
    are trained, and whatever `trainable` names in addition. A is drawn from the run's seed, B is zero at the start.

    rank:    columns of A and rows of B.
    alpha:   the adapters' output is multiplied by alpha / rank.
    targets: what has an adapter in each layer: names of projections, or patterns of dotted names such as "attention.*".
             Experts, each of which has its own adapter, by patterns alone: "experts.*", "experts.down". A target
             that the model does not have is refused, even a default one; the defaults are for dense layers: a model
             without an MLP beside its experts needs [query, key, value, output].
    dropout: rate on what an adapter reads, drawn per row; 0 for none, which adapters of experts need.
    adapter: a directory in PEFT's format, of the same rank, alpha and targets, to begin with; null: new adapters.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = PROJECTIONS
    dropout: float = 0.0
    adapter: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "targets", _checked_targets(self.targets))
        integer("rank", self.rank, who="[lora]", most=INT32)
        number("alpha", self.alpha, who="[lora]", most=FLOAT32)
        if not self.alpha > 0:
            raise Refused(
                f"[lora] alpha={self.alpha} must be positive; use {2.0 * self.rank}",
                [{"alpha": 2.0 * self.rank}],
            )
        number("dropout", self.dropout, who="[lora]", least=0, most=FLOAT32)
        check_rate("dropout", self.dropout, who="[lora]")
        if self.adapter is not None:
            object.__setattr__(self, "adapter", os.path.expanduser(self.adapter))

    @property
    def scale(self) -> float:
        """Returns what an adapter's output is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Returns whether the projection of that dotted name below its layer, "attention.query", is a target."""
        above, _, last = name.rpartition(".")
        short = f"experts.{last}" if above.endswith("experts") else last
        return any(fnmatchcase(short, target) or fnmatchcase(name, target) for target in self.targets)


def _checked_targets(given: Any) -> tuple[str, ...]:
    """Returns names and patterns as a tuple; refuses what is not a list of strings, and none."""
    targets = tuple(given) if is_several(given) else ()
    if targets and all(isinstance(one, str) and one for one in targets):
        return targets
    use = [given] if isinstance(given, str) and given else ["query", "value"]
    raise Refused(
        f"[lora] targets must be a list of names of projections, or patterns, and not empty, got {shown(given)}; use "
        f"targets={use}",
        [{"targets": use}],
    )


@dataclass(frozen=True)
class AdaptedConfig(TransformerConfig):
    """A `TransformerConfig` of a model with adapters."""

    lora: LoRA = field(default_factory=LoRA, kw_only=True)


def lora_of(config: TransformerConfig) -> LoRA | None:
    """Returns the settings of a model's adapters; None where it has none."""
    return config.lora if isinstance(config, AdaptedConfig) else None


def adapted(config: TransformerConfig, lora: LoRA | None) -> TransformerConfig:
    """Returns the sizes of the same model with these adapters, or without any."""
    sizes = {name: value for name, value in vars(config).items() if name != "lora"}
    return TransformerConfig(**sizes) if lora is None else AdaptedConfig(**sizes, lora=lora)


def draws(config: TransformerConfig) -> bool:
    """Returns whether the model drops something in training."""
    lora = lora_of(config)
    return config.dropout > 0 or (lora is not None and lora.dropout > 0)


def made(sizes: Mapping[str, Any]) -> TransformerConfig:
    """Returns the config of these fields, one with adapters where they name `lora`."""
    return AdaptedConfig(**sizes) if sizes.get("lora") is not None else TransformerConfig(**sizes)
