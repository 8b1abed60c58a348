"""Supervised fine-tuning: cross entropy of the response's tokens, with any aggregation.

Used in the head of forward_backward through `policy_loss_fn`. The data decide what a response is: `loss_mask` is 1
where the target token is one that the model is to learn to write. `next_token_loss`, the pretraining loss of every
model here, is the same with "token-mean" and makes its gradient in one pass: prefer it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxfb.losses.aggregation import aggregate, check_aggregation
from jaxfb.losses.policy import mean_metric
from jaxfb.losses.sequences import Sequences
from jaxfb.types import LossOutput


@dataclass(frozen=True)
class SFTLoss:
    """Computes -log p of each counted target, aggregated.

    "seq-mean-token-mean" gives short and long answers equal weight.

    Returns LossOutput with the term "cross_entropy" and the metrics nll and policy_entropy, means over tokens.
    """

    aggregation: str = "seq-mean-token-mean"
    scale: float | None = None

    def __post_init__(self):
        check_aggregation(self.aggregation, self.scale)

    def __call__(
        self, log_probs: jax.Array, entropy: jax.Array, microbatch: Mapping[str, jax.Array]
    ) -> LossOutput:
        sequences = Sequences.of(microbatch)
        metrics = {
            "nll": mean_metric(-log_probs, sequences),
            "policy_entropy": mean_metric(entropy, sequences),
        }
        return LossOutput(
            {"cross_entropy": aggregate(-log_probs, sequences, self.aggregation, scale=self.scale)}, metrics
        )
