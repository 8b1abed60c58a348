"""Weights for tokens that another program sampled: the sampler's probabilities are not quite the trainer's.

On the host, between the log-prob pass and the update: the leaf `rollout_weights` of a policy loss.
"""

from __future__ import annotations

import numpy as np

from jaxfb.losses.settings import check_number, check_word

LEVELS = ("token", "sequence", "geometric")


def rollout_weights(
    old_log_probs: np.ndarray,
    sampler_log_probs: np.ndarray,
    mask: np.ndarray,
    *,
    level: str = "token",
    upper: float = 2.0,
    lower: float | None = None,
    reject: bool = False,
) -> tuple[np.ndarray, dict[str, float]]:
    """Returns (weights float64[R, S], 0 where the mask is 0; statistics of them before truncation).

        token      p_old / p_sampler of the token, truncated to [lower, upper] (TIS; IMPALA, arXiv:1802.01561)
        sequence   its product over the tokens of the row, on each of them
        geometric  the geometric mean of it over the tokens of the row, on each of them

    reject: what lies outside [lower, upper] gets weight 0 instead, and counts as before in every denominator.

    Args:
      old_log_probs: float[R, S], of the policy before the update by the trainer's forward pass.
      sampler_log_probs: float[R, S], as the sampler reported them; the log-ratio is clamped to +-20.
      mask: float[R, S].
      upper: above 1; lower: below 1, or None for 0.
    Returns:
      The statistics are weight_mean, weight_max, weight_min and outside_fraction, over counted tokens, and
      sampler_kl, the k3 estimate of KL(sampler || old) in nats a token.
    Raises:
      ValueError: a setting is out of range.
    """
    check_word("rollout", "level", level, LEVELS)
    check_number("rollout", "upper", upper, lambda x: x > 1, "above 1", 2.0)
    if lower is not None:
        check_number("rollout", "lower", lower, lambda x: 0 <= x < 1, "in [0, 1)", "None for 0")
    counted = np.asarray(mask) != 0
    log_ratio = np.where(counted, old_log_probs, 0.0) - np.where(counted, sampler_log_probs, 0.0)
    log_ratio = np.clip(log_ratio.astype(np.float64), -20, 20)
    weights = np.where(counted, np.exp(_at_level(log_ratio, counted, level)), 0.0)
    low = 0.0 if lower is None else lower
    outside = counted & ((weights > upper) | (weights < low))
    kept = np.where(outside, 0.0, weights) if reject else np.clip(weights, low, upper)
    return np.where(counted, kept, 0.0), _statistics(weights, log_ratio, outside, counted)


def _at_level(log_ratio: np.ndarray, counted: np.ndarray, level: str) -> np.ndarray:
    if level == "token":
        return log_ratio
    total = log_ratio.sum(1, keepdims=True)
    total = total / np.maximum(counted.sum(1, keepdims=True), 1) if level == "geometric" else total
    return np.broadcast_to(np.clip(total, -20, 20), log_ratio.shape)


def _statistics(weights, log_ratio, outside, counted) -> dict[str, float]:
    there = counted.any()
    weights, log_ratio, outside = (
        x[counted] if there else np.zeros(1) for x in (weights, log_ratio, outside)
    )
    return {
        "weight_mean": float(weights.mean()),
        "weight_max": float(weights.max()),
        "weight_min": float(weights.min()),
        "outside_fraction": float(outside.mean()),
        "sampler_kl": float((np.exp(log_ratio) - 1 - log_ratio).mean()),
    }
