"""Aggregates per-token losses to one Sum: which mean of the global batch is the objective.

The last step of a post-training loss inside forward_backward. Nothing is divided by what a microbatch counted: the
weights are added up over the global batch, so the objective does not depend on how it was split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfb.losses.sequences import Sequences
from jaxfb.losses.settings import check_positive, check_word
from jaxfb.refusal import Refused, shown
from jaxfb.types import Sum

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def aggregate(
    per_token: jax.Array,
    sequences: Sequences,
    aggregation: str = "token-mean",
    *,
    scale: float | None = None,
) -> Sum:
    """Returns the Sum whose value, over the global batch, is the mean that `aggregation` names.

    With l the losses, m the mask, N = sum of m, B = sequences with a counted token, n_i = tokens of sequence i:

        token-mean               sum(m l) / N                  DAPO, arXiv:2503.14476
        token-sum                sum(m l), divided by nothing
        seq-mean-token-sum       sum(m l) / B
        seq-mean-token-mean      sum_i (sum(m l)_i / n_i) / B  GRPO, arXiv:2402.03300
        seq-mean-token-sum-norm  sum(m l) / (B scale)          Dr. GRPO, arXiv:2503.20783

    A sequence is a row, or a segment of one where rows are packed. Sequences without a counted token are not
    in B, and what they or masked slots hold (NaN) is inert.

    Args:
      per_token: float[rows, seq].
      sequences: which tokens count, and in which sequence.
      scale: the constant of seq-mean-token-sum-norm, such as the largest response length; nothing else takes it.
    Raises:
      ValueError: an unknown aggregation, or a scale missing or out of place.
    """
    check_aggregation(aggregation, scale)
    if aggregation == "seq-mean-token-mean":
        lengths = sequences.lengths()
        per_token = per_token / jnp.where(lengths > 0, lengths, 1)
    total = sequences.total(per_token)
    if aggregation == "token-sum":
        return Sum(total, None)
    if aggregation == "token-mean":
        return Sum(total, sequences.mask.sum())
    return Sum(total if scale is None else total / scale, sequences.number())


def check_aggregation(aggregation: str, scale: float | None) -> None:
    """Raises the ValueError of `aggregate`."""
    check_word("loss", "aggregation", aggregation, AGGREGATIONS)
    if aggregation == "seq-mean-token-sum-norm":
        if scale is None:
            raise Refused(
                f"[loss] seq-mean-token-sum-norm needs a positive constant scale, got {scale!r}: padded widths "
                "differ between microbatches; use the largest response length"
            )
        check_positive("loss", "the largest response length", scale=scale)
    elif scale is not None:
        raise Refused(
            f'[loss] scale={shown(scale)} belongs to "seq-mean-token-sum-norm", {aggregation!r} takes none'
        )
