"""Decides which outputs of a model are per token: those whose second dim becomes wider with the microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxfb.forward_backward.loss_function.traced import Traced
from jaxfb.forward_backward.packed import is_arranged
from jaxfb.types import PyTree


def of_tokens(outputs: PyTree, microbatches: PyTree, traced_for: Callable[[PyTree], Traced | None]) -> tuple:
    """Returns for each leaf of the outputs whether it is per token, [rows, width, ...].

    A size alone does not show that: n numbers of a row may be as many as a microbatch is wide. So the function is
    traced for microbatches of another width; where it takes one width alone, what has that size is taken for tokens.

    Args:
      outputs: shapes. microbatches: leaves [num_microbatches, rows, width, ...] and [num_microbatches, rows].
      traced_for: microbatches of other shapes -> the loss function traced for them, None where it does not take them.
    """
    width = next(leaf.shape[2] for leaf in jax.tree.leaves(microbatches) if len(leaf.shape) > 2)
    leaves = jax.tree.leaves(outputs)
    fit = tuple(leaf.ndim > 1 and leaf.shape[1] == width for leaf in leaves)
    others = (2 * width, width // 2) if any(fit) else ()
    for other in filter(None, others):
        if (traced := traced_for(_of_width(microbatches, other))) is not None:
            after = jax.tree.leaves(traced.shape.outputs)
            return tuple(fits and leaf.shape[1] != width for fits, leaf in zip(fit, after, strict=True))
    return fit


def are_rearranged(microbatches: PyTree, remainder: str) -> bool:
    """Returns whether microbatches may come from a token budget, after which outputs go back to their rows."""
    return remainder == "pad" and is_arranged(microbatches)


def _of_width(microbatches: PyTree, width: int) -> PyTree:
    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape if len(leaf.shape) < 3 else (*leaf.shape[:2], width, *leaf.shape[3:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(one, microbatches)
