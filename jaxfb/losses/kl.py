"""Estimates how far the policy is from a reference, token by token, from the log-probs of sampled tokens.

Used in a policy loss (as a term) or, on the host, in the reward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.losses.settings import check_not_negative, check_positive, check_word
from jaxfb.refusal import Refused

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")


def kl_penalty(log_probs: jax.Array, ref_log_probs: jax.Array, estimator: str = "k3") -> jax.Array:
    """Estimates KL(policy || reference) at each sampled token, in nats: float[...] like its arguments.

    With d = log_probs - ref_log_probs (http://joschu.net/blog/kl-approx.html):

        k1   d                    unbiased, can be negative; its gradient has mean 0
        abs  |d|
        k2   d^2 / 2              gradient d: unbiased for the gradient of the KL
        k3   exp(-d) - 1 + d      unbiased, never negative; d clamped to +-20, the result to +-10
        k1+, k3+, abs+            that value with k2's gradient (straight through)

    Raises:
      ValueError: an unknown estimator.
    """
    check_kl_estimator(estimator)
    if estimator.endswith("+"):
        value = kl_values(jnp, log_probs - ref_log_probs, estimator[:-1])
        gradient = kl_values(jnp, log_probs - ref_log_probs, "k2")
        return lax.stop_gradient(value - gradient) + gradient
    return kl_values(jnp, log_probs - ref_log_probs, estimator)


def kl_values(numpy: ModuleType, difference, estimator: str):
    """Returns the estimators k1, abs, k2 and k3 of that difference, in jax.numpy or numpy."""
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return numpy.maximum(difference, -difference)  # the gradient of abs at 0 would be 1
    if estimator == "k2":
        return difference**2 / 2
    clamped = numpy.clip(difference, -20, 20)
    return numpy.clip(numpy.exp(-clamped) - 1 + clamped, -10, 10)


def check_kl_estimator(estimator: str) -> None:
    """Raises ValueError for a name that `kl_penalty` does not know."""
    check_word("loss", "kl_estimator", estimator, KL_ESTIMATORS)


def kl_in_reward(
    rewards: np.ndarray,
    log_probs: np.ndarray,
    ref_log_probs: np.ndarray,
    mask: np.ndarray,
    coefficient: float,
    estimator: str = "k1",
) -> tuple[np.ndarray, float]:
    """Returns (rewards - coefficient * KL at each counted token, mean over sequences of the mean KL of their tokens).

    On the host, over a whole rollout. All arrays [rows, seq]; `log_probs` are those of the sampling policy.
    The second number is what `AdaptiveKL.updated` takes.

    Raises:
      ValueError: an unknown estimator, a straight-through one (it has no meaning in a reward), or a coefficient
        that is not a number, negative or infinite.
    """
    check_kl_estimator(estimator)
    check_not_negative("reward", 0.0, coefficient=coefficient)
    if estimator.endswith("+"):
        raise Refused(
            f"[reward] {estimator=} only differs in its gradient, and a reward has none; use {estimator[:-1]!r}",
            [{"estimator": estimator[:-1]}],
        )
    counted = np.asarray(mask) != 0
    difference = np.where(counted, log_probs, 0.0) - np.where(counted, ref_log_probs, 0.0)
    kl = np.where(counted, kl_values(np, difference, estimator), 0.0)
    lengths = counted.sum(1)
    present = lengths > 0
    mean = (kl.sum(1)[present] / lengths[present]).mean() if present.any() else 0.0
    return np.asarray(rewards) - coefficient * kl, float(mean)


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that steers the KL to a target (arXiv:1909.08593, section 2.2). State of a run: save it.

    coefficient: the present one.
    target: nats a token.
    horizon: rows over which a lasting error of 20 % or more changes the coefficient by a fifth of itself; above a fifth
      of a rollout's rows, so that the coefficient stays positive.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self):
        check_not_negative("kl", 0.0, coefficient=self.coefficient)
        check_positive("kl", 6.0, target=self.target)
        check_positive("kl", 10_000, horizon=self.horizon)

    def updated(self, kl: float, rows: int) -> AdaptiveKL:
        """Returns the coefficient after a rollout of so many rows with that mean KL; a KL that is not finite changes
        nothing.

        Raises:
          ValueError: the horizon is too short for that many rows.
        """
        check_horizon(self.horizon, rows, "kl", "horizon")
        if not np.isfinite(kl):
            return self
        error = float(np.clip(kl / self.target - 1, -0.2, 0.2))
        return replace(self, coefficient=self.coefficient * (1 + error * rows / self.horizon))


def check_horizon(horizon: float, rows: int, who: str, key: str) -> None:
    """Refuses a horizon so short that one rollout of so many rows could leave nothing of the coefficient.

    key: what the caller calls the horizon.
    """
    if rows >= 5 * horizon:
        use = rows // 5 + 1
        raise Refused(
            f"[{who}] horizon={horizon:g} must be above a fifth of the {rows} rows of a rollout, or the "
            f"coefficient could become 0 or negative; use {key}={use} or more",
            [{key: use}],
        )
