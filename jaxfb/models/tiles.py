"""Rows sorted by group, cut in tiles that each belong to one group.

Shapes: L = groups, N = tiles at most, B = rows of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PRODUCT, OUTER_PRODUCT = "grouped_product", "grouped_outer_product"
"""The names of the kernels that multiply tiles, by which the planner knows them in a compiled program."""


class Tiles(NamedTuple):
    """Runs of at most B rows of one group, in the order of the rows.

    group: i32[N]. start, end: i32[N], its rows; the next tile of a group starts where it ends.
    used: i32[], how many there are, the first ones.
    """

    group: jax.Array
    start: jax.Array
    end: jax.Array
    used: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int, size: int, done: jax.Array | int = 0) -> Tiles:
        """Makes tiles for all rows, however they are spread over groups, but the first `done` of each group."""
        num_groups = sizes.shape[0]
        tile = jnp.arange(num_rows // size + num_groups, dtype=jnp.int32)
        # neither is negative: `//`, which rounds down, would be twenty operations
        tiles_of = lax.div(sizes - done + size - 1, jnp.asarray(size, sizes.dtype))
        tile_ends, row_ends = jnp.cumsum(tiles_of), jnp.cumsum(sizes)
        group = jnp.minimum((tile[:, None] >= tile_ends).sum(1, dtype=jnp.int32), num_groups - 1)
        first = (row_ends - sizes + done)[group] + (tile - (tile_ends - tiles_of)[group]) * size
        end = jnp.clip(row_ends[group], first, first + size)
        return cls(group, first, end, tile_ends[-1])

    @classmethod
    def first(cls, sizes: jax.Array, size: int, are_done: jax.Array | bool = False) -> Tiles:
        """Makes the first tile of each group, empty where it has no rows; none is used if they `are_done`."""
        group, starts = jnp.arange(sizes.shape[0], dtype=jnp.int32), jnp.cumsum(sizes) - sizes
        used = jnp.where(are_done, 0, sizes.shape[0]).astype(jnp.int32)
        return cls(group, starts, starts + jnp.minimum(sizes, size), used)
