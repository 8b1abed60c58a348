"""The ways in which layers of published families differ from Llama's, checked once. Plain Python: part of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxfb.refusal import FLOAT32, Refused, boolean, choice, number

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "clamped_silu")
NORMS = ("pre", "post", "both")
QK_NORM_OVER = ("head", "token")
_WHO = "[model.variant]"


@dataclass(frozen=True)
class Variant:
    """Changes the layers, which are otherwise Llama's.

    activation: activation of an MLP's gate, which multiplies the other half: "silu", "gelu_tanh" (Gemma), "gelu", or
      "clamped_silu" (gpt-oss): x sigmoid(1.702 x) with x at most 7, times 1 + the other half between -7 and 7.
    norms: "pre": attention and MLP read a normalised residual stream; "post": what they add to it is normalised
      (OLMo 2); "both" (Gemma 2).
    norm_offset: RMSNorm multiplies by 1 + its scale (Gemma).
    qk_norm_over: with qk_norm, the mean of squares is that of each "head" (Qwen3), or of a "token", all of its heads
      together (OLMo 2).
    embedding_scale: hidden states begin as the embedding times this (Gemma); null: as the embedding.
    attention_scale: what products of queries and keys are multiplied by; null: head_size ** -0.5.
    attention_softcap: those products become softcap * tanh(products / softcap) (Gemma 2); null leaves them.
    attention_sinks: each head has a score of a key that is not there, and whose value is 0 (gpt-oss).
    rotary_share: part of each head that rotary positions turn, its first numbers (Phi-4-mini).
    output_bias: a bias on attention's output projection.
    mlp_bias: biases on the projections of the MLP, or of every expert and of the router.
    """

    activation: Literal["silu", "gelu_tanh", "gelu", "clamped_silu"] = "silu"
    norms: Literal["pre", "post", "both"] = "pre"
    norm_offset: bool = False
    qk_norm_over: Literal["head", "token"] = "head"
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    rotary_share: float = 1.0
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        choice("activation", self.activation, ACTIVATIONS, who=_WHO)
        choice("norms", self.norms, NORMS, who=_WHO)
        choice("qk_norm_over", self.qk_norm_over, QK_NORM_OVER, who=_WHO)
        for name in ("norm_offset", "attention_sinks", "output_bias", "mlp_bias"):
            boolean(name, getattr(self, name), who=_WHO)
        for name in ("embedding_scale", "attention_scale", "attention_softcap"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), who=_WHO, above=0, most=FLOAT32)
        number("rotary_share", self.rotary_share, who=_WHO, above=0, most=1)

    @property
    def norms_of_layer(self) -> int:
        """Returns how many norms of the residual stream's width a layer has."""
        return 4 if self.norms == "both" else 2

    @property
    def has_plain_scores(self) -> bool:
        """Returns whether attention has neither a soft cap nor sinks."""
        return self.attention_softcap is None and not self.attention_sinks

    def rotary_size(self, head_size: int) -> int:
        """Returns how many numbers of a head turn.

        Raises:
          ValueError: they are not pairs.
        """
        size = int(head_size * self.rotary_share + 1e-6)  # 44 * (30 / 44) is a little less than 30
        if size % 2 or not size:
            near = max(2, size + size % 2) / head_size
            raise Refused(
                f"{_WHO} rotary_share={self.rotary_share} of head_size={head_size} turns {size} numbers of each "
                f"head, which must be pairs; use rotary_share={near}",
                [{"rotary_share": near}],
            )
        return size
