"""Per-token log-probs and entropies with a share of a head's vocabulary on each of several neighbours.

Equals `token_log_probs` of the gathered head, with as many products: a device makes the logits of its share, of the
tokens of all neighbours, forward and once more backward.

Shapes: T = tokens of all neighbours, W = vocabulary of a share, K = tokens scored at each position.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfb.losses.vocabulary.log_probs_by_parts import PartLogProbs, gradient_of_part, of_all, of_part
from jaxfb.losses.vocabulary.logits import gradients_by_share
from jaxfb.losses.vocabulary.scoring import Scoring
from jaxfb.parallel.shares import Shares
from jaxfb.parallel.table import Table


def scores_by_shares(
    hidden: jax.Array, table: Table, ids: jax.Array, scoring: Scoring, shares: Shares
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (log_probs [rows * seq, K], entropy [rows * seq], normalizer [rows * seq]) of this device's tokens.

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. ids: i32[rows, seq, K].
    """
    hidden, ids = shares.together(hidden), shares.together(ids)
    part = of_part(hidden, shares.of(table), shares.ids(table), ids, _padded(scoring, table, shares))
    each = PartLogProbs(*(shares.together(leaf[: ids[..., 0].size][None]) for leaf in part))
    log_probs, entropy, normalizer = map(shares.own, of_all(each))
    return log_probs, entropy, normalizer


def gradients_by_shares(
    hidden: jax.Array,
    table: Table,
    counted: jax.Array,
    others: Sequence[jax.Array],
    scoring: Scoring,
    scale: jax.Array,
    shares: Shares,
) -> tuple[jax.Array, Table]:
    """Computes gradients of hidden and of the table's shard, where counted, times this device's scale.

    Args:
      hidden: float[rows, seq, D]. table: the head, [D, vocab] or tied [vocab, D]. counted: bool[rows, seq].
      others: [rows, seq, ...] each: what `logits_gradient` takes from the ids on.
    """
    relative, largest = shares.relative(scale)
    *others, of_log_probs, of_entropy = others
    given = (
        jnp.where(counted[..., None], hidden, 0),
        counted,
        *others,
        relative * of_log_probs,
        relative * of_entropy,
    )
    hidden, counted, *others = map(shares.together, given)
    kernel, ids, scoring = shares.of(table), shares.ids(table), _padded(scoring, table, shares)
    grad = gradient_of_part(hidden, kernel, ids, counted, others, scoring)
    return gradients_by_share(grad, hidden, kernel, table, largest, shares)


def _padded(scoring: Scoring, table: Table, shares: Shares) -> Scoring:
    return scoring._replace(absent=(*scoring.absent, *shares.absent(table)))
