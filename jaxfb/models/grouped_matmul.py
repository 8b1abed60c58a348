"""Rows sorted by group, each group multiplied by its own matrix: what experts are made of.

`jax.lax.ragged_dot` on TPUs, kernels on NVIDIA GPUs (`grouped_kernels.py`). XLA for CPUs and GPUs multiplies every row
by every matrix, and so does XLA for TPUs in the gradient of the matrices: there, and where there is no kernel, each
group's rows are cut in tiles and a loop multiplies a tile at a time, so that the work is that of the rows there are,
and not of the groups, nor of the space for the worst case.

Shapes: S = rows, L = groups, D = width before, F = width after, B = rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxfb.hlo import FIRST_TURNS
from jaxfb.mesh import GPU_PLATFORMS, by_platform, platform_here
from jaxfb.models.tiles import Tiles
from jaxfb.parallel.expert_rows.exchange import or_empty
from jaxfb.platforms.compat import custom_vjp

TILE, TILE_OF_GPUS = 1024, 2048
"""Rows at most. They must cost more to multiply than it costs to read and write a matrix' gradient, which GPUs do three
times for a tile: by XLA's compiler a step of Mixtral 8x22B on 128 H100 took 32.8 s in place of 36.8 s with 1024."""
KEPT = "grouped_matmul"
"""The products' name for `remat`, which sees no product inside of a branch by platform."""


class Kernels(NamedTuple):
    """The matrices of all groups, and the way on which their gradient is summed over several products.

    narrow: float[L, D, F], what rows are multiplied by; it has no gradient.
    wide:   the same in float32 at least, which no product reads; its gradient is the matrices'.
    begun:  float[], whose value nothing reads. Its gradient tells the backward whether the gradient of `wide` has been
      written yet (1) or is still undefined (0). The first product then writes it, and needs no zeros to add to.
    """

    narrow: jax.Array
    wide: jax.Array
    begun: jax.Array

    @classmethod
    def of(cls, kernels: jax.Array) -> Kernels:
        return cls(lax.stop_gradient(kernels), *_summed(jnp.dtype(kernels.dtype), kernels))

    def multiply(self, rows: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Kernels]:
        """Returns (`grouped_matmul` of the rows, the matrices for the next rows).

        Each product gets the matrices from the one before it. So in the backward a loop over tiles adds to the sum
        that the loop before it made; sums of their own would be written, read and added once more for each product.
        """
        out, wide, begun = _multiply(rows, *self, sizes)
        return out, Kernels(self.narrow, wide, begun)

    def or_empty(self) -> Kernels:
        """Returns these gradients; if there is none of `wide`, an undefined one that is yet to be written."""
        if not isinstance(self.wide, SymbolicZero):
            return self
        return self._replace(wide=or_empty(self.wide), begun=jnp.zeros((), self.wide.dtype))


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


@custom_vjp(0)
def _summed(dtype, kernels):
    wide = jnp.promote_types(dtype, jnp.float32)
    return kernels.astype(wide), jnp.zeros((), wide)


_summed.defvjp(
    lambda dtype, kernels: (_summed(dtype, kernels), None),
    lambda dtype, _, sums_and_begun: (sums_and_begun[0].astype(dtype),),
)


@jax.custom_vjp
def _multiply(rows, narrow, wide, begun, sizes):
    return _product(rows, narrow, sizes), wide, begun


def _forward(rows, narrow, wide, begun, sizes):
    # frozen kernels have no gradient, so rows are not kept for it
    kept = rows.value if wide.perturbed else None
    out = checkpoint_name(_product(rows.value, narrow.value, sizes.value), KEPT)
    return (out, wide.value, begun.value), (kept, narrow.value, sizes.value)


def _backward(kept, cotangents):
    (rows, narrow, sizes), (cotangent, *of_sums) = kept, cotangents
    if isinstance(cotangent, SymbolicZero):
        return None, None, *(None if isinstance(one, SymbolicZero) else one for one in of_sums), None
    of_rows, sums, begun = _product(cotangent, narrow, sizes, transposed=True), None, None
    if rows is not None:
        _, sums, begun = Kernels(narrow, *of_sums).or_empty()
        sums, begun = _outer_product(rows, cotangent, sizes, sums, begun), jnp.ones_like(begun)
    return of_rows, None, sums, begun, None


