"""Checks that a loss function does not count the rows of zeros that fill up the last microbatch of some plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.forward_backward.traced import Traced
from jaxfb.forward_backward.weights import check_data_only, reads_microbatch
from jaxfb.refusal import Refused
from jaxfb.types import LossFn, PyTree

MOST = 2**22
"""Totals are checked for models of at most this many parameters."""


def check_padding(loss_fn: LossFn, params: PyTree, microbatches: PyTree, keys: jax.Array | None) -> None:
    """Checks that rows of zeros count nothing, on a microbatch of them alone.

    Their weights must be 0, and so must totals without a weight; these are computed with random parameters, unless
    there are too many.

    Args:
      params, microbatches, keys: arrays or shapes; no value is read.

    Raises:
      ValueError: a weight of such rows is not 0, though the term's total reads the microbatch, or a total is not.
    """
    one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    microbatch, rng = jax.tree.map(one, (microbatches, keys))
    try:
        traced = Traced(loss_fn, params, microbatch, rng)
    except NameError:  # raised for an axis name outside of a mesh
        return
    check_data_only(traced, params)
    few = sum(leaf.size for leaf in jax.tree.leaves(params)) <= MOST
    for name, term in traced.places.terms.items():
        part = "total" if term.weight is None else "weight"
        if not reads_microbatch(traced, name) or (part == "total" and not few):
            continue
        counted = _of_zeros(traced, getattr(term, part), params if part == "total" else None, microbatch, rng)
        if counted != 0:
            raise Refused(
                f"the plan fills microbatches up with rows of zeros, and term {name!r} counts them: its {part} is "
                f"{counted:g} for a microbatch of nothing else; count with a mask that is 0 there, such as "
                'Sum(jnp.where(mask > 0, loss, 0).sum(), mask.sum()), or use remainder="drop" or "error"'
            )


def _of_zeros(traced: Traced, place: int, params: PyTree, microbatch: PyTree, rng: Any) -> float:
    """Returns one result of the loss function for a microbatch of zeros and random parameters."""
    draw = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), params)
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), microbatch)
        keys = None if rng is None else jax.random.split(jax.random.key(0), rng.shape)
        return float(traced.function(place)(params, blank, keys)[0])
