"""Checks which parameters a config trains: adapters, patterns, and how frozen parameters are stored. Plain Python."""

from __future__ import annotations

from typing import Any

from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.adapted import PATTERNS
from jaxfb.refusal import Refused


def check_trained(config: Any) -> None:
    """Refuses an empty list of patterns, adapters of a model that has none, and a dtype of no parameter.

    Raises:
      ValueError: one of these.
    """
    lora, patterns = getattr(config, "lora", None), config.trainable
    if patterns is not None and not patterns:
        raise Refused(
            "[config] trainable=[] would freeze every parameter; use trainable=null to train all",
            [{"trainable": None}],
        )
    if lora is not None and isinstance(config.model, OwnModelConfig):
        raise Refused(
            f"[lora] model.name={config.model.name!r}: adapters are for the built-in transformer alone; use lora=null, "
            "and trainable for the parameters of your own model that are to be trained",
            [{"lora": None}],
        )
    if config.precision.frozen_dtype is not None and trained_patterns(config) is None:
        raise Refused(
            f"[precision] frozen_dtype={config.precision.frozen_dtype}: no parameter is frozen without lora or "
            "trainable; use precision.frozen_dtype=null",
            [{"precision.frozen_dtype": None}],
        )


def trained_patterns(config: Any) -> tuple[str, ...] | None:
    """Returns patterns of the parameters that a config trains; None: all of them."""
    patterns = config.trainable
    if getattr(config, "lora", None) is None:
        return patterns
    return (*PATTERNS, *(patterns or ()))
