"""Rows sorted by group, each group multiplied by its own matrix: what experts are made of.

`jax.lax.ragged_dot` on TPUs. XLA for CPUs and GPUs multiplies every row by every matrix, and so does XLA for TPUs in
the gradient of the matrices: there, each group's rows are cut in tiles and a loop multiplies a tile at a time,
so that the work is that of the rows there are, and not of the groups, nor of the space for the worst case.

Shapes: S = rows, L = groups, D = width before, F = width after, N = tiles at most, B = rows of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

TILE = (
    1024  # rows at most; they must cost more to multiply than it costs to read and write a matrix' gradient
)


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each run of `sizes` rows by its matrix: out[s] = rows[s] @ kernels[group of s]; zero behind the last
    run.

    Args:
      rows: float[S, D], sorted by group.
      kernels: float[L, D, F].
      sizes: i32[L], at most S together.
    Returns:
      float[S, F].
    """
    return _product(rows, kernels, sizes)


def _forward(rows, kernels, sizes):
    kept = (
        rows.value if kernels.perturbed else None
    )  # frozen kernels have no gradient, so rows are not kept for it
    return _product(rows.value, kernels.value, sizes.value), (kept, kernels.value, sizes.value)


def _backward(kept, cotangent):
    if isinstance(cotangent, SymbolicZero):
        return None, None, None
    rows, kernels, sizes = kept
    of_kernels = None if rows is None else tiled_outer_product(rows, cotangent, sizes).astype(kernels.dtype)
    return _product(cotangent, kernels.swapaxes(1, 2), sizes), of_kernels, None


grouped_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(rows, kernels, sizes):
    tiled = dict.fromkeys(("cpu", "cuda", "rocm"), tiled_product)
    return lax.platform_dependent(rows, kernels, sizes, **tiled, default=lax.ragged_dot)


def tile_size(num_rows: int, num_groups: int) -> int:
    """Returns B; the last tile of each group is part empty, so a group should have several."""
    return min(TILE, num_rows, max(8, num_rows // (2 * num_groups)))


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


def tiled_product(rows, kernels, sizes):
    """Computes `ragged_dot` in a loop over tiles of rows."""
    number, size = rows.shape[0], tile_size(rows.shape[0], kernels.shape[0])
    tiles = Tiles.of(sizes, number, size)

    def multiply(tile, out):
        start, there = _place(tiles, tile, number, size)
        kernel = lax.dynamic_index_in_dim(kernels, tiles.group[tile], keepdims=False)
        product, before = _slice(rows, start, size) @ kernel, _slice(out, start, size)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(there, product, before), start, 0)

    return lax.fori_loop(0, tiles.used, multiply, jnp.zeros((number, kernels.shape[2]), rows.dtype))


def tiled_outer_product(rows, cotangent, sizes):
    """Computes the gradient of the matrices [L, D, F] in a loop over tiles of rows, summed in float32 at least."""
    number, size = rows.shape[0], tile_size(rows.shape[0], sizes.shape[0])
    tiles, wide = Tiles.of(sizes, number, size), jnp.promote_types(rows.dtype, jnp.float32)

    def add(tile, sums):
        start, there = _place(tiles, tile, number, size)
        left, right = (
            jnp.where(there, _slice(x, start, size), jnp.zeros((), x.dtype)) for x in (rows, cotangent)
        )
        return sums.at[tiles.group[tile]].add(jnp.matmul(left.T, right, preferred_element_type=wide))

    zeros = jnp.zeros((sizes.shape[0], rows.shape[1], cotangent.shape[1]), wide)
    return lax.fori_loop(0, tiles.used, add, zeros).astype(rows.dtype)


def _place(tiles: Tiles, tile: jax.Array, number: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row at which a tile is read and written, bool[B, 1]: which of the rows from there are its own).

    Where `size` rows do not follow its first, it is read from further ahead.
    """
    start = jnp.minimum(tiles.start[tile], number - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    return start, ((row >= tiles.start[tile]) & (row < tiles.end[tile]))[:, None]


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size)
