"""Softmax cross entropy with one part of a head's vocabulary at a time: neither the head nor its gradient exists whole.

Part of the head in forward_backward, for a head that FSDP has cut into shards. Equals `chunked_cross_entropy` of the
gathered head, with as many products: a first pass over the parts makes each part's logits and keeps exp(logit - the
part's largest) for all tokens, a second turns that into the gradient of the logits once the normalizer is known. The
head is gathered once more for it.

Shapes: T = all tokens, W = vocabulary of a part, D = width. Dtypes: what is kept has the head's dtype, like the
gradient of the logits elsewhere; that of a token's own target is exact. All else is float32 (float64 for float64
inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.logits import capped_slope, cut_tokens, gradients_by_part, half_scale, join_tokens, project
from jaxfb.parallel.table import Table, after


class Head(NamedTuple):
    """Settings of the logits and of what is summed up: the arguments that shape the program."""

    chunk: int
    axis: str | None
    softcap: float | None
    regularizers: bool


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


class Residuals(NamedTuple):
    """What is kept of a first pass: exp(logit - top) of each part [T, W], and its tops [T], both padded at the end."""

    scores: Scores
    kept: list[jax.Array]
    tops: list[jax.Array]


def scores_in_parts(hidden: jax.Array, table: Table, targets: jax.Array, head: Head) -> Scores:
    """Scores every token, [rows, seq].

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. targets: i32[rows, seq].
    """
    parts = [
        _first_pass(hidden, after(table).part(k), table, k, targets, head)[0] for k in range(table.num_parts)
    ]
    return _of_all(parts, targets.shape)


def scores_and_residuals(
    hidden: jax.Array, table: Table, targets: jax.Array, head: Head
) -> tuple[Scores, Residuals]:
    """Returns the same, and what `gradients_in_parts` takes."""
    kept: list[jax.Array] = []
    parts: list[PartScores] = []
    for number in range(table.num_parts):
        kernel = after(table, *kept[-2:-1]).part(number)
        scores, exponentials = _first_pass(hidden, kernel, table, number, targets, head)
        parts.append(scores)
        kept.append(exponentials)
    scores = _of_all(parts, targets.shape)
    return scores, Residuals(scores, kept, [part.top for part in parts])


def gradients_in_parts(
    hidden: jax.Array,
    table: Table,
    targets: jax.Array,
    mask: jax.Array,
    residuals: Residuals,
    head: Head,
    scale: jax.Array,
) -> tuple[jax.Array, Table]:
    """Returns the gradients of hidden and of the table's shard of this device's scale * sum(mask * -log p(target))."""

    def of_logits(number: int, kernel: jax.Array) -> jax.Array:
        # the barrier: else of all parts at once
        _, exponentials = lax.optimization_barrier((kernel, residuals.kept[number]))
        of_part = exponentials, residuals.tops[number], table.ids(number)
        return _logits_grad(*of_part, targets, mask, head, residuals.scores)

    return gradients_by_part(of_logits, hidden, mask != 0, table, scale, residuals.kept)


def _first_pass(
    hidden, kernel, table: Table, number: int, targets, head: Head
) -> tuple[PartScores, jax.Array]:
    """Returns (scores [T], exp(logit - top) times the soft cap's slope [T, W]), both padded at the end."""
    kernel, ids = table.as_head(kernel), table.ids(number)

    def step(tokens):
        logits, target = project(tokens[0], kernel, head.softcap), tokens[1][:, None]
        before, at, above = (
            jnp.max(jnp.where(part, logits, -jnp.inf), axis=-1)
            for part in (ids < target, ids == target, ids > target)
        )
        top = jnp.maximum(jnp.maximum(before, at), above)
        exponentials = jnp.exp(logits - top[:, None])
        kept = exponentials * capped_slope(logits, head.softcap) * half_scale(kernel)
        return PartScores(before, at, above, top, exponentials.sum(-1)), kept.astype(kernel.dtype)

    scores, kept = lax.map(step, cut_tokens(head.chunk, hidden, targets))
    return jax.tree.map(lambda leaf: leaf.reshape(-1), scores), kept.reshape(-1, kept.shape[-1])


def _logits_grad(kept, top, ids, targets, mask, head: Head, scores: Scores) -> jax.Array:
    """Returns the sum's gradient of the logits before they are capped, [T, W], in the head's dtype."""
    normalizer, target_logit, target, mask = (
        leaf.reshape(-1)[:, None] for leaf in (scores.normalizer, scores.target_logit, targets, mask)
    )
    number = mask.shape[0]
    factor = jnp.exp(top[:number, None] - normalizer)
    slope = capped_slope(target_logit, head.softcap)
    exact = (jnp.exp(target_logit - normalizer) - 1) * slope * half_scale(kept)
    grad = jnp.where(ids == target, exact, kept[:number].astype(factor.dtype) * factor)
    return jnp.where(mask != 0, mask * grad, 0).astype(kept.dtype)


def _of_all(parts: Sequence[PartScores], shape: tuple[int, ...]) -> Scores:
    each = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    before, target, later, top = (leaf.max(0) for leaf in each[:4])
    total = jnp.sum(each.total * jnp.exp(each.top - top), axis=0)
    correct = (target > before) & (target >= later)
    return Scores(*(join_tokens(leaf, shape) for leaf in (top + jnp.log(total), target, correct)))
