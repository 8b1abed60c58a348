"""An embedding or a head in shards, of whose vocabulary one part at a time is gathered and its gradient scattered.

Whole they are the largest arrays of a step: 1.05 GB each, in 16 bits, of a model of 8B with 128,256 tokens, and as much
again for the gradient. Part by part each takes a P-th of it, and the collectives of one part run beside the products of
another. 8B by the compiler of libtpu 0.0.48, whole -> in parts:

| | HBM (GB) | s a step |
|---|---|---|
| v5p:4x4x4, fsdp 64 | 6.69 -> 6.71 | 9.86 -> 9.70 |
| v6e:8x8, fsdp 64 | 6.99 -> 7.00 | 5.66 -> 5.39 |
| v5e:16x16, fsdp 256 | 4.83 -> 3.64 | 7.20 -> 7.15 |
| v5p:4x4x4, fsdp 16 x context 4, 32k tokens | 7.91 -> 7.54 | 15.58 -> 15.55 |

On v5p and v6e a layer's own arrays decide the memory; there the time is what is saved. Where possible, of an embedding
columns are gathered in place of parts (`columns.py`), and of a head shares (`shares.py`).

All functions here run inside `jax.shard_map` and see one device's shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.mesh import kind_here
from jaxfb.parallel import data
from jaxfb.parallel.collectives import all_gather, reduce_scatter, scatters_beside_products
from jaxfb.parallel.grid import Grid
from jaxfb.parallel.sharding import shards_of

MOST_PARTS = 8  # each is written out in the program
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """A matrix over the vocabulary, of which this device has a shard.

    shard: in the dtype in which its gradient is summed over microbatches; whole it is [vocab, width] or [width, vocab].
    spec:  where it lives; it names no automatic axis. vocabulary: the dim of the whole that is the vocabulary's.
    dtype: in which parts are gathered. reduce_dtype: in which their gradients are summed over devices; None: the
      shard's.
    """

    shard: jax.Array
    spec: P = field(metadata=_STATIC)
    vocabulary: int = field(metadata=_STATIC)
    dtype: Any = field(metadata=_STATIC)
    reduce_dtype: str | None = field(default=None, metadata=_STATIC)

    def whole(self) -> jax.Array:
        """Returns the whole matrix; the transpose is a reduce-scatter."""
        return data.gather_shard(self.shard, self.spec, self.dtype, self.reduce_dtype)

    @property
    def cut(self) -> tuple[int, tuple[str, ...]]:
        """Returns (the dim that is cut into shards, the axes that have them, outermost first)."""
        found = shards_of(self.spec)
        assert found is not None  # a table is in shards
        return found

    @property
    def num_parts(self) -> int:
        """Returns how many parts there are: the fewest that are not too large."""
        return num_parts(self.whole_shape, self.vocabulary, self._num_rows, self.shard.dtype)

    def part(self, number: int) -> jax.Array:
        """Gathers one part: the same columns, or rows, of every device's shard."""
        size = self._num_rows // self.num_parts
        own = lax.slice_in_dim(self.shard, number * size, (number + 1) * size, axis=self.vocabulary)
        dim, axes = self.cut
        return all_gather(own.astype(self.dtype), axes, dim)

    def slice(self, grid: Grid, dim: int, size: int | None = None) -> jax.Array:
        """Gathers this device's slice along `dim`, of as many as the grid has rows; the devices in a row have the same.

        Along the other dim, if that is the one in shards, they come in the order of the devices in a row.

        size: to which `dim` of the shard is first padded with zeros; None: it is not padded.
        """
        own = self.shard.astype(self.dtype)
        if size is not None:
            own = jnp.pad(own, [(0, size - own.shape[dim] if one == dim else 0) for one in (0, 1)])
        if self.cut[0] != dim:
            own = grid.exchange(own, dim, 1 - dim)
        return grid.gather_within(own, self.cut[0])

    def slice_scattered(self, grid: Grid, grad: jax.Array, dim: int) -> Table:
        """Returns the gradient of the shard from that of `slice`."""
        dtype = self.reduce_dtype
        grad = grid.scatter_within(grad.astype(dtype or self.shard.dtype), self.cut[0], dtype)
        if self.cut[0] != dim:
            grad = grid.exchange(grad, 1 - dim, dim)
        grad = lax.slice_in_dim(grad, 0, self.shard.shape[dim], axis=dim)
        return replace(self, shard=grad.astype(self.shard.dtype))

    def as_head(self, matrix: jax.Array) -> jax.Array:
        """Returns the whole, or a part, as [width, vocab]: its transpose if it is an embedding."""
        return matrix if self.vocabulary == 1 else matrix.T

    def ids(self, number: int) -> jax.Array:
        """Returns the token of each row, or column, of a part: i32[vocab / num_parts]."""
        size = self._num_rows // self.num_parts
        own = number * size + jnp.arange(size, dtype=jnp.int32)
        return (jnp.arange(self._num_cuts, dtype=jnp.int32)[:, None] * self._num_rows + own).reshape(-1)

    def places(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the number of the part in which each token is, its row or column there)."""
        size = self._num_rows // self.num_parts
        device, own = tokens // self._num_rows, tokens % self._num_rows
        return own // size, device * size + own % size

    def scattered(self, grad: jax.Array) -> jax.Array:
        """Sums a part's gradient over the devices; returns what belongs to this one's shard, in the shard's dtype."""
        dim, axes = self.cut
        grad = grad.astype(self.reduce_dtype or self.shard.dtype)
        return reduce_scatter(grad, axes, dim, self.reduce_dtype).astype(self.shard.dtype)

    def joined(self, parts: Sequence[jax.Array]) -> Table:
        """Returns a table whose shard is made of `parts`, each as `scattered` returns it."""
        return replace(self, shard=jnp.concatenate(parts, axis=self.vocabulary))

    @property
    def _num_rows(self) -> int:
        return self.shard.shape[self.vocabulary]

    @property
    def _num_cuts(self) -> int:
        """Returns among how many devices the vocabulary is cut."""
        dim, axes = self.cut
        return math.prod(map(lax.axis_size, axes)) if dim == self.vocabulary else 1

    @property
    def sum_dtype(self) -> jnp.dtype:
        """Returns the dtype in which a part's gradient is made: float32, or float64 for float64."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Returns the shape of the whole matrix."""
        dim, axes = self.cut
        devices = math.prod(map(lax.axis_size, axes))
        return tuple(size * (devices if one == dim else 1) for one, size in enumerate(self.shard.shape))


