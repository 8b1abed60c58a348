"""Surrogates: what one token contributes to a policy loss. One frozen dataclass each, settings as fields.

Called by `PolicyLoss` with the tokens of a microbatch. With r = p / p_old of the token, A its advantage:

    surrogate(tokens, sequences) -> (loss per token float[rows, seq], {metric: Sum | Max | Min})

tokens: `log_probs` (differentiated), `old_log_probs`, `advantages`, all float[rows, seq], 0 where nothing counts.
The log-ratio is clamped to +-20 unless stated otherwise. Any such function is a surrogate; it must not
look across rows, and may name in `aggregation` the one it was derived with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.sequences import Sequences
from jaxfb.losses.settings import check_not_negative, check_number, check_positive, check_word
from jaxfb.parts import SURROGATES
from jaxfb.refusal import Refused, shown
from jaxfb.registry import OWN
from jaxfb.types import Sum


@dataclass(frozen=True)
class PPOClip:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0.

    PPO arXiv:1707.06347; unequal clips DAPO arXiv:2503.14476; dual clip arXiv:1912.09729 (None: none).
    Metrics: clip_fraction, dual_clip_fraction of the counted tokens.
    """

    aggregation: ClassVar[str] = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self):
        check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            check_number(
                "loss", "dual_clip", self.dual_clip, lambda x: x > 1, "above 1", "3.0, or None for none"
            )

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


@dataclass(frozen=True)
class GSPO:
    """PPO's clipped loss of the sequence's ratio s = exp(mean of log r over its tokens) (arXiv:2507.18071).

    The gradient reaches a token as s * d log p, so the mean over tokens is the sequence's own gradient. The log
    of s is clamped to at most 10. Metric: clip_fraction.
    """

    aggregation: ClassVar[str] = "seq-mean-token-mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self):
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        log_ratio = lax.stop_gradient(sequences.means(tokens.log_probs - tokens.old_log_probs))
        here = tokens.log_probs - lax.stop_gradient(tokens.log_probs)
        ratio = jnp.exp(jnp.minimum(log_ratio + here, 10))
        loss, clipped = clipped_loss(ratio, tokens.advantages, self.clip_low, self.clip_high)
        return loss, {"clip_fraction": fraction(clipped, sequences)}


@dataclass(frozen=True)
class GeometricMean:
    """GMPO: -A exp(mean of clipped log r), A and the mean of a sequence's tokens (arXiv:2507.20673).

    log r is clipped to [-clip_low, clip_high] where that lowers the objective; it is not clamped to +-20.
    Metrics: clip_fraction and clip_fraction_lower, the shares of counted tokens whose log r lies outside of the
    range, with A > 0 and with A < 0 (as verl counts them: also where the clip does not lower the objective).
    """

    aggregation: ClassVar[str] = "seq-mean-token-mean"
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self):
        for name in ("clip_low", "clip_high"):
            check_number("loss", name, getattr(self, name), lambda x: x > 0, "above 0", 0.4)

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        log_ratio, sign = tokens.log_probs - tokens.old_log_probs, jnp.sign(tokens.advantages)
        free, clipped = sign * log_ratio, sign * jnp.clip(log_ratio, -self.clip_low, self.clip_high)
        ratio = jnp.exp(sequences.means(sign * jnp.minimum(free, clipped)))
        outside = (log_ratio < -self.clip_low) | (log_ratio > self.clip_high)
        metrics = {
            "clip_fraction": fraction(outside & (tokens.advantages > 0), sequences),
            "clip_fraction_lower": fraction(outside & (tokens.advantages < 0), sequences),
        }
        return -sequences.means(tokens.advantages) * ratio, metrics


@dataclass(frozen=True)
class CISPO:
    """-clip(r) A log p, no gradient through the clipped ratio: no token loses its gradient (arXiv:2506.13585).

    Metric: clip_fraction, of tokens whose ratio lies outside.
    """

    aggregation: ClassVar[str] = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        ratio = lax.stop_gradient(jnp.exp(clamped_log_ratio(tokens)))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        metrics = {"clip_fraction": fraction(clipped != ratio, sequences)}
        return -clipped * tokens.advantages * tokens.log_probs, metrics


