"""Policy losses: what a token contributes to the policy gradient, and the whole objective of a policy update.

Used in the head of forward_backward through `policy_loss_fn`. A surrogate gives what one token contributes; a
`PolicyLoss` aggregates it and adds the KL to a reference and the entropy bonus.

Leaves of a microbatch, all f32[rows, seq] and aligned with `targets` (place t belongs to the token targets[t]):
loss_mask, advantages, old_log_probs; ref_log_probs with a KL term; rollout_weights optionally, importance weights
of a sampler that differs from the policy (`losses.importance.rollout_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.aggregation import aggregate, check_aggregation
from jaxfb.losses.kl import check_kl_estimator, kl_penalty
from jaxfb.losses.sequences import Sequences, check_per_token
from jaxfb.losses.settings import check_finite, check_not_negative
from jaxfb.losses.surrogates import PPOClip, clamped_log_ratio
from jaxfb.refusal import Refused, boolean, function, name_of
from jaxfb.types import LossOutput, Max, Min, Sum


class PolicyTokens(NamedTuple):
    """The inputs of a surrogate, all [rows, seq] and 0 where the mask is 0."""

    log_probs: jax.Array
    old_log_probs: jax.Array
    advantages: jax.Array


@dataclass(frozen=True)
class PolicyLoss:
    """Computes a policy's objective: surrogate + kl_coef * KL(policy || reference) - entropy_coef * entropy.

    Called by `policy_loss_fn` with the log-probs and entropies of one microbatch; hashable, so equal ones compile once.

    surrogate:    a policy loss per token, see `losses.surrogates`.
    aggregation:  of all three terms, see `losses.aggregation.aggregate`; `scale` is its constant. None: the one
                  the surrogate was derived with.
    kl_coef:      of the term "kl"; 0: no term, and `ref_log_probs` is not read.
    kl_estimator: see `losses.kl.kl_penalty`.
    entropy_coef: of the bonus; 0: no term; below 0 it penalizes entropy.
    on_policy:    the old log-probs are the present ones, without gradient, and `old_log_probs` is not read: for the
                  first update after a rollout, which then needs no log-prob pass.

    Returns LossOutput with the terms "policy", "kl", "entropy" and the metrics
      approx_kl      mean over tokens of the k3 estimate of KL(old || policy)
      ratio, ratio_max, ratio_min   of policy to old policy, by token
      policy_entropy mean over tokens, nats
      advantage      mean over tokens
      ref_kl         mean over tokens of the estimate, without its coefficient (with a KL term)
      rollout_weight mean over tokens (if the leaf is there)
      and what the surrogate adds, such as clip_fraction.

    Raises:
      ValueError: a setting out of range; when traced, a leaf that is missing or not [rows, seq].
    """

    surrogate: Callable[..., Any] = field(default_factory=PPOClip)
    aggregation: str | None = None
    scale: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    on_policy: bool = False

    def __post_init__(self):
        function("surrogate", self.surrogate, "(tokens, sequences), such as PPOClip()", who="[loss]")
        boolean("on_policy", self.on_policy, who="[loss]")
        check_aggregation(self._aggregation, self.scale)
        check_kl_estimator(self.kl_estimator)
        check_not_negative("loss", "0 for no such term", kl_coef=self.kl_coef)
        check_finite("loss", "0 for no such term", entropy_coef=self.entropy_coef)

    def __call__(
        self, log_probs: jax.Array, entropy: jax.Array, microbatch: Mapping[str, jax.Array]
    ) -> LossOutput:
        sequences = Sequences.of(microbatch)
        leaf = lambda name: sequences.where_counted(microbatch_leaf(microbatch, name))  # noqa: E731
        log_probs = sequences.where_counted(log_probs)
        old = lax.stop_gradient(log_probs) if self.on_policy else leaf("old_log_probs")
        tokens = PolicyTokens(log_probs, old, leaf("advantages"))
        losses, extra = _pair(self.surrogate, self.surrogate(tokens, sequences), log_probs.shape)
        if "rollout_weights" in microbatch:
            losses *= leaf("rollout_weights")
        terms = {"policy": self._aggregated(losses, sequences)}
        metrics = _metrics(tokens, sequences.where_counted(entropy), sequences) | extra
        if self.kl_coef:
            kl = kl_penalty(tokens.log_probs, leaf("ref_log_probs"), self.kl_estimator)
            terms["kl"] = self._aggregated(self.kl_coef * kl, sequences)
            metrics["ref_kl"] = mean_metric(kl, sequences)
        if self.entropy_coef:
            terms["entropy"] = self._aggregated(-self.entropy_coef * entropy, sequences)
        if "rollout_weights" in microbatch:
            metrics["rollout_weight"] = mean_metric(leaf("rollout_weights"), sequences)
        return LossOutput(terms, metrics)

    def _aggregated(self, per_token: jax.Array, sequences: Sequences) -> Sum:
        return aggregate(per_token, sequences, self._aggregation, scale=self.scale)

    @property
    def _aggregation(self) -> str:
        own = getattr(self.surrogate, "aggregation", "token-mean")
        return own if self.aggregation is None else self.aggregation


def _pair(surrogate: Any, returned: Any, shape: tuple[int, ...]) -> tuple[jax.Array, dict]:
    """Returns what a surrogate returned; ValueError unless it is a loss of every token and metrics by name."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise Refused(
            f"[loss] the surrogate {name_of(surrogate)} must return (loss per token, metrics), such as (losses, {{}}), "
            f"got a {type(returned).__name__}"
        )
    if jnp.shape(returned[0]) != shape:
        raise Refused(
            f"[loss] the surrogate {name_of(surrogate)} must return a loss of every token, [rows, seq]={shape}, "
            f"got one of {jnp.shape(returned[0])}; spread the loss of a sequence over its tokens with jnp.broadcast_to"
        )
    return returned


def mean_metric(per_token: jax.Array, sequences: Sequences) -> Sum:
    """Returns the mean over counted tokens of the global batch, as a metric."""
    return Sum(lax.stop_gradient(sequences.total(per_token)), sequences.mask.sum())


def _metrics(tokens: PolicyTokens, entropy: jax.Array, sequences: Sequences) -> dict:
    log_ratio = clamped_log_ratio(tokens)
    ratio, counted = jnp.exp(lax.stop_gradient(log_ratio)), sequences.mask != 0
    return {
        "approx_kl": mean_metric(ratio - 1 - log_ratio, sequences),
        "ratio": mean_metric(ratio, sequences),
        "ratio_max": Max(jnp.max(jnp.where(counted, ratio, -jnp.inf))),
        "ratio_min": Min(jnp.min(jnp.where(counted, ratio, jnp.inf))),
        "policy_entropy": mean_metric(entropy, sequences),
        "advantage": mean_metric(tokens.advantages, sequences),
    }


def microbatch_leaf(microbatch: Mapping, name: str, dims: int = 2) -> jax.Array:
    """Returns microbatch[name]; raises ValueError where it is missing or not [rows, seq], of `dims` dims."""
    if name not in microbatch:
        raise Refused(
            f"[loss] the loss reads the leaf {name!r} [rows, seq], the microbatch has {', '.join(microbatch)}"
        )
    mask = microbatch["loss_mask"]
    check_per_token("loss_mask", mask, mask)
    check_per_token(name, microbatch[name], mask, dims)
    return microbatch[name]
