"""Rows sorted by group, each group multiplied by its own matrix: what experts are made of.

`jax.lax.ragged_dot` on TPUs. XLA for CPUs and GPUs multiplies every row by every matrix, and so does XLA for TPUs in
the gradient of the matrices: there, each group's rows are cut in tiles and a loop multiplies a tile at a time,
so that the work is that of the rows there are, and not of the groups, nor of the space for the worst case.

Shapes: S = rows, L = groups, D = width before, F = width after, N = tiles at most, B = rows of a tile.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

TILE, TILE_OF_GPUS = 1024, 2048
"""Rows at most. They must cost more to multiply than it costs to read and write a matrix' gradient, which GPUs do three
times for a tile: by XLA's compiler a step of Mixtral 8x22B on 128 H100 takes 32.8 s in place of 36.8 s with 1024."""
GPUS = ("cuda", "rocm")
KEPT = "grouped_matmul"
"""The products' name for `remat`, which sees no product inside of a branch by platform."""


class Kernels(NamedTuple):
    """The matrices of all groups, and the way on which their gradient is summed over several products.

    narrow: float[L, D, F], what rows are multiplied by; it has no gradient.
    wide:   the same in float32 at least, which no product reads; its gradient is the matrices'.
    """

    narrow: jax.Array
    wide: jax.Array

    @classmethod
    def of(cls, kernels: jax.Array) -> Kernels:
        return cls(lax.stop_gradient(kernels), kernels.astype(jnp.promote_types(kernels.dtype, jnp.float32)))

    def multiply(self, rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Kernels]:
        """Returns (`grouped_matmul` of the rows, the matrices for the next rows).

        Each product gets the matrices from the one before it. So in the backward a loop over tiles adds to the sum
        that the loop before it made; sums of their own would be written, read and added once more for each product.
        """
        out, wide = _multiply(rows, self.narrow, self.wide, sizes)
        return out, Kernels(self.narrow, wide)


def grouped_matmul(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each run of `sizes` rows by its matrix: out[s] = rows[s] @ kernels[group of s]; undefined behind the
    last run.

    Args:
      rows: float[S, D], sorted by group.
      kernels: float[L, D, F].
      sizes: i32[L], at most S together.
    Returns:
      float[S, F].
    """
    return Kernels.of(kernels).multiply(rows, sizes)[0]


@jax.custom_vjp
def _multiply(rows, narrow, wide, sizes):
    return _product(rows, narrow, sizes), wide


def _forward(rows, narrow, wide, sizes):
    # frozen kernels have no gradient, so rows are not kept for it
    kept = rows.value if wide.perturbed else None
    out = checkpoint_name(_product(rows.value, narrow.value, sizes.value), KEPT)
    return (out, wide.value), (kept, narrow.value, sizes.value)


def _backward(kept, cotangents):
    (rows, narrow, sizes), (cotangent, so_far) = kept, cotangents
    if isinstance(cotangent, SymbolicZero):
        return None, None, None if isinstance(so_far, SymbolicZero) else so_far, None
    sums = None
    if rows is not None:
        if isinstance(so_far, SymbolicZero):
            so_far = jnp.zeros(narrow.shape, jnp.promote_types(narrow.dtype, jnp.float32))
        sums = _outer_product(rows, cotangent, sizes, so_far)
    return _product(cotangent, narrow.swapaxes(1, 2), sizes), None, sums, None


_multiply.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(rows, kernels, sizes):
    return lax.platform_dependent(
        rows,
        kernels,
        sizes,
        cpu=tiled_product,
        **dict.fromkeys(GPUS, partial(tiled_product, most=TILE_OF_GPUS)),
        default=lax.ragged_dot,
    )


def _outer_product(rows, cotangent, sizes, so_far):
    on_gpus = dict.fromkeys(GPUS, partial(tiled_outer_product, most=TILE_OF_GPUS))
    return lax.platform_dependent(rows, cotangent, sizes, so_far, **on_gpus, default=tiled_outer_product)


def tile_size(num_rows: int, num_groups: int, most: int = TILE) -> int:
    """Returns B; the last tile of each group is part empty, so a group should have several."""
    return min(most, num_rows, max(8, num_rows // (2 * num_groups)))


class Tiles(NamedTuple):
    """Runs of at most B rows of one group, in the order of the rows.

    group: i32[N]. start, end: i32[N], its rows; the next tile starts where it ends.
    used: i32[], how many tiles have rows, the first ones.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array
    used: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int, size: int) -> Tiles:
        """Makes tiles for all rows, however they are spread over groups."""
        num_groups = sizes.shape[0]
        tile = jnp.arange(num_rows // size + num_groups, dtype=jnp.int32)
        tiles_of = -(-sizes // size)
        tile_ends, row_ends = jnp.cumsum(tiles_of), jnp.cumsum(sizes)
        group = jnp.minimum((tile[:, None] >= tile_ends).sum(1, dtype=jnp.int32), num_groups - 1)
        first = (row_ends - sizes)[group] + (tile - (tile_ends - tiles_of)[group]) * size
        return cls(group, first, jnp.minimum(first + size, row_ends[group]), tile_ends[-1])


def tiled_product(rows, kernels, sizes, most=TILE):
    """Computes `ragged_dot` in a loop over tiles of `most` rows at most."""
    number, size = rows.shape[0], tile_size(rows.shape[0], kernels.shape[0], most)
    tiles = Tiles.of(sizes, number, size)

    def multiply(tile, out):
        start, there = _place(tiles, tile, number, size)
        kernel = lax.dynamic_index_in_dim(kernels, tiles.group[tile], keepdims=False)
        product, before = _slice(rows, start, size) @ kernel, _slice(out, start, size)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(there, product, before), start, 0)

    return lax.fori_loop(0, tiles.used, multiply, lax.empty((number, kernels.shape[2]), rows.dtype))


def tiled_outer_product(rows, cotangent, sizes, so_far, most=TILE):
    """Adds the gradient of the matrices to `so_far` [L, D, F], in whose dtype it is summed, in a loop over tiles of
    `most` rows at most.
    """
    number, size = rows.shape[0], tile_size(rows.shape[0], sizes.shape[0], most)
    tiles, wide = Tiles.of(sizes, number, size), so_far.dtype

    def add(tile, sums):
        start, there = _place(tiles, tile, number, size)
        left, right = (
            jnp.where(there, _slice(x, start, size), jnp.zeros((), x.dtype)) for x in (rows, cotangent)
        )
        return sums.at[tiles.group[tile]].add(jnp.matmul(left.T, right, preferred_element_type=wide))

    return lax.fori_loop(0, tiles.used, add, so_far)


def _place(tiles: Tiles, tile: jax.Array, number: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row at which a tile is read and written, bool[B, 1]: which of the rows from there are its own).

    Where `size` rows do not follow its first, it is read from further ahead.
    """
    start = jnp.minimum(tiles.start[tile], number - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    return start, ((row >= tiles.start[tile]) & (row < tiles.end[tile]))[:, None]


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size)
