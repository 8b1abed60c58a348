"""Computes per-token log-probabilities and entropies of a large vocabulary, a chunk of tokens at a time.

What every post-training loss starts from, inside the head of forward_backward. [tokens, vocab] logits never exist
whole, neither forward nor backward. What the loss makes of the log-probs is not known here, so the backward makes
the logits once more (8 multiplications per weight and token).

Shapes: T = tokens in a chunk, V = vocabulary, or this device's share of it, K = tokens scored at each position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.settings import check_positive
from jaxfb.losses.vocabulary.log_probs_by_parts import gradients_in_parts, scores_in_parts
from jaxfb.losses.vocabulary.log_probs_by_shares import gradients_by_shares, scores_by_shares
from jaxfb.losses.vocabulary.logits import (
    IdRanges,
    cut_tokens,
    gradients_by_chunk,
    join_tokens,
    largest,
    project,
    sum_dtype,
    summed,
    token_ids,
)
from jaxfb.losses.vocabulary.scoring import Scoring, in_units, logits_gradient, picked
from jaxfb.parallel.shares import shares_of
from jaxfb.parallel.table import Table
from jaxfb.platforms.compat import custom_vjp


class TokenLogProbs(NamedTuple):
    """Log-probs and entropies; both can be differentiated, both are 0 where the mask is 0.

    log_probs: f32[rows, seq], or [rows, seq, K] for K targets a position, in nats.
    entropy:   f32[rows, seq], -sum over the vocabulary of p log p, in nats.
    """

    log_probs: jax.Array
    entropy: jax.Array


def token_log_probs(
    hidden: jax.Array,
    kernel: jax.Array | Table,
    targets: jax.Array,
    loss_mask: jax.Array,
    *,
    chunk: int = 1024,
    axis: str | None = None,
    logit_softcap: float | None = None,
    temperature: float = 1.0,
    absent_ids: IdRanges = (),
) -> TokenLogProbs:
    """Computes log p(target) and entropy at each position, of p = softmax(capped(hidden @ kernel) / temperature).

    Where the mask is 0 nothing counts: NaN in `hidden` and targets outside the vocabulary (-100) are inert, in
    the gradient too.

    Args:
      hidden: float[rows, seq, width].
      kernel: float[width, vocab/tensor], or a `Table` of it or of its transpose, of which a share or a part at a
        time is gathered.
      targets: i32[rows, seq], or i32[rows, seq, K] to score K tokens at each position (each costs a pass over
        the chunk's logits); -1 is none, its log-prob is 0.
      loss_mask: float[rows, seq]; only whether it is 0 matters.
      chunk: tokens whose logits exist at one time.
      axis: a manual mesh axis over which `kernel` is cut as well: float[width, vocab/axis/tensor]. The other
        arguments, the results and the gradient of `hidden` are then equal on all its devices.
      logit_softcap: logits become softcap * tanh(logits / softcap); None leaves them.
      temperature: the sampler's, by which logits are divided.
      absent_ids: ranges (first, end) of ids that the sampler never draws: their probability is 0, the others' add
        up to 1 without them.
    Returns:
      TokenLogProbs, float32 (float64 for float64 inputs).
    Raises:
      ValueError: temperature is not positive.
    """
    check_temperature(temperature)
    one = targets.ndim == 2
    ids = targets[..., None] if one else targets
    scoring = Scoring(chunk, axis, logit_softcap, temperature, absent_ids)
    log_probs, entropy = _token_log_probs(hidden, kernel, ids, loss_mask != 0, scoring)
    return TokenLogProbs(log_probs[..., 0] if one else log_probs, entropy)


def log_probs_of_logits(logits: jax.Array, targets: jax.Array, temperature: float = 1.0) -> TokenLogProbs:
    """Computes the same from logits float[..., vocab] that exist already, for models without an `unembed`. targets:
    i32[...].
    """
    check_temperature(temperature)
    log_p = jax.nn.log_softmax(logits.astype(sum_dtype(logits)) / temperature)
    picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return TokenLogProbs(picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1))


def check_temperature(temperature: float) -> None:
    """Raises ValueError unless it is positive and finite."""
    check_positive("loss", "1.0 for the model's own probabilities", temperature=temperature)


@custom_vjp(4)
def _token_log_probs(hidden, head: jax.Array | Table, ids, counted, scoring: Scoring):
    log_probs, entropy, _ = _scores(hidden, head, ids, counted, scoring)
    return log_probs, entropy


def _forward(hidden, head, ids, counted, scoring):
    log_probs, entropy, normalizer = _scores(hidden, head, ids, counted, scoring)
    return (log_probs, entropy), (hidden, head, ids, counted, normalizer, entropy)


def _backward(scoring, residuals, cotangents):
    hidden, head, ids, counted, normalizer, entropy = residuals
    scale, seeds = in_units(cotangents, counted)
    gradients = _functions(head, counted.size)[1]
    others = (ids, normalizer, entropy, *seeds)
    return *gradients(hidden, head, counted, others, scoring, scale), None, None


_token_log_probs.defvjp(_forward, _backward)


def _functions(head: jax.Array | Table, num_tokens: int) -> tuple[Callable, Callable]:
    """Returns what scores so many tokens with a head, and what makes the gradients."""
    if not isinstance(head, Table):
        return _scores_by_token, _gradients
    if (shares := shares_of(head, num_tokens)) is None:
        return scores_in_parts, gradients_in_parts
    return partial(scores_by_shares, shares=shares), partial(gradients_by_shares, shares=shares)


def _scores(hidden, head, ids, counted, scoring):
    """Returns (log_probs [rows, seq, K], entropy [rows, seq], normalizer [rows, seq])."""
    by_token = _functions(head, counted.size)[0]
    shapes = (ids.shape, counted.shape, counted.shape)
    log_probs, entropy, normalizer = map(join_tokens, by_token(hidden, head, ids, scoring), shapes)
    there = counted[..., None] & (ids != -1)
    return jnp.where(there, log_probs, 0), jnp.where(counted, entropy, 0), normalizer


def _scores_by_token(hidden, kernel, ids, scoring):
    """Returns the same as [chunks, T, ...], also where nothing counts."""

    def step(tokens):
        hidden, ids = tokens
        logits = project(hidden, kernel, scoring.softcap)
        vocab = token_ids(logits, ids.dtype, scoring.axis)
        logits = scoring.scaled(logits, vocab)
        top = largest(jnp.max(logits, axis=-1, keepdims=True), scoring.axis)
        weights = jnp.exp(logits - top)
        total = summed(jnp.sum(weights, axis=-1), scoring.axis)
        mean = summed(jnp.sum(weights * (logits - top), axis=-1), scoring.axis) / total
        normalizer = top[:, 0] + jnp.log(total)
        found = summed(picked(logits, ids, vocab), scoring.axis)
        return found - normalizer[:, None], jnp.log(total) - mean, normalizer

    return lax.map(step, cut_tokens(scoring.chunk, hidden, ids))


def _gradients(hidden, kernel, counted, others, scoring, scale):
    """Computes gradients of hidden and kernel, times the scale."""

    def logits_grad(hidden, ids, *others):
        logits = project(hidden, kernel, scoring.softcap)
        vocab = token_ids(logits, ids.dtype, scoring.axis)
        return logits_gradient(logits, vocab, scoring, ids, *others), None

    grads = gradients_by_chunk(
        logits_grad, hidden, counted, kernel, others, chunk=scoring.chunk, axis=scoring.axis
    )[:2]
    return tuple(
        (scale * grad).astype(leaf.dtype) for grad, leaf in zip(grads, (hidden, kernel), strict=True)
    )
