"""Scales rotary frequencies, so that a model trained on short sequences reads longer ones. Plain Python: part of a
config.
config.
config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jaxfb.refusal import Refused


@dataclass(frozen=True)
class RopeScaling:
    """Lowers the rotary frequencies of a model for sequences longer than it was trained on.

    kind: "linear" divides every frequency by `factor` (arXiv:2306.15595); "llama3" divides the slow ones, keeps the
      fast ones and blends between (Llama 3.1); "yarn" does so by the number of turns within the original length and
      also scales the logits of attention (arXiv:2309.00071).
    factor: how many times longer sequences become.
    original_length: tokens of the sequences that the model was trained on; "llama3" and "yarn" need it.
    low_frequency_factor, high_frequency_factor: of "llama3", turns within the original length below which a
      frequency is divided by the whole factor, and above which it is kept.
    beta_slow, beta_fast: the same two bounds of "yarn".
    attention_factor: of "yarn", what queries and keys are each multiplied by; null: 0.1 ln(factor) + 1.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float | None = None

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn"):
            raise Refused(f"[model] rope_scaling.kind={self.kind!r} must be one of linear, llama3, yarn")
        if not 1 <= self.factor < math.inf:
            raise Refused(f"[model] rope_scaling.factor={self.factor} must be a number from 1 up; use 1")
        if self.kind != "linear" and not (self.original_length or 0) > 0:
            raise Refused(
                f"[model] rope_scaling.kind={self.kind} needs original_length, the tokens of a sequence in training; "
                "use 8192"
            )
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                raise Refused(
                    f"[model] rope_scaling.{low}={getattr(self, low)} must be above 0 and below "
                    f"{high}={getattr(self, high)}"
                )
