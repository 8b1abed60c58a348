"""Scales rotary frequencies, so that a model trained on short sequences reads longer ones. Plain Python: part of a
config.
config.
config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxfb.refusal import FLOAT32, Refused, boolean, choice, integer, number

KINDS = ("linear", "llama3", "yarn")
_WHO = "[model.rope_scaling]"


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
    truncate: of "yarn", the bounds are whole pairs; false leaves them between two (gpt-oss).
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
    truncate: bool = True

    def __post_init__(self):
        choice("kind", self.kind, KINDS, who=_WHO)
        number("factor", self.factor, who=_WHO, least=1)
        if self.original_length is not None:
            integer("original_length", self.original_length, who=_WHO)
        elif self.kind != "linear":
            raise Refused(
                f"{_WHO} kind={self.kind} needs original_length, the tokens of a sequence in training; use 8192",
                [{"original_length": 8192}],
            )
        boolean("truncate", self.truncate, who=_WHO)
        if self.attention_factor is not None:
            number("attention_factor", self.attention_factor, who=_WHO, above=0, most=FLOAT32)
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            most = number(high, getattr(self, high), who=_WHO, above=0)
            number(low, getattr(self, low), who=_WHO, above=0, below=float(most))