@dataclass(frozen=True)
class SAPO:
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of a clip (arXiv:2511.20347).

    tau is tau_pos where A > 0, else tau_neg.
    """

    aggregation: ClassVar[str] = "seq-mean-token-mean"
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self):
        check_positive("loss", 1.0, tau_pos=self.tau_pos, tau_neg=self.tau_neg)

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        ratio, advantages = jnp.exp(clamped_log_ratio(tokens)), tokens.advantages
        tau = jnp.where(advantages > 0, self.tau_pos, self.tau_neg).astype(ratio.dtype)
        return -advantages * (4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)), {}


@dataclass(frozen=True)
class Reinforce:
    """-A log p (Williams 1992): no old policy, no ratio. With the `gpg` advantages, GPG (arXiv:2504.02546)."""

    aggregation: ClassVar[str] = "token-mean"

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        return -tokens.advantages * tokens.log_probs, {}


@dataclass(frozen=True)
class DPPO:
    """-A min(r, truncation) log p where a trust region on probabilities allows it (arXiv:2602.04879).

    divergence: "tv", p - p_old of the token, or "kl", of the two outcomes token and not token. A token whose
    divergence exceeds its bound (high where A > 0, low elsewhere) on the side A pushes to contributes nothing.
    Metrics: clip_fraction (such tokens), truncated_fraction.
    """

    aggregation: ClassVar[str] = "token-mean"
    divergence: str = "tv"
    low: float = 0.15
    high: float = 0.15
    truncation: float = 20.0

    def __post_init__(self):
        check_word("loss", "divergence", self.divergence, ("tv", "kl"))
        for name in ("low", "high", "truncation"):
            check_number("loss", name, getattr(self, name), lambda x: x > 0, "above 0", getattr(DPPO, name))

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        allowed = lax.stop_gradient(self._allowed(tokens))
        ratio = lax.stop_gradient(jnp.exp(clamped_log_ratio(tokens)))
        loss = -tokens.advantages * jnp.minimum(ratio, self.truncation) * tokens.log_probs
        metrics = {
            "clip_fraction": fraction(~allowed, sequences),
            "truncated_fraction": fraction(allowed & (ratio > self.truncation), sequences),
        }
        return jnp.where(allowed, loss, 0), metrics

    def _allowed(self, tokens: Any) -> jax.Array:
        new, old = jnp.exp(tokens.log_probs), jnp.exp(tokens.old_log_probs)
        if self.divergence == "tv":
            up, down = new - old <= self.high, new - old >= -self.low
        else:
            rest = jnp.log((1 - old + 1e-8) / (1 - new + 1e-8))
            kl = old * (tokens.old_log_probs - tokens.log_probs) + (1 - old) * rest
            up, down = (kl <= self.high) | (new <= old), (kl <= self.low) | (new >= old)
        return jnp.where(tokens.advantages > 0, up, down)


@dataclass(frozen=True)
class DRO:
    """-A log p + beta / 2 (log r)^2: regression on one policy's samples, no clip (arXiv:2405.19107).

    The log-ratio is not clamped.
    """

    aggregation: ClassVar[str] = "token-mean"
    beta: float = 0.1

    def __post_init__(self):
        check_not_negative("loss", 0.1, beta=self.beta)

    def __call__(self, tokens: Any, sequences: Sequences) -> tuple[jax.Array, dict]:
        log_ratio = tokens.log_probs - tokens.old_log_probs
        return -tokens.advantages * tokens.log_probs + self.beta / 2 * log_ratio**2, {}


_COUPLED = ("clip_cov", "kl_cov")


def make_surrogate(name: str, **settings: Any) -> Callable:
    """Returns a surrogate by its name in `SURROGATES`, or "module:attribute": make_surrogate("ppo", clip_high=0.28).

    One of a user's own is a function (tokens, sequences), further arguments being settings, or a frozen dataclass.

    Raises:
      ValueError: an unknown name or setting, or a value out of range.
    """
    if isinstance(name, str) and name in _COUPLED:
        raise Refused(
            f"[loss] {name} picks its tokens by their covariance over a whole microbatch, so the update would change "
            'with the number of microbatches; use "ppo" with a higher clip_high, or an entropy bonus',
            [{"name": "ppo"}],
        )
    own = isinstance(name, str) and ":" in name
    if not own and (not isinstance(name, str) or name not in SURROGATES):
        raise Refused(
            f"[loss] policy loss {shown(name)} is not one of {', '.join(SURROGATES)}, nor your own as {OWN}",
            [{"name": one} for one in SURROGATES],
        )
    made: Callable[..., Any] = SURROGATES[name]
    known = _settings_of(made)
    for setting in settings:
        if setting not in known:
            raise Refused(f"[loss] {name} has no setting {setting!r}; it has {', '.join(known) or 'none'}")
    if isinstance(made, type):
        return made(**settings)
    return partial(made, **settings) if settings else made


def _settings_of(made: Any) -> list[str]:
    return [field.name for field in fields(made)] if is_dataclass(made) else [*signature(made).parameters][2:]


def clamped_log_ratio(tokens: Any) -> jax.Array:
    """Computes log p - log p_old, within +-20."""
    return jnp.clip(tokens.log_probs - tokens.old_log_probs, -20, 20)


def clipped_loss(
    ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Returns (max(-A r, -A clip(r)), bool: where the clip decides)."""
    free, clipped = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(free, clipped), clipped > free


def fraction(hit: jax.Array, sequences: Sequences) -> Sum:
    """Returns the share of counted tokens that are hit, as a metric."""
    mask = sequences.mask
    return Sum(lax.stop_gradient(sequences.total(hit.astype(mask.dtype))), mask.sum())


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless both are positive and 1 - clip_low is not negative; clip_high may be infinite."""
    why = "the distances from ratio 1 at which it is clipped"
    check_number("loss", "clip_low", clip_low, lambda x: 0 < x <= 1, f"in (0, 1], one of {why}", 0.2)
    check_number("loss", "clip_high", clip_high, lambda x: x > 0, f"above 0, one of {why}", 0.2)
