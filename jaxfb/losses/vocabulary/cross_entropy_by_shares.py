"""Softmax cross entropy with a share of a head's vocabulary on each of several neighbours, who score tokens together.

Part of the head in forward_backward, for a head that FSDP has cut into shards. Equals `chunked_cross_entropy` of the
gathered head, with as many products. A device makes the logits of its share, of the tokens of all neighbours, and keeps
exp(logit - the share's largest) of them. The neighbours exchange the largest logits and the sums; then it turns what it
kept into the gradient of the logits.

Shapes: T = tokens of all neighbours, W = vocabulary of a share, D = width. Dtypes: those of `part_scores`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import cut_tokens, gradients_by_share
from jaxfb.losses.vocabulary.part_scores import Head, PartScores, Scores, first_pass, logits_grad, of_all
from jaxfb.parallel.shares import Shares
from jaxfb.parallel.table import Table


class Residuals(NamedTuple):
    """Holds what a first pass keeps. All but the kernel, [D, W], is of the neighbours' tokens.

    hidden: [rows, seq, D]. targets: [rows, seq]. kept: exp(logit - top), [T, W]. top: of this share, [T].
    scores: over the whole vocabulary.
    """

    hidden: jax.Array
    targets: jax.Array
    kernel: jax.Array
    kept: jax.Array
    top: jax.Array
    scores: Scores


def scores_by_shares(
    hidden: jax.Array, table: Table, targets: jax.Array, mask: jax.Array, head: Head, shares: Shares
) -> tuple[Scores, Residuals]:
    """Scores every token of this device, [rows, seq]; returns what `gradients_by_shares` takes as well.

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. targets: i32[rows, seq].
      mask: float[rows, seq]; where it is 0, hidden is taken for 0.
    """
    counted = jnp.where(mask[..., None] != 0, hidden, 0)
    hidden, targets, kernel = shares.together(counted), shares.together(targets), shares.of(table)
    head = head._replace(absent=shares.absent(table))
    part, kept = first_pass(hidden, kernel, shares.ids(table), targets, head)
    each = shares.together(jnp.stack(part)[None])
    scores = of_all(PartScores(*jnp.swapaxes(each, 0, 1)), targets.shape)
    own = jax.tree.map(shares.own, scores)
    return own, Residuals(hidden, targets, kernel, kept, part.top, scores)


def gradients_by_shares(
    table: Table, mask: jax.Array, residuals: Residuals, head: Head, scale: jax.Array, shares: Shares
) -> tuple[jax.Array, Table]:
    """Returns the gradients of this device's scale * sum(mask * -log p(target)), of hidden and of the table's shard."""
    hidden, targets, kernel, kept, top, scores = residuals
    relative, largest = shares.relative(scale)
    mask = shares.together(relative * mask)
    of_tokens = cut_tokens(head.chunk, targets, mask, *scores[:3])
    number, size = of_tokens[0].shape

    def in_place(chunk: jax.Array, kept: jax.Array) -> jax.Array:
        """Replaces what is kept of a chunk by the gradient of its logits: there is memory for one of them."""
        at = partial(lax.dynamic_index_in_dim, index=chunk, keepdims=False)
        targets, mask, *of_scores = map(at, of_tokens)
        given = at(kept), at(tops), shares.ids(table), targets, mask, head, Scores(*of_scores)
        return lax.dynamic_update_index_in_dim(kept, logits_grad(*given), chunk, 0)

    tops = top.reshape(number, size)
    grad = lax.fori_loop(0, number, in_place, kept.reshape(number, size, -1))
    return gradients_by_share(grad.reshape(kept.shape), hidden, kernel, table, largest, shares)