_multiply.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(rows, kernels, sizes, transposed=False):
    ways: dict[str, Callable] = dict.fromkeys(GPU_PLATFORMS, partial(tiled_product, most=TILE_OF_GPUS))
    ways |= {"cpu": tiled_product, "default": lax.ragged_dot}
    if transposed:
        ways = {platform: _of_transposed(way) for platform, way in ways.items()}
    if gpu_kernels := _gpu_kernels_for(rows, kernels.shape):
        ways["cuda"] = partial(gpu_kernels.product, transposed=transposed)
    return by_platform(rows, kernels, sizes, **ways)


def _of_transposed(multiply):
    """Returns the same product for matrices [L, F, D]."""
    return lambda rows, kernels, sizes: multiply(rows, kernels.swapaxes(1, 2), sizes)


def _outer_product(rows, cotangent, sizes, sums, begun):
    ways: dict[str, Callable] = dict.fromkeys(GPU_PLATFORMS, partial(tiled_outer_product, most=TILE_OF_GPUS))
    if gpu_kernels := _gpu_kernels_for(rows, sums.shape):
        ways["cuda"] = gpu_kernels.outer_product
    return by_platform(rows, cotangent, sizes, sums, begun, **ways, default=tiled_outer_product)


def _gpu_kernels_for(rows, shape):
    """Returns the module `grouped_kernels` if it can multiply these rows by matrices of that shape, otherwise None."""
    if platform_here() != "gpu":
        return None
    try:
        from jaxfb.models import grouped_kernels  # Pallas takes a while to import
    except ImportError:  # a JAX without Pallas for Triton, which will be removed from it one day
        return None
    return grouped_kernels if grouped_kernels.can_multiply(rows, shape) else None


def tile_size(num_rows: int, num_groups: int, most: int = TILE) -> int:
    """Returns B; the last tile of each group is part empty, so a group should have several."""
    return min(most, num_rows, max(8, num_rows // (2 * num_groups)))


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


def tiled_outer_product(rows, cotangent, sizes, sums, begun, most=TILE):
    """Adds the gradient of the matrices to `sums` [L, D, F], in whose dtype it is summed, in a loop over tiles of
    `most` rows at most. If `begun` is 0, a loop before it writes the gradient of each group's first tile instead.

    With both in one loop, XLA for TPUs copies a matrix' sum before each product that adds to it.
    """
    number, size = rows.shape[0], tile_size(rows.shape[0], sizes.shape[0], most)
    first = Tiles.first(sizes, size, are_done=begun != 0)
    others = Tiles.of(sizes, number, size, done=jnp.where(begun == 0, first.end - first.start, 0))
    product = partial(_outer_product_of_tile, rows, cotangent, size, sums.dtype)

    def write(tile, sums):
        return lax.dynamic_update_index_in_dim(sums, product(first, tile), first.group[tile], 0)

    def add(tile, sums):
        return sums.at[others.group[tile]].add(product(others, tile))

    with jax.named_scope(FIRST_TURNS):
        sums = lax.fori_loop(0, first.used, write, sums)
    return lax.fori_loop(0, others.used, add, sums)


def _outer_product_of_tile(rows, cotangent, size, dtype, tiles, tile):
    """Returns the sum over a tile's rows of rows[s] times cotangent[s], [D, F]; zeros of an empty one."""
    start, there = _place(tiles, tile, rows.shape[0], size)
    left, right = (
        jnp.where(there, _slice(x, start, size), jnp.zeros((), x.dtype)) for x in (rows, cotangent)
    )
    return jnp.matmul(left.T, right, preferred_element_type=dtype)


def _place(tiles: Tiles, tile: jax.Array, number: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row at which a tile is read and written, bool[B, 1]: which of the rows from there are its own).

    Where `size` rows do not follow its first, it is read from further ahead.
    """
    start = jnp.minimum(tiles.start[tile], number - size)
    row = start + jnp.arange(size, dtype=jnp.int32)
    return start, ((row >= tiles.start[tile]) & (row < tiles.end[tile]))[:, None]


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size)
