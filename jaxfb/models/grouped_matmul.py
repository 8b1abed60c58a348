"""Rows sorted by group, each group multiplied by a matrix of its own: what experts are made of.

`jax.lax.ragged_dot`, and what it is on CPU, where XLA multiplies every row by every matrix: there, rows are laid out
in tiles of one group each and a loop multiplies a tile at a time, so that the work is that of the rows there are.

Shapes: S = rows, L = groups, D = width before, F = width after, N = tiles, B = rows of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LARGEST_TILE = 128
# of `ragged_dot_general`: [S, D] and [S, F] to [L, D, F], each group's rows summed
_SUMMED_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each run of `sizes` rows times its matrix: out[s] = rows[s] @ kernels[group of s]; zero behind the last run.

    Args:
      rows: float[S, D], sorted by group.
      kernels: float[L, D, F].
      sizes: i32[L], at most S together.
    Returns:
      float[S, F].
    """
    return _product(rows, kernels, sizes)


def _forward(rows, kernels, sizes):
    return _product(rows, kernels, sizes), (rows, kernels, sizes)


def _backward(kept, cotangent):
    rows, kernels, sizes = kept
    of_kernels = _outer_product(rows, cotangent, sizes).astype(kernels.dtype)
    return _product(cotangent, kernels.swapaxes(1, 2), sizes), of_kernels, None


grouped_matmul.defvjp(_forward, _backward)


def _product(rows, kernels, sizes):
    return lax.platform_dependent(rows, kernels, sizes, cpu=_tiled_product, default=lax.ragged_dot)


def _outer_product(rows, cotangent, sizes):
    """[L, D, F], of each group the sum over its rows of row x cotangent."""

    def ragged(rows, cotangent, sizes):
        return lax.ragged_dot_general(rows, cotangent, sizes, _SUMMED_ROWS)

    return lax.platform_dependent(rows, cotangent, sizes, cpu=_tiled_outer_product, default=ragged)


class _Tiles(NamedTuple):
    """Rows laid out in tiles of one group.

    group: i32[N]. row: i32[N, B], S where there is none.
    used:  i32[], how many tiles have rows, the first ones.
    """

    group: jax.Array
    row: jax.Array
    used: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int) -> _Tiles:
        """Room for all rows however they are spread; the last tile of each group may be part empty."""
        num_groups = sizes.shape[0]
        size = min(LARGEST_TILE, max(8, num_rows // (2 * num_groups)))
        tile = jnp.arange(num_rows // size + num_groups, dtype=jnp.int32)
        tiles_of = -(-sizes // size)
        ends = jnp.cumsum(tiles_of)
        group = (tile[:, None] >= ends).sum(1, dtype=jnp.int32)
        in_group = (tile - _at(ends - tiles_of, group))[:, None] * size + jnp.arange(size, dtype=jnp.int32)
        there = in_group < _at(sizes, group)[:, None]
        row = jnp.where(there, _at(jnp.cumsum(sizes) - sizes, group)[:, None] + in_group, num_rows)
        return cls(jnp.minimum(group, num_groups - 1), row, ends[-1])

    def join(self, tiles: jax.Array, num_rows: int) -> jax.Array:
        """[N, B, F] to [S, F], zero where no tile has the row."""
        number = self.row.size
        place = jnp.full(num_rows, number, jnp.int32)
        place = place.at[self.row.reshape(-1)].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
        return _at(tiles.reshape(number, -1), place)


def _tiled_product(rows, kernels, sizes):
    tiles = _Tiles.of(sizes, rows.shape[0])

    def multiply(tile, products):
        return products.at[tile].set(_at(rows, tiles.row[tile]) @ kernels[tiles.group[tile]])

    room = jnp.zeros((*tiles.row.shape, kernels.shape[2]), rows.dtype)
    return tiles.join(lax.fori_loop(0, tiles.used, multiply, room), rows.shape[0])


def _tiled_outer_product(rows, cotangent, sizes):
    tiles = _Tiles.of(sizes, rows.shape[0])
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def add(tile, sums):
        left, right = (_at(x, tiles.row[tile]) for x in (rows, cotangent))
        return sums.at[tiles.group[tile]].add(jnp.matmul(left.T, right, preferred_element_type=wide))

    zeros = jnp.zeros((sizes.shape[0], rows.shape[1], cotangent.shape[1]), wide)
    return lax.fori_loop(0, tiles.used, add, zeros).astype(rows.dtype)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], and zero where the index is len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
