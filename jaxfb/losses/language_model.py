"""Next-token prediction: what the transformer's head returns for one microbatch.

Used inside forward_backward, once per microbatch; it returns sums and weights, the engine divides.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxfb.losses.cross_entropy import CrossEntropy, chunked_cross_entropy
from jaxfb.losses.settings import check_not_negative, check_number
from jaxfb.refusal import Refused
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
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
) -> LossOutput:
    """Computes cross entropy of each position's prediction against `microbatch["targets"]`, which are already shifted.

    Args:
      hidden: float[rows, seq, width], normalised output of the last layer.
      kernel: float[width, vocab/tensor].
      microbatch: `targets` i32[rows, seq], `loss_mask` float[rows, seq].
      chunk: tokens whose logits exist at one time.
      outputs: None; "tokens" for {"log_probs": f32[rows, seq]}; "rows" for {"log_prob": f32[rows],
        "weight": f32[rows]}, the masked sums of each row.
      axis: a manual mesh axis over which `kernel` is cut by vocabulary as well.
      label_smoothing: share of each target that is spread evenly over the whole vocabulary (arXiv:1512.00567).
      z_loss: coefficient of the squared log normalizer (PaLM, arXiv:2204.02311), such as 1e-4.
      logit_softcap: logits become softcap * tanh(logits / softcap); None leaves them.
    Returns:
      LossOutput with the term "cross_entropy" (nats) and the metric "accuracy", both weighted by the mask.
      Smoothing and z-loss are separate terms, "label_smoothing" (what it adds to the cross entropy) and
      "z_loss", so that "cross_entropy" is that of the targets in any case. With either of them the backward
      computes the logits once more.
    Raises:
      ValueError: outputs, label_smoothing, z_loss or logit_softcap is out of range.
    """
    check_regularizers(label_smoothing, z_loss, logit_softcap)
    if outputs not in OUTPUTS:
        raise Refused(f"[loss] {outputs=} must be one of {', '.join(map(repr, OUTPUTS))}")
    mask = microbatch["loss_mask"].astype(jnp.promote_types(hidden.dtype, jnp.float32))
    result = chunked_cross_entropy(
        hidden, kernel, microbatch["targets"], mask, chunk=chunk, axis=axis,
        logit_softcap=logit_softcap, regularizers=label_smoothing > 0 or z_loss > 0,
    )  # fmt: skip
    weight = jnp.sum(mask)
    terms = {"cross_entropy": Sum(result.loss_sum, weight)}
    if label_smoothing > 0 and result.smoothing_sum is not None:
        terms["label_smoothing"] = Sum(label_smoothing * result.smoothing_sum, weight)
    if z_loss > 0 and result.z_sum is not None:
        terms["z_loss"] = Sum(z_loss * result.z_sum, weight)
    return LossOutput(
        terms=terms,
        metrics={"accuracy": Sum(result.correct_sum, weight)},
        outputs=_outputs(result, mask, outputs),
    )


def check_regularizers(label_smoothing: float, z_loss: float, logit_softcap: float | None) -> None:
    """Raises ValueError for a value that `next_token_loss` cannot take."""
    rule = "at least 0 and below 1"
    check_number("loss", "label_smoothing", label_smoothing, lambda x: 0 <= x < 1, rule, "0 for none")
    check_not_negative("loss", "0 for none", z_loss=z_loss)
    if logit_softcap is not None:
        is_cap = lambda x: 0 < x < float("inf")  # noqa: E731
        check_number("loss", "logit_softcap", logit_softcap, is_cap, "positive", "None for no cap")


def _outputs(result: CrossEntropy, mask: jax.Array, outputs: str | None):
    if outputs == "tokens":
        return {"log_probs": result.log_probs}
    if outputs == "rows":
        return {"log_prob": jnp.sum(mask * result.log_probs, axis=1), "weight": jnp.sum(mask, axis=1)}
    return None
