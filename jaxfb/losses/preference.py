"""Preference losses: of two responses to a prompt, the chosen one is to become likelier than the rejected one.

Used in the head of forward_backward through `policy_loss_fn`. A pair must be compared where both are, so both are in
one row, as packed sequences: segment 2k - 1 is the chosen and segment 2k the rejected response of a pair, whose k is
any positive number of its own in the row, each with its prompt before it (attention stays inside a segment, positions
start anew). So a row is whole in itself, no loss looks across rows, and any split of the rows, packing and context
parallelism leave the loss as it is.

Leaves of a microbatch: tokens, targets, segments, positions, loss_mask (the responses), and `ref_log_probs` f32[rows,
seq] unless reference-free: what `log_prob_fn` of the reference model gives for the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.policy import microbatch_leaf
from jaxfb.losses.sequences import Sequences
from jaxfb.losses.settings import (
    check_finite,
    check_not_negative,
    check_number,
    check_positive,
    check_word,
)
from jaxfb.parts import PREFERENCES
from jaxfb.refusal import Refused, boolean, function_of
from jaxfb.types import LossOutput, Sum


@dataclass(frozen=True)
class PreferenceLoss:
    """Computes DPO and related losses, the mean over pairs of a function of h.

    h = beta * ((c - c_ref) - (r - r_ref)) - margin; c, r: summed log-probs of the chosen and the rejected answer.

        sigmoid  -(1 - e) log sigmoid(h) - e log sigmoid(-h)                  DPO arXiv:2305.18290, e: cDPO
        robust   (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e)    arXiv:2403.00409
        ipo      (h / beta - 1 / (2 beta))^2                                  arXiv:2310.12036
        hinge    max(0, 1 - h)                                                SLiC arXiv:2305.10425

    kind:               one of these, one registered in `jaxfb.parts.PREFERENCES`, or "module:function": a function
                        (h, settings) of the loss of each pair.
    beta:               how strongly the reference holds.
    label_smoothing:    e, the share of pairs thought to be labelled wrongly; in [0, 0.5).
    reference_free:     c_ref = r_ref = 0.
    length_normalized:  mean instead of summed log-probs. With reference_free and a margin: SimPO arXiv:2405.14734.
    margin:             subtracted from h.
    sft_coef:           of the term "chosen_nll", the mean over tokens of -log p of chosen responses (arXiv:2404.19733).

    Returns LossOutput with the term "preference" (weight: pairs of which both have counted tokens) and the metrics
    accuracy (share of pairs with c - c_ref > r - r_ref), reward_chosen, reward_rejected (beta * (c - c_ref), ...)
    and reward_margin.
    Raises:
      ValueError: a setting out of range; when traced, a leaf that is missing or not [rows, seq].
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    length_normalized: bool = False
    margin: float = 0.0
    sft_coef: float = 0.0

    def __post_init__(self):
        if not isinstance(self.kind, str) or ":" not in self.kind:
            check_word("preference", "kind", self.kind, PREFERENCES)
        PREFERENCES.check(self.kind, "kind")
        function_of(f"kind {self.kind!r}", PREFERENCES[self.kind], "(h, settings)", who="[preference]")
        boolean("reference_free", self.reference_free, who="[preference]")
        boolean("length_normalized", self.length_normalized, who="[preference]")
        check_positive("preference", 0.1, beta=self.beta)
        check_finite("preference", 0.0, margin=self.margin)
        check_not_negative("preference", 0.0, sft_coef=self.sft_coef)
        smoothing = self.label_smoothing
        check_number("preference", "label_smoothing", smoothing, lambda x: 0 <= x < 0.5, "in [0, 0.5)", 0.0)
        if self.label_smoothing and self.kind in ("ipo", "hinge"):
            raise Refused(
                f"[preference] kind={self.kind!r} takes no label_smoothing; use kind='sigmoid' or 'robust'",
                [{"kind": "sigmoid"}, {"kind": "robust"}],
            )

    def __call__(
        self, log_probs: jax.Array, entropy: jax.Array, microbatch: Mapping[str, jax.Array]
    ) -> LossOutput:
        pairs = _Pairs(microbatch["loss_mask"], microbatch_leaf(microbatch, "segments"))
        ref = jnp.zeros_like(log_probs)
        if not self.reference_free:
            ref = pairs.sequences.where_counted(microbatch_leaf(microbatch, "ref_log_probs"))
        chosen, rejected = pairs.compared(log_probs - ref, self.length_normalized)
        advantage = chosen - rejected
        terms = {"preference": pairs.mean(PREFERENCES[self.kind](self.beta * advantage - self.margin, self))}
        if self.sft_coef:
            terms["chosen_nll"] = pairs.chosen_nll(log_probs, self.sft_coef)
        metrics = {
            "accuracy": (advantage > 0).astype(advantage.dtype),
            "reward_chosen": self.beta * chosen,
            "reward_rejected": self.beta * rejected,
            "reward_margin": self.beta * advantage,
        }
        return LossOutput(terms, {name: pairs.mean(lax.stop_gradient(x)) for name, x in metrics.items()})


