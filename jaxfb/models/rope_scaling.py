"""Scales rotary frequencies, so that a model trained on short sequences reads longer ones. Plain Python: part of a
config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxfb.refusal import FLOAT32, Refused, boolean, choice, integer, number, shown

KINDS = ("linear", "llama3", "yarn", "longrope")
_WHO = "[model.rope_scaling]"


@dataclass(frozen=True)
class RopeScaling:
    """Lowers the rotary frequencies of a model for sequences longer than it was trained on.

    kind: "linear" divides every frequency by `factor` (arXiv:2306.15595); "llama3" divides the slow ones, keeps the
      fast ones and blends between (Llama 3.1); "yarn" does so by the number of turns within the original length and
      also scales the logits of attention (arXiv:2309.00071); "longrope" divides each by its own factor, of two lists
      (Phi-3 and Phi-4-mini, arXiv:2402.13753).
    factor: how many times longer sequences may be than those that the model was trained on.
    original_length: tokens of the sequences that the model was trained on; all but "linear" need it.
    low_frequency_factor: for "llama3", a frequency with fewer turns than this within the original length is divided by
      the whole factor.
    high_frequency_factor: for "llama3", a frequency with more turns than this within the original length is kept.
    beta_slow: for "yarn", as low_frequency_factor.
    beta_fast: for "yarn", as high_frequency_factor.
    truncate: for "yarn", the bounds are whole pairs; false leaves them between two (gpt-oss).
    attention_factor: for "yarn" and "longrope", what queries and keys are each multiplied by; null: 0.1 ln(factor) + 1,
      or for "longrope" sqrt(1 + ln(factor) / ln(original_length)).
    short_factors: for "longrope", what each frequency is divided by in a document of at most original_length tokens; a
      number for each pair that turns.
    long_factors: for "longrope", what each frequency is divided by in a longer document; a number for each pair.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

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
        for name in ("short_factors", "long_factors"):
            object.__setattr__(self, name, _factors(name, getattr(self, name)))
        self.check_pairs(len(self.short_factors))

    def check_pairs(self, pairs: int) -> None:
        """Refuses other numbers of factors than that of the pairs of a head that turn."""
        wanted = pairs if self.kind == "longrope" else 0
        if (len(self.short_factors), len(self.long_factors)) != (wanted, wanted):
            raise Refused(
                f"{_WHO} kind={self.kind} needs {wanted} short_factors and as many long_factors, got "
                f"{len(self.short_factors)} and {len(self.long_factors)}"
            )

    def of_length(self, length: int) -> RopeScaling:
        """Returns the scaling that every document has in which the longest has so many tokens."""
        if self.kind != "longrope":
            return self
        used = self.long_factors if length > (self.original_length or 0) else self.short_factors
        return replace(self, short_factors=used, long_factors=used)


def _factors(name: str, given: Any) -> tuple[float, ...]:
    if not isinstance(given, list | tuple):
        raise Refused(f"{_WHO} {name} must be a list of numbers, got {shown(given)}")
    return tuple(float(number(f"{name}[{place}]", one, who=_WHO, above=0)) for place, one in enumerate(given))
