"""Per-token log-probs and entropies with one part of a head's vocabulary at a time: the head never exists whole.

Equals `token_log_probs` of the gathered head, with as many products. The head is gathered a second time for the
backward, which makes the logits once more as it does there.

Shapes: T = all tokens, W = vocabulary of a part, K = tokens scored at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import cut_tokens, gradients_by_part, half_scale, project
from jaxfb.losses.vocabulary.scoring import Scoring, logits_gradient, picked
from jaxfb.parallel.table import Table, after


class PartLogProbs(NamedTuple):
    """Describes the tokens' logits over one part, [T] but for the first; sums are over the part.

    picked: [T, K], the logits of the ids, 0 where they are elsewhere. top: the largest logit. total: the sum of
    exp(logit - top). mean: that of exp(logit - top) * (logit - top).
    """

    picked: jax.Array
    top: jax.Array
    total: jax.Array
    mean: jax.Array


def gradients_in_parts(
    hidden: jax.Array,
    table: Table,
    counted: jax.Array,
    others: Sequence[jax.Array],
    scoring: Scoring,
    scale: jax.Array,
) -> tuple[jax.Array, Table]:
    """Computes gradients of hidden and of the table's shard, where counted, times this device's scale.

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. counted: bool[rows, seq].
      others: [rows, seq, ...] each: what `logits_gradient` takes from the ids on.
    """

    def of_logits(number: int, kernel: jax.Array) -> jax.Array:
        return gradient_of_part(hidden, kernel, table.ids(number), counted, others, scoring)

    return gradients_by_part(of_logits, hidden, counted, table, scale)


def scores_in_parts(hidden, table: Table, ids, scoring: Scoring):
    """Returns (log_probs [T, K], entropy [T], normalizer [T]) of all tokens, padded at the end."""
    parts: list[PartLogProbs] = []
    for number in range(table.num_parts):
        kernel = table.as_head(after(table, *jax.tree.leaves(parts[-2:-1])).part(number))
        parts.append(of_part(hidden, kernel, table.ids(number), ids, scoring))
    return of_all(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))


def of_all(each: PartLogProbs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts those of all parts, [parts, T, ...], together: (log_probs [T, K], entropy [T], normalizer [T])."""
    top, found = each.top.max(0), each.picked.sum(0)
    lower, factor = each.top - top, jnp.exp(each.top - top)
    total = jnp.sum(factor * each.total, axis=0)
    mean = jnp.sum(factor * (each.mean + lower * each.total), axis=0) / total
    normalizer = top + jnp.log(total)
    return found - normalizer[:, None], jnp.log(total) - mean, normalizer


def of_part(
    hidden: jax.Array, kernel: jax.Array, vocab: jax.Array, ids: jax.Array, scoring: Scoring
) -> PartLogProbs:
    """Scores tokens over a part of the vocabulary, padded at the end.

    hidden: float[rows, seq, D]. kernel: [D, W]. vocab: i32[W], the tokens of its columns. ids: i32[rows, seq, K].
    """

    def step(tokens):
        hidden, ids = tokens
        logits = scoring.scaled(project(hidden, kernel, scoring.softcap), vocab)
        top = jnp.max(logits, axis=-1)
        lower = logits - top[:, None]
        weights = jnp.exp(lower)
        return PartLogProbs(
            picked(logits, ids, vocab), top, weights.sum(-1), jnp.sum(weights * lower, axis=-1)
        )

    scores = lax.map(step, cut_tokens(scoring.chunk, hidden, ids))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), scores)


def gradient_of_part(
    hidden: jax.Array,
    kernel: jax.Array,
    vocab: jax.Array,
    counted: jax.Array,
    others: Sequence[jax.Array],
    scoring: Scoring,
) -> jax.Array:
    """Returns the gradient of the logits of a part, [T or more, W], times `half_scale` and in the kernel's dtype."""

    def step(tokens):
        hidden, counted, *others = tokens
        logits = project(hidden, kernel, scoring.softcap)
        grad = logits_gradient(logits, vocab, scoring, *others)
        return (jnp.where(counted[:, None], grad, 0) * half_scale(kernel)).astype(kernel.dtype)

    grads = lax.map(step, cut_tokens(scoring.chunk, hidden, counted, *others))
    return grads.reshape(-1, grads.shape[-1])
