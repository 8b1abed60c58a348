"""Next-token prediction: what the transformer's head returns for one microbatch.

Used inside forward_backward, once per microbatch; it returns sums and weights, the engine divides.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfb.losses.cross_entropy import CrossEntropy, chunked_cross_entropy
from jaxfb.types import LossOutput, Sum

OUTPUTS = (None, "tokens", "rows")


def next_token_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    microbatch: Mapping[str, jax.Array],
    *,
    chunk: int = 1024,
    outputs: str | None = None,
    axis: str | None = None,
) -> LossOutput:
    """Cross entropy of each position's prediction against `microbatch["targets"]`, which are already shifted.

    Args:
      hidden: float[rows, seq, width], normalised output of the last layer.
      kernel: float[width, vocab/tensor].
      microbatch: `targets` i32[rows, seq], `loss_mask` float[rows, seq].
      chunk: tokens whose logits exist at one time.
      outputs: None; "tokens" for {"log_probs": f32[rows, seq]}; "rows" for {"log_prob": f32[rows],
        "weight": f32[rows]}, the masked sums of each row.
      axis: a manual mesh axis over which `kernel` is cut by vocabulary as well.
    Returns:
      LossOutput with the term "cross_entropy" (nats) and the metric "accuracy", both weighted by the mask.
    """
    if outputs not in OUTPUTS:
        raise ValueError(f"[loss] {outputs=} must be one of {', '.join(map(repr, OUTPUTS))}")
    mask = microbatch["loss_mask"].astype(jnp.promote_types(hidden.dtype, jnp.float32))
    result = chunked_cross_entropy(hidden, kernel, microbatch["targets"], mask, chunk=chunk, axis=axis)
    weight = jnp.sum(mask)
    return LossOutput(
        terms={"cross_entropy": Sum(result.loss_sum, weight)},
        metrics={"accuracy": Sum(result.correct_sum, weight)},
        outputs=_outputs(result, mask, outputs),
    )


def _outputs(result: CrossEntropy, mask: jax.Array, outputs: str | None):
    if outputs == "tokens":
        return {"log_probs": result.log_probs}
    if outputs == "rows":
        return {"log_prob": jnp.sum(mask * result.log_probs, axis=1), "weight": jnp.sum(mask, axis=1)}
    return None
