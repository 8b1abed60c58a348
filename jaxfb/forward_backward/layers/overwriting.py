"""Writes gradients that wait for their scatter over those of the layer before, so that one layer's memory is enough.

A loop over pairs of layers reserves memory for the gradients of two layers. One is enough: when the products at the end
of a layer's backward make its gradients, those of the layer before have been scattered. So every layer writes its
gradients into the same buffer. The buffer is a little larger than they are, because XLA replaces a write of a whole
buffer by a new array. The write of a part it fuses into the product, which then starts when the first collective of the
scatter has read the old gradients. The rest of the buffer stays zero and is sent along: 0.4 to 3% more bytes.

Experts' matrices have no such buffer. Loops sum their gradients (`grouped_matmul`), into which no write is fused, and
what they sum can wait as it is: Mixtral 8x22B on v5p:4x4x8 takes 51.5 s and 28.9 GB in place of 52.3 s and 28.6 GB, a
model like DeepSeek-V3 on v5p:8x8x8 15.1 s and 42.2 GB in place of 15.6 s and 43.3 GB.

| by libtpu 0.0.48 | HBM, GB | step, s |
| --- | --- | --- |
| 8B, v5p:4x4x4, fsdp 64 | 6.55 -> 5.88 | 9.61 -> 9.64 |
| 8B, v6e:8x8, fsdp 64 | 7.09 -> 5.90 | 5.25 -> 5.28 |
| 8B, v5p:4x4x4, data 8 x fsdp 8, ZeRO-1 | 14.38 -> 13.62 | 9.68 -> 9.68 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxfb.parallel.collectives import scatters_beside_products
from jaxfb.parallel.sharding import shards_of
from jaxfb.trainable import like
from jaxfb.types import PyTree

_TILE = {-1: 128, -2: 16}
"""By which a dim becomes wider: by a TPU's tile, since memory is in tiles."""
_LEAST = 4
"""Tiles in a dim that becomes wider, so that no buffer takes more than 5/4 of its gradients."""


def overwriting_pays(kind: str | None, tensor: int, remat: str) -> bool:
    """Returns whether a layer's gradients are written over those of another on such devices.

    Only the TPU's compiler is known to fuse the write into a product. The scatter runs while the next layer is computed
    again. Where nothing is computed again, the products would wait for it (8B on v6e:8x8, remat="selective": 5.02 s in
    place of 4.56 s). On v5e, where no scatter runs beside a product, 8B on v5e:16x16 would take 3.68 GB and 6.98 s in
    place of 3.64 GB and 6.88 s. Where a tensor axis cuts the parameters it gains little (70B on v5p:8x8x8: 4.04 GB in
    place of 4.06 GB).
    """
    return scatters_beside_products(kind) and tensor == 1 and remat in ("layer", "offload", "full")


@dataclass(frozen=True)
class Overwriting:
    """Makes, fills and reads the buffers of one layer's gradients, or of some of its leaves.

    specs: PartitionSpecs of the trained parameters of a layer. The buffer of a matrix is wider along a dim that no axis
      cuts; that of another leaf, of a small one or of one in no shards has the size of its gradients.
    """

    specs: PyTree

    def buffers(self, grads: PyTree) -> PyTree:
        """Returns the shapes of the buffers for gradients of such shapes."""

        def one(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            shape = [*leaf.shape]
            if dim := _wider_dim(leaf, spec):
                shape[dim] += _TILE[dim]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return self._map(one, grads)

    def write(self, buffers: PyTree, grads: PyTree) -> PyTree:
        """Returns the buffers with gradients in place of what is in them."""

        def one(grad: jax.Array, buffer: jax.Array) -> jax.Array:
            if grad.shape == buffer.shape:
                return grad
            return lax.dynamic_update_slice(buffer, grad, (0,) * grad.ndim)

        return jax.tree.map(one, grads, buffers)

    def read(self, buffers: PyTree) -> PyTree:
        """Returns the gradients in buffers, or in the shards of them that a scatter has made.

        The barrier is for libtpu 0.0.48, which ends with an error where it moves the slice into a reduce-scatter.
        """

        def one(buffer: jax.Array, spec: PartitionSpec) -> jax.Array:
            if not (dim := _wider_dim(buffer, spec, is_wider=True)):
                return buffer
            return lax.slice_in_dim(buffer, 0, buffer.shape[dim] - _TILE[dim], axis=dim)

        return self._map(one, lax.optimization_barrier(buffers))

    def _map(self, function: Any, grads: PyTree) -> PyTree:
        return jax.tree.map(function, grads, like(grads, self.specs))


def _wider_dim(leaf: Any, spec: PartitionSpec, is_wider: bool = False) -> int | None:
    """Returns the dim along which a leaf's buffer is wider, counted from the last; of gradients or of a buffer."""
    if leaf.ndim != 2 or shards_of(spec) is None:
        return None
    entries = (*spec, *(None,) * (leaf.ndim - len(spec)))
    sizes = {dim: leaf.shape[dim] - is_wider * tile for dim, tile in _TILE.items()}
    return next((dim for dim in _TILE if entries[dim] is None and sizes[dim] >= _LEAST * _TILE[dim]), None)
