"""Per-token log-probs and entropies with one part of a head's vocabulary at a time: the head never exists whole.

Equals `token_log_probs` of the gathered head, with as many products. The head is gathered a second time for the
backward, which makes the logits once more as it does there.

Shapes: T = all tokens, W = vocabulary of a part, K = tokens scored at each position.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.logits import cut_tokens, gradients_by_part, half_scale, join_tokens, project
from jaxfb.losses.scoring import Scoring, in_units, logits_gradient, picked
from jaxfb.parallel.table import Table, after
from jaxfb.platforms.compat import custom_vjp


class _PartScores(NamedTuple):
    """Describes the tokens' logits over one part, [T] but for the first; sums are over the part.

    picked: [T, K], the logits of the ids, 0 where they are elsewhere. top: the largest logit. total: the sum of
    exp(logit - top). mean: that of exp(logit - top) * (logit - top).
    """

    picked: jax.Array
    top: jax.Array
    total: jax.Array
    mean: jax.Array


@custom_vjp(4)
def log_probs_by_parts(
    hidden: jax.Array, table: Table, ids: jax.Array, counted: jax.Array, scoring: Scoring
) -> tuple[jax.Array, jax.Array]:
    """Computes (log-probs [rows, seq, K], entropy [rows, seq]), 0 where not counted.

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D].
      ids: i32[rows, seq, K], -1 for none. counted: bool[rows, seq].
    """
    log_probs, entropy, _ = _scores(hidden, table, ids, counted, scoring)
    return log_probs, entropy


def _forward(hidden, table, ids, counted, scoring):
    log_probs, entropy, normalizer = _scores(hidden, table, ids, counted, scoring)
    return (log_probs, entropy), (hidden, table, ids, counted, normalizer, entropy)


def _backward(scoring, residuals, cotangents):
    hidden, table, ids, counted, normalizer, entropy = residuals
    scale, seeds = in_units(cotangents, counted)

    def of_logits(number: int, kernel: jax.Array) -> jax.Array:
        def step(tokens):
            hidden, counted, ids, normalizer, entropy, *seeds = tokens
            logits = project(hidden, kernel, scoring.softcap)
            grad = logits_gradient(
                logits, table.ids(number), ids, normalizer, entropy, seeds[0], seeds[1], scoring
            )
            return (jnp.where(counted[:, None], grad, 0) * half_scale(kernel)).astype(kernel.dtype)

        grads = lax.map(step, cut_tokens(scoring.chunk, hidden, counted, ids, normalizer, entropy, *seeds))
        return grads.reshape(-1, grads.shape[-1])

    hidden_grad, table_grad = gradients_by_part(of_logits, hidden, counted, table)
    table_grad = jax.tree.map(lambda leaf: (scale * leaf).astype(leaf.dtype), table_grad)
    return (scale * hidden_grad).astype(hidden.dtype), table_grad, None, None


log_probs_by_parts.defvjp(_forward, _backward)


def _scores(hidden, table: Table, ids, counted, scoring: Scoring):
    """Returns (log_probs [rows, seq, K], entropy [rows, seq], normalizer [rows, seq])."""
    parts: list[_PartScores] = []
    for number in range(table.num_parts):
        kernel = table.as_head(after(table, *jax.tree.leaves(parts[-2:-1])).part(number))
        parts.append(_of_part(hidden, kernel, table.ids(number), ids, scoring))
    each = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    top, found = each.top.max(0), each.picked.sum(0)
    lower, factor = each.top - top, jnp.exp(each.top - top)
    total = jnp.sum(factor * each.total, axis=0)
    mean = jnp.sum(factor * (each.mean + lower * each.total), axis=0) / total
    normalizer = top + jnp.log(total)
    scores = found - normalizer[:, None], jnp.log(total) - mean, normalizer
    log_probs, entropy, normalizer = map(join_tokens, scores, (ids.shape, counted.shape, counted.shape))
    there = counted[..., None] & (ids != -1)
    return jnp.where(there, log_probs, 0), jnp.where(counted, entropy, 0), normalizer


def _of_part(hidden, kernel, vocab, ids, scoring: Scoring) -> _PartScores:
    def step(tokens):
        hidden, ids = tokens
        logits = scoring.scaled(project(hidden, kernel, scoring.softcap), vocab)
        top = jnp.max(logits, axis=-1)
        lower = logits - top[:, None]
        weights = jnp.exp(lower)
        return _PartScores(
            picked(logits, ids, vocab), top, weights.sum(-1), jnp.sum(weights * lower, axis=-1)
        )

    scores = lax.map(step, cut_tokens(scoring.chunk, hidden, ids))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), scores)
