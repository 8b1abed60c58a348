"""Scores of tokens over a part of a vocabulary, how they make those over all of it, and the gradients of its logits.

Part of the cross entropy of a head of which no device has all: a part after the other, or each on a device.

Shapes: T = all tokens, W = vocabulary of a part, D = width. Dtypes: what is kept of logits has the head's dtype, like
their gradient elsewhere; that of a token's own target is exact. All else is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import (
    IdRanges,
    capped_slope,
    cut_tokens,
    half_scale,
    join_tokens,
    project,
    without,
)


class Head(NamedTuple):
    """Settings of the logits and of what is summed up: the arguments that shape the program.

    absent: ranges of ids of probability 0, known to `first_pass` alone.
    """

    chunk: int
    axis: str | None
    softcap: float | None
    regularizers: bool
    absent: IdRanges = ()


class PartScores(NamedTuple):
    """Describes the tokens' logits over one part of the vocabulary, all [T].

    before, target, after: the largest of the ids below the target, at it, and above it; -inf without any.
    top: the largest. total: the sum of exp(logit - top).
    """

    before: jax.Array
    target: jax.Array
    after: jax.Array
    top: jax.Array
    total: jax.Array


class Scores(NamedTuple):
    """The quantities kept of each token's logits over the whole vocabulary, all [T] or [rows, seq].

    correct: the target is the first of the likeliest tokens. mean_logit: None unless regularizers are asked for.
    """

    normalizer: jax.Array
    target_logit: jax.Array
    correct: jax.Array
    mean_logit: jax.Array | None = None


def first_pass(
    hidden: jax.Array, kernel: jax.Array, ids: jax.Array, targets: jax.Array, head: Head
) -> tuple[PartScores, jax.Array]:
    """Returns (scores [T], exp(logit - top) times the soft cap's slope [T, W]), both padded at the end.

    hidden: float[rows, seq, D]. kernel: [D, W]. ids: i32[W], the tokens of its columns. targets: i32[rows, seq].
    """

    def step(tokens):
        logits, target = project(tokens[0], kernel, head.softcap), tokens[1][:, None]
        slope = capped_slope(logits, head.softcap)
        logits = without(head.absent, logits, ids)
        before, at, above = (
            jnp.max(jnp.where(part, logits, -jnp.inf), axis=-1)
            for part in (ids < target, ids == target, ids > target)
        )
        top = jnp.maximum(jnp.maximum(before, at), above)
        exponentials = jnp.exp(logits - top[:, None])
        kept = exponentials * slope * half_scale(kernel)
        return PartScores(before, at, above, top, exponentials.sum(-1)), kept.astype(kernel.dtype)

    scores, kept = lax.map(step, cut_tokens(head.chunk, hidden, targets))
    return jax.tree.map(lambda leaf: leaf.reshape(-1), scores), kept.reshape(-1, kept.shape[-1])


def logits_grad(
    kept: jax.Array,
    top: jax.Array,
    ids: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    head: Head,
    scores: Scores,
) -> jax.Array:
    """Returns the gradient of sum(mask * -log p(target)) by the logits before they are capped, [T, W], in the head's
    dtype.

    kept, top: of a first pass over a part. scores: over all parts.
    """
    normalizer, target_logit, target, mask = (
        leaf.reshape(-1)[:, None] for leaf in (scores.normalizer, scores.target_logit, targets, mask)
    )
    number = mask.shape[0]
    factor = jnp.exp(top[:number, None] - normalizer)
    slope = capped_slope(target_logit, head.softcap)
    exact = (jnp.exp(target_logit - normalizer) - 1) * slope * half_scale(kept)
    grad = jnp.where(ids == target, exact, kept[:number].astype(factor.dtype) * factor)
    return jnp.where(mask != 0, mask * grad, 0).astype(kept.dtype)


def of_all(each: PartScores, shape: tuple[int, ...]) -> Scores:
    """Puts the scores over all parts, [parts, T], together; shape: [rows, seq] of the tokens."""
    before, target, later, top = (leaf.max(0) for leaf in each[:4])
    total = jnp.sum(each.total * jnp.exp(each.top - top), axis=0)
    correct = (target > before) & (target >= later)
    return Scores(*(join_tokens(leaf, shape) for leaf in (top + jnp.log(total), target, correct)))
