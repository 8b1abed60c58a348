"""Sums weight gradients a layer at a time, in place, so that those of a whole stage never exist at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.forward_backward.layers.slot import FROM_START, read, write
from jaxfb.types import PyTree


class OfLayer(NamedTuple):
    """The gradients of one layer, or of some of its leaves: its place i32[], whether it is a real layer bool[]."""

    place: jax.Array
    real: jax.Array
    grads: PyTree


class Target(NamedTuple):
    """The sums to which a stage's weight gradients are added.

    sums:  tree like the trained parameters of all chunks, [num_chunks, l, ...], in the accumulation dtypes.
    chunk: i32[], which of them.
    valid: bool[], whether what is computed counts.
    before: with `Ahead.reduce`, sums of the microbatches before the last, [num_chunks, l, ...], which are added to each
      layer's gradients before these are reduced and written to `sums`. A leaf is None where reduced gradients have the
      shape of those sums, which `sums` then holds until they are overwritten; the tree is None where there are none.
    """

    sums: PyTree
    chunk: jax.Array
    valid: jax.Array
    before: PyTree = None

    def add(self, sums: PyTree, of: OfLayer, padded: bool) -> PyTree:
        """Returns the sums with one layer's gradients added; nothing where they do not count.

        padded: some of the layers may not be real.
        """
        counts = self.valid & of.real if padded else self.valid

        def add(grad: jax.Array | None, leaf: jax.Array) -> jax.Array:
            if grad is None:
                return leaf
            at = self._at(of, grad)
            so_far = read(leaf, at, (1, 1, *grad.shape))
            grad = jnp.where(counts, grad.astype(leaf.dtype), 0)
            return write(leaf, so_far + grad[None, None], at)

        with jax.named_scope("accumulate"):
            return _map(add, of.grads, sums)

    def put(self, sums: PyTree, of: OfLayer) -> PyTree:
        """Returns the sums with a real layer's gradients in place of what was there before."""

        def put(grad: jax.Array | None, leaf: jax.Array) -> jax.Array:
            if grad is None:
                return leaf
            at = self._at(of, grad)
            grad = grad.astype(leaf.dtype)[None, None]
            return write(leaf, jnp.where(of.real, grad, read(leaf, at, grad.shape)), at)

        return _map(put, of.grads, sums)

    def of_all(self, sums: PyTree, of: OfLayer) -> OfLayer:
        """Returns one layer's gradients, in the dtype of their sums, with those of the microbatches before added.

        sums: in which the layer's place is not written to yet.
        """

        def add(grad: jax.Array | None, leaf: jax.Array, before: jax.Array | None) -> jax.Array | None:
            if grad is None:
                return None
            grad = jnp.where(self.valid, grad.astype(leaf.dtype), 0)
            if before is None and leaf.shape[2:] != grad.shape:
                return grad  # there are no microbatches before
            before = leaf if before is None else before
            return read(before, self._at(of, grad), (1, 1, *grad.shape))[0, 0] + grad

        before = jax.tree.map(lambda _: None, self.sums) if self.before is None else self.before
        return of._replace(grads=_map(add, of.grads, sums, before))

    def _at(self, of: OfLayer, grad: jax.Array) -> tuple:
        return (self.chunk, of.place, *FROM_START * grad.ndim)


def only_chunk(sums: PyTree) -> Target:
    """Returns the target of layers that are all in one chunk; sums: [l, ...] leaves."""
    return Target(jax.tree.map(lambda leaf: leaf[None], sums), jnp.int32(0), jnp.bool_(True))


def _map(function: Any, grads: PyTree, *trees: PyTree) -> PyTree:
    """Applies a function to each gradient, or None where there is none, and the leaves that belong to it."""
    return jax.tree.map(function, grads, *trees, is_leaf=lambda leaf: leaf is None)
