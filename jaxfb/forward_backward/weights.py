"""Denominators first: every term's weight, before any backward.

The division has one owner. Because the weights of all microbatches are known beforehand, the backward is
seeded with 1/weight, terms with different weights compose exactly, and nothing is rescaled afterwards.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.compat import prune, silent
from jaxfb.forward_backward.reduce import reduce_records
from jaxfb.types import LossFn, Sum

PyTree = Any
NORMALIZATIONS = ("global", "microbatch", "none")


def term_weights(
    loss_fn: LossFn, params: PyTree, microbatches: PyTree, keys: jax.Array | None, cut: PyTree = None
) -> dict:
    """Weights of every term in every microbatch of this replica: name -> [num_microbatches].

    Only the part of the loss function that the weights need is run; the forward itself is cut away.
    A weight that reads tokens which a context axis cuts is a part, and summed over context; one that does not
    (a number of rows, a constant) is whole already.

    Args:
      params: abstract parameters; their values are never read.
      cut: tree like microbatches of bool, the leaves that a context axis cuts; None without one.

    Raises:
      ValueError: a weight depends on the parameters.
    """
    first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (microbatches, keys))
    closed, shape = jax.make_jaxpr(
        lambda p, mb, k: {name: term.weight for name, term in loss_fn(p, mb, k).terms.items()},
        return_shape=True,
    )(params, *first)
    closed = silent(closed)
    _check_data_only(closed, params, tuple(shape))
    run, used = prune(closed, [True] * len(shape))
    used_data = used[len(jax.tree.leaves(params)) :]

    def one(_, inputs):
        leaves = [leaf for leaf, needed in zip(jax.tree.leaves(inputs), used_data, strict=True) if needed]
        return None, dict(zip(shape, run(*leaves), strict=True))

    with jax.named_scope("weights"):
        weights = lax.scan(one, None, (microbatches, keys))[1]
    weights = _whole_over_context(closed, tuple(shape), weights, params, cut)
    # else XLA merges the reduction of a single microbatch's weight with that of a metric that counts the same
    return lax.optimization_barrier(weights)


def _whole_over_context(closed, names: tuple[str, ...], weights: dict, params: PyTree, cut: PyTree) -> dict:
    if cut is None:
        return weights
    skip, cut = len(jax.tree.leaves(params)), jax.tree.leaves(cut)
    parts = {}
    for index, name in enumerate(names):
        _, used = prune(closed, [position == index for position in range(len(names))])
        if any(needed and part for needed, part in zip(used[skip:], cut, strict=False)):
            parts[name] = weights[name]
    return weights | reduce_records(parts, ("context",)) if parts else weights


def _check_data_only(closed, params: PyTree, names: tuple[str, ...]) -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for index, name in enumerate(names):
        _, used = prune(closed, [position == index for position in range(len(names))])
        guilty = [path for path, needed in zip(paths, used, strict=False) if needed]
        if guilty:
            raise ValueError(
                f"the weight of term {name!r} must depend on the data alone, but it depends on "
                f"params{guilty[0]}{' and others' if len(guilty) > 1 else ''}; weights are summed before the "
                "first backward, so count rows or mask tokens and put what depends on params into the total"
            )


def seeds(local: dict, reduced: dict, normalize: str, num_parts: int, scale: Any, dtype: Any) -> dict:
    """Cotangent of every term's total in every microbatch of this replica: name -> [num_microbatches].

    "global":     scale / (weight of the whole global batch)
    "microbatch": scale / (weight of this microbatch * number of microbatches * replicas): a mean of means
    "none":       scale
    A weight of zero gives a seed of zero (in "none" there is no weight to be zero).
    """
    # in float even where the scale is 1, so that one compiled step serves every loss scale
    scale = jnp.asarray(scale, dtype)

    def seed(name):
        if normalize == "none":
            return jnp.broadcast_to(scale, local[name].shape)
        if normalize == "microbatch":
            return reciprocal(local[name].astype(dtype)) * (scale / num_parts)
        return jnp.broadcast_to(reciprocal(reduced[name].sum().astype(dtype)) * scale, local[name].shape)

    return {name: seed(name) for name in local}


def reciprocal(weight: jax.Array) -> jax.Array:
    """1 / weight, and 0 where the weight is 0."""
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1), 0)


def objective(terms: dict[str, Sum], normalize: str) -> jax.Array:
    """The loss of the whole global batch from its reduced terms."""
    values = [term.total if normalize == "none" else term.value for term in terms.values()]
    return sum(values[1:], values[0])
