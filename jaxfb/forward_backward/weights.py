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
    loss_fn: LossFn,
    params: PyTree,
    microbatches: PyTree,
    keys: jax.Array | None,
    num_parts: int,
    cut: PyTree = None,
) -> dict:
    """Weights of every term in every microbatch of this replica: name -> [num_microbatches].

    Only the part of the loss function that the weights need is run; the forward itself is cut away.
    A weight that reads tokens which a context axis cuts is a part, and summed over context; one that does not
    (a number of rows or tokens, a constant) is what it would be of whole sequences. A term without a weight gets
    1 / num_parts, so that its weight over the global batch is 1.

    Args:
      params: abstract parameters; their values are never read.
      num_parts: microbatches times replicas.
      cut: tree like microbatches of bool, the leaves that a context axis cuts; None without one.

    Raises:
      ValueError: a weight depends on the parameters.
    """
    program = _WeightsProgram(loss_fn, params, microbatches, keys)
    program.check_data_only(params)
    with jax.named_scope("weights"):
        if cut is None:
            weights = program.run(program.names)
        else:
            parts = program.names_reading(cut)
            whole = _WeightsProgram(loss_fn, params, microbatches, keys, cut)
            weights = whole.run([name for name in program.names if name not in parts])
            weights |= reduce_records(program.run(parts), ("context",)) if parts else {}
        weights |= {name: _evenly(params, microbatches, num_parts) for name in program.undivided}
    # else XLA merges the reduction of a single microbatch's weight with that of a metric that counts the same
    return lax.optimization_barrier(weights)


class _WeightsProgram:
    """The loss function traced for its weights. `cut`: as if the leaves that context cuts were whole."""

    def __init__(self, loss_fn: LossFn, params: PyTree, microbatches: PyTree, keys: Any, cut: PyTree = None):
        def abstract(leaf, is_cut=False):
            length = (leaf.shape[2] * lax.axis_size("context"),) if is_cut else leaf.shape[2:3]
            return jax.ShapeDtypeStruct((*leaf.shape[1:2], *length, *leaf.shape[3:]), leaf.dtype)

        shapes = jax.tree.map(abstract, microbatches, *(() if cut is None else (cut,)))
        traced, shape = jax.make_jaxpr(
            lambda p, mb, k: {name: term.weight for name, term in loss_fn(p, mb, k).terms.items()},
            return_shape=True,
        )(params, shapes, jax.tree.map(abstract, keys))
        self._program, self._data = silent(traced), (microbatches, keys)
        self._num_params = len(jax.tree.leaves(params))
        self.names = [name for name, weight in shape.items() if weight is not None]
        self.undivided = [name for name, weight in shape.items() if weight is None]

    def run(self, names: list[str]) -> dict:
        """name -> [num_microbatches]."""
        function, used = prune(self._program, [name in names for name in self.names])
        used, chosen = used[self._num_params :], [name for name in self.names if name in names]

        def one(_, inputs):
            leaves = [leaf for leaf, needed in zip(jax.tree.leaves(inputs), used, strict=True) if needed]
            return None, dict(zip(chosen, function(*leaves), strict=True))

        return lax.scan(one, None, self._data)[1]

    def names_reading(self, cut: PyTree) -> list[str]:
        """The terms whose weight reads one of those leaves of the microbatch."""
        leaves = jax.tree.leaves(cut)
        reads = lambda name: self._used_by(name)[self._num_params :]  # noqa: E731
        return [name for name in self.names if any(map(min, zip(reads(name), leaves, strict=False)))]

    def check_data_only(self, params: PyTree) -> None:
        """Raises ValueError if a weight depends on the parameters."""
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for name in self.names:
            guilty = [path for path, used in zip(paths, self._used_by(name), strict=False) if used]
            if guilty:
                raise ValueError(
                    f"the weight of term {name!r} must depend on the data alone, but it depends on "
                    f"params{guilty[0]}{' and others' if len(guilty) > 1 else ''}; weights are summed before the "
                    "first backward, so count rows or mask tokens and put what depends on params into the total"
                )

    def _used_by(self, name: str) -> list[bool]:
        return prune(self._program, [other == name for other in self.names])[1]


def _evenly(params: PyTree, microbatches: PyTree, num_parts: int) -> jax.Array:
    """1 / num_parts for each microbatch: [num_microbatches]."""
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    return jnp.full(jax.tree.leaves(microbatches)[0].shape[0], 1 / num_parts, dtype)


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
