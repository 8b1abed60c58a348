"""Surrogates: what one token contributes to a policy loss. One frozen dataclass each, settings as fields.

Called by `PolicyLoss` with the tokens of a microbatch. With r = p / p_old of the token, A its advantage:

    surrogate(tokens, sequences) -> (loss per token float[rows, seq], {metric: Sum | Max | Min})

tokens: `log_probs` (differentiated), `old_log_probs`, `advantages`, all float[rows, seq], 0 where nothing counts.
The log-ratio is clamped to +-20. A surrogate of one's own is any such function; it must not look across rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.sequences import Sequences
from jaxfb.types import Sum


@dataclass(frozen=True)
class PPOClip:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0.

    PPO arXiv:1707.06347; unequal clips DAPO arXiv:2503.14476; dual clip arXiv:1912.09729 (None: none).
    Metrics: clip_fraction, dual_clip_fraction of the counted tokens.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self):
        check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"[loss] dual_clip={self.dual_clip} must be above 1; None is no dual clip")

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        advantages, ratio = tokens.advantages, jnp.exp(clamped_log_ratio(tokens))
        loss, clipped = clipped_loss(ratio, advantages, self.clip_low, self.clip_high)
        metrics = {"clip_fraction": fraction(clipped, sequences)}
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            beyond = (advantages < 0) & (loss > bound)
            loss = jnp.where(advantages < 0, jnp.minimum(bound, loss), loss)
            metrics["dual_clip_fraction"] = fraction(beyond, sequences)
        return loss, metrics


def clamped_log_ratio(tokens: Any) -> jax.Array:
    """log p - log p_old, within +-20."""
    return jnp.clip(tokens.log_probs - tokens.old_log_probs, -20, 20)


def clipped_loss(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """(max(-A r, -A clip(r)), bool: where the clip decides)."""
    free, clipped = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(free, clipped), clipped > free


def fraction(hit: jax.Array, sequences: Sequences) -> Sum:
    """The share of counted tokens that are hit, as a metric."""
    mask = sequences.mask
    return Sum(lax.stop_gradient(sequences.total(hit.astype(mask.dtype))), mask.sum())


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless both are positive and 1 - clip_low is not negative."""
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"[loss] {clip_low=} must be in (0, 1] and {clip_high=} positive: they are distances from ratio 1"
        )
