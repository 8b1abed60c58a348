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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import gradients_by_part
from jaxfb.losses.vocabulary.part_scores import Head, PartScores, Scores, first_pass, logits_grad, of_all
from jaxfb.parallel.table import Table, after


class Residuals(NamedTuple):
    """Holds what a first pass keeps of each part, both padded at the end.

    kept: exp(logit - top), [T, W]. tops: the largest logits, [T].
    """

    scores: Scores
    kept: list[jax.Array]
    tops: list[jax.Array]


def scores_in_parts(hidden: jax.Array, table: Table, targets: jax.Array, head: Head) -> Scores:
    """Scores every token, [rows, seq].

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. targets: i32[rows, seq].
    """
    parts = [_first_pass(hidden, after(table), k, targets, head)[0] for k in range(table.num_parts)]
    return _of_all(parts, targets)


def scores_and_residuals(
    hidden: jax.Array, table: Table, targets: jax.Array, head: Head
) -> tuple[Scores, Residuals]:
    """Returns the same, and what `gradients_in_parts` takes."""
    kept: list[jax.Array] = []
    parts: list[PartScores] = []
    for number in range(table.num_parts):
        scores, exponentials = _first_pass(hidden, after(table, *kept[-2:-1]), number, targets, head)
        parts.append(scores)
        kept.append(exponentials)
    scores = _of_all(parts, targets)
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
        return logits_grad(*of_part, targets, mask, head, residuals.scores)

    return gradients_by_part(of_logits, hidden, mask != 0, table, scale, residuals.kept)


def _first_pass(
    hidden: jax.Array, table: Table, number: int, targets: jax.Array, head: Head
) -> tuple[PartScores, jax.Array]:
    kernel = table.as_head(table.part(number))
    return first_pass(hidden, kernel, table.ids(number), targets, head)


def _of_all(parts: list[PartScores], targets: jax.Array) -> Scores:
    return of_all(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), targets.shape)