def sigmoid(h: jax.Array, settings: PreferenceLoss) -> jax.Array:
    """Returns the loss of DPO, or of cDPO with label smoothing, for each pair."""
    e = settings.label_smoothing
    return -(1 - e) * jax.nn.log_sigmoid(h) - e * jax.nn.log_sigmoid(-h)


def robust(h: jax.Array, settings: PreferenceLoss) -> jax.Array:
    """Returns the loss of robust DPO for each pair."""
    e = settings.label_smoothing
    return (e * jax.nn.log_sigmoid(-h) - (1 - e) * jax.nn.log_sigmoid(h)) / (1 - 2 * e)


def ipo(h: jax.Array, settings: PreferenceLoss) -> jax.Array:
    """Returns the loss of IPO for each pair."""
    return (h / settings.beta - 1 / (2 * settings.beta)) ** 2


def hinge(h: jax.Array, settings: PreferenceLoss) -> jax.Array:
    """Returns the loss of SLiC for each pair."""
    return jnp.maximum(0, 1 - h)


class _Pairs:
    """The pairs of a microbatch, [rows, most pairs a row could hold]."""

    def __init__(self, mask: jax.Array, segments: jax.Array):
        self.sequences, self._segments = Sequences(mask, _of_whole_pairs(segments, mask)), segments
        lengths = self.sequences.sums(jnp.ones_like(mask))
        self._lengths = self._both(lengths)
        self._there = (self._lengths[0] > 0) & (self._lengths[1] > 0)

    def compared(self, per_token: jax.Array, mean: bool) -> tuple[jax.Array, jax.Array]:
        """Returns sums, or means, over the chosen and over the rejected sequence of each pair."""
        sums = self._both(self.sequences.sums(per_token))
        if mean:
            sums = [x / jnp.where(n > 0, n, 1) for x, n in zip(sums, self._lengths, strict=True)]
        return sums[0], sums[1]

    def mean(self, per_pair: jax.Array) -> Sum:
        """Returns the mean over pairs that exist."""
        once = self.sequences.once
        number = jnp.sum(self._there).astype(self.sequences.mask.dtype)
        return Sum(once(jnp.sum(jnp.where(self._there, per_pair, 0))), once(number))

    def chosen_nll(self, log_probs: jax.Array, coef: float) -> Sum:
        chosen = (self._segments % 2 == 1) & (self.sequences.mask != 0)
        total = self.sequences.total(jnp.where(chosen, -log_probs, 0))
        return Sum(coef * total, jnp.sum(jnp.where(chosen, self.sequences.mask, 0)))

    def _both(self, sums: jax.Array) -> list[jax.Array]:
        """Splits [rows, segments 0..n] into values of chosen and of rejected sequences."""
        chosen, rejected = sums[:, 1::2], sums[:, 2::2]
        return [chosen[:, : rejected.shape[1]], rejected]


def _of_whole_pairs(segments: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the segments whose other is in the row too, and 0 for the others, so that ranks keep pairs together."""
    pairs, chosen = Sequences(jnp.ones_like(mask), (segments + 1) // 2), segments % 2 == 1
    both = (pairs.totals(chosen) > 0) & (pairs.totals(~chosen) > 0)
    return jnp.where(both, segments, 0)
