"""Denominators first: every term's weight, before any backward.

The division has one owner. Because the weights of all microbatches are known beforehand, the backward is
seeded with 1/weight, terms with different weights compose exactly, and nothing is rescaled afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.compat import opened, prune, silent
from jaxfb.forward_backward.reduce import reduce_records
from jaxfb.parallel.annotations import check_statistics
from jaxfb.refusal import Refused
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
    """Returns weights of every term in every microbatch of this replica: name -> [num_microbatches].

    Only the part of the loss function that the weights need is run; the forward itself is cut away.
    A weight that reads tokens which a context axis cuts is a part, and summed over context; one that does not
    (a number of rows or tokens, a constant) is what it would be of whole sequences. A term without a weight gets
    1 / num_parts, so that its weight over the global batch is 1.

    Args:
      params: abstract parameters; their values are never read.
      num_parts: microbatches times replicas.
      cut: tree like microbatches of bool, the leaves that a context axis cuts; None without one.

    Raises:
      ValueError: a weight depends on the parameters, a term without one reads nothing of the microbatch, or there are
        running statistics among the parameters.
    """
    program = _TermsProgram(loss_fn, params, microbatches, keys)
    program.check_data_only(params)
    program.check_summed(num_parts)
    check_statistics(params, program.params_read())
    with jax.named_scope("weights"):
        if cut is None:
            weights = program.run(program.weighted)
        else:
            parts = program.weights_reading(cut)
            whole = _TermsProgram(loss_fn, params, microbatches, keys, cut)
            weights = whole.run([name for name in program.weighted if name not in parts])
            weights |= reduce_records(program.run(parts), ("context",)) if parts else {}
        undivided = [name for name in program.names if name not in program.weighted]
        weights |= {name: _evenly(params, microbatches, num_parts) for name in undivided}
    # else XLA merges the reduction of a single microbatch's weight with that of a metric that counts the same
    return lax.optimization_barrier(weights)


def check_padding(loss_fn: LossFn, params: PyTree, microbatches: PyTree, keys: jax.Array | None) -> None:
    """Checks that rows of zeros, which fill up the last microbatch, count nothing, on a microbatch of them alone.

    Their weights must be 0, and so must totals without a weight; these are computed with made-up parameters, unless
    there are too many.

    Args:
      params, microbatches, keys: arrays or shapes; no value is read.

    Raises:
      ValueError: a weight of such rows is not 0, though the term's total reads the microbatch, or a total is not.
    """
    program = _TermsProgram(loss_fn, params, microbatches, keys)
    program.check_data_only(params)
    few = sum(leaf.size for leaf in jax.tree.leaves(params)) <= _MADE_UP
    undivided = [name for name in program.names if few and name not in program.weighted]
    with jax.ensure_compile_time_eval():
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), microbatches)
        blank_keys = None if keys is None else jax.random.split(jax.random.key(0), keys.shape[1])
        arguments = (_made_up(params) if undivided else params, blank, blank_keys)
        found = jax.device_get(program.of_one(arguments, undivided, program.weighted))
    for name, value in found.items():
        if value != 0 and program.total_reads_microbatch(name):
            raise Refused(
                f"the plan fills microbatches up with rows of zeros, and term {name!r} counts them: its "
                f"{'total' if name in undivided else 'weight'} is {float(value):g} for a microbatch of nothing else; "
                "count with a mask that is 0 there, such as Sum(jnp.where(mask > 0, loss, 0).sum(), mask.sum()), or "
                'use remainder="drop" or "error"'
            )


_MADE_UP = 2**22


def _made_up(params: PyTree) -> PyTree:
    """Returns parameters of those shapes and dtypes."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)