def num_parts(shape: Sequence[int], vocabulary: int, own: int, dtype: Any) -> int:
    """Returns how many parts a table has: the fewest, up to 8, of no more than `LARGEST_SCATTER` bytes in `dtype`.

    shape: of the whole. own: rows or columns of the vocabulary in a shard, which the parts divide; of those that do the
      ones that fill a TPU's tiles come first.
    """
    needed = -(-math.prod(shape) * jnp.dtype(dtype).itemsize // data.LARGEST_SCATTER)
    tile = 128 if vocabulary == len(shape) - 1 else 16
    for multiple in (tile, 1):
        numbers = [n for n in range(2, MOST_PARTS + 1) if own % (n * multiple) == 0]
        if needed > 1 and numbers:
            return next((n for n in numbers if n >= needed), numbers[-1])
    return 1


def pays(num_tokens: int, width: int, dtype: Any) -> bool:
    """Returns whether what keeps [tokens, vocab] in a head's dtype takes less memory than the whole head and the sum of
    its gradients.
    """
    size, wide = jnp.dtype(dtype).itemsize, jnp.promote_types(dtype, jnp.float32).itemsize
    return num_tokens * size <= width * (size + wide)


def gathers_early() -> bool:
    """Returns whether a part is gathered beside all products of the part before it, and not beside the last alone.

    The scatter of the part before that runs beside them too: a step of 8B on v5p:4x4x4 takes 9.49 s in place of 9.64 s,
    on v6e:8x8 5.17 s in place of 5.28 s. On v5e:16x16 it would take 3.81 GB in place of 3.64 GB, and no less time.
    """
    return scatters_beside_products(kind_here())


def after(table: Table, *arrays: jax.Array | None) -> Table:
    """Returns the same table, whose parts are gathered once these arrays are there: not all parts at one time."""
    shard, _ = lax.optimization_barrier((table.shard, arrays))
    return replace(table, shard=shard)