class _TermsProgram:
    """The loss function traced for its terms: names, and weighted, those of them that have a weight.

    cut: as if the leaves that context cuts were whole.
    """

    def __init__(self, loss_fn: LossFn, params: PyTree, microbatches: PyTree, keys: Any, cut: PyTree = None):
        def abstract(leaf, is_cut=False):
            length = (leaf.shape[2] * lax.axis_size("context"),) if is_cut else leaf.shape[2:3]
            return jax.ShapeDtypeStruct((*leaf.shape[1:2], *length, *leaf.shape[3:]), leaf.dtype)

        def totals_and_weights(params, microbatch, rng):
            terms = loss_fn(params, microbatch, rng).terms
            weights = {name: term.weight for name, term in terms.items() if term.weight is not None}
            return {name: term.total for name, term in terms.items()}, weights

        shapes = jax.tree.map(abstract, microbatches, *(() if cut is None else (cut,)))
        traced, (totals, weights) = jax.make_jaxpr(totals_and_weights, return_shape=True)(
            params, shapes, jax.tree.map(abstract, keys)
        )
        self._program, self._data = silent(traced), (microbatches, keys)
        self._num_params = len(jax.tree.leaves(params))
        self.names, self.weighted = list(totals), list(weights)

    def run(self, names: list[str]) -> dict:
        """Returns the weights of those terms: name -> [num_microbatches]."""
        return lax.scan(lambda _, data: (None, self.of_one((None, *data), (), names)), None, self._data)[1]

    def of_one(self, arguments: tuple, totals: Sequence[str], weights: Sequence[str]) -> dict:
        """Totals of some terms and weights of others for (params, microbatch, keys): name -> [].

        params: None where no total is asked for.
        """
        outputs = self._outputs(totals, weights)
        function, used = prune(self._program, outputs)
        params, *data = arguments
        leaves = jax.tree.leaves(params) or [None] * self._num_params
        given = [leaf for leaf, needed in zip([*leaves, *jax.tree.leaves(data)], used, strict=True) if needed]
        names = [name for name, wanted in zip([*self.names, *self.weighted], outputs, strict=True) if wanted]
        return dict(zip(names, function(*given), strict=True))

    def weights_reading(self, cut: PyTree) -> list[str]:
        """Returns the terms whose weight reads one of those leaves of the microbatch."""
        leaves = jax.tree.leaves(cut)
        reads = lambda name: self._read(weights=[name])[self._num_params :]  # noqa: E731
        return [name for name in self.weighted if any(map(min, zip(reads(name), leaves, strict=False)))]

    def params_read(self) -> list[bool]:
        """Returns whether the objective depends on each leaf of the parameters."""
        return self._read(totals=self.names)[: self._num_params]

    def total_reads_microbatch(self, name: str) -> bool:
        """Returns whether the term's total differs between microbatches, by their rows or by their keys."""
        return any(self._read(totals=[name])[self._num_params :])

    def check_data_only(self, params: PyTree) -> None:
        """Raises ValueError if a weight depends on the parameters."""
        if not any(self._read(weights=self.weighted)[: self._num_params]):
            return
        self._program = opened(self._program)  # some were only in one call or loop with the weight
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for name in self.weighted:
            guilty = [path for path, used in zip(paths, self._read(weights=[name]), strict=False) if used]
            if guilty:
                raise Refused(
                    f"the weight of term {name!r} must depend on the data alone, but it depends on "
                    f"params{guilty[0]}{' and others' if len(guilty) > 1 else ''}; weights are summed before the "
                    "first backward, so count rows or mask tokens and put what depends on params into the total"
                )

    def check_summed(self, num_parts: int) -> None:
        """Raises ValueError if a sum over microbatches and replicas would count what is the same in all of them."""
        for name in self.names:
            if num_parts > 1 and name not in self.weighted and not self.total_reads_microbatch(name):
                raise Refused(
                    f"term {name!r} has no weight and reads nothing of the microbatch, so it would be counted once "
                    f"for each of the {num_parts} microbatches; give it a constant weight to count it once, "
                    "Sum(total, 1.0)"
                )

    def _read(self, totals: Sequence[str] = (), weights: Sequence[str] = ()) -> list[bool]:
        """Returns which inputs those quantities depend on."""
        return prune(self._program, self._outputs(totals, weights))[1]

    def _outputs(self, totals: Sequence[str] = (), weights: Sequence[str] = ()) -> list[bool]:
        return [name in totals for name in self.names] + [name in weights for name in self.weighted]


def _evenly(params: PyTree, microbatches: PyTree, num_parts: int) -> jax.Array:
    """Returns 1 / num_parts for each microbatch: [num_microbatches]."""
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    return jnp.full(jax.tree.leaves(microbatches)[0].shape[0], 1 / num_parts, dtype)


def seeds(local: dict, reduced: dict, normalize: str, num_parts: int, scale: Any, dtype: Any) -> dict:
    """Returns cotangent of every term's total in every microbatch of this replica: name -> [num_microbatches].

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
    """Returns 1 / weight, and 0 where the weight is 0."""
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1), 0)


def objective(terms: dict[str, Sum], normalize: str) -> jax.Array:
    """Returns the loss of the whole global batch from its reduced terms."""
    values = [term.total if normalize == "none" else term.value for term in terms.values()]
    return sum(values[1:], values[0])
