"""Kernels for NVIDIA GPUs that multiply rows sorted by group, written in Pallas for Triton.

The alternative, a loop over tiles, turns as often as there are tiles, a number that only the GPU knows: the host waits
for the GPU at every turn. A kernel is one launch, its tiles are small, and the gradient of a matrix is summed in
registers. The matrices are the kernels of `grouped_matmul.py`; here that word is kept for programs of a GPU.

Shapes: S = rows, L = groups, D = width before, F = width after, N = tiles at most.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as tl

from jaxfb.mesh import kind_here
from jaxfb.models.tiles import OUTER_PRODUCT, PRODUCT, Tiles
from jaxfb.parallel.tensor import num_shards, on_whole
from jaxfb.platforms.kinds import compute_capability


class Blocks(NamedTuple):
    """Describes what one program of a kernel computes: [m, n] of a result, over k of the contracted dim at a time.

    warps: of 32 threads each. stages: steps over k whose rows and columns are in shared memory at the same time.
    band: blocks of rows that are computed next to each other, so that the columns they share stay in the cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    band: int


SMALL = Blocks(m=128, n=128, k=64, warps=4, stages=3, band=8)
"""96 KiB of shared memory, as every GPU from Ampere on has."""
LARGE = Blocks(m=128, n=256, k=64, warps=8, stages=3, band=16)
"""144 KiB. On an H200, 32,768 rows of 2048 by 8 matrices to 4096: 978 us (dense product 726, a loop over tiles 1893),
transposed 866 us (758) and the gradient of the matrices 1023 us (730, loop 2160); with `SMALL` 988, 927 and 1075 us."""
_WITH_LARGE = re.compile(r"\b(A100|A800|G?H100|G?H200|H800|H20|G?B200|B300)\b")


def can_multiply(rows: jax.Array, shape: tuple[int, int, int]) -> bool:
    """Returns whether there are kernels for products of rows [S, D] or [S, F] with matrices of a shape [L, D, F].

    Kernels address an array by 32 bits, XLA's partitioner cannot cut them over `tensor`, and GPUs before Ampere have
    too little shared memory. A program that is compiled without a GPU is taken to be for a later one.
    """
    _, *widths = shape
    is_old = 0 < compute_capability() < 8
    return (
        not is_old
        and num_shards() == 1
        and rows.dtype in (jnp.bfloat16, jnp.float16)
        and not any(width % SMALL.n for width in widths)
        and max(rows.shape[0] * max(widths), math.prod(shape)) < 2**31
    )


def blocks_for(width: int) -> Blocks:
    """Returns the blocks for a result of this width on the GPUs of the mesh in context; `SMALL` if none is known."""
    large = _WITH_LARGE.search(kind_here() or "") and width % LARGE.n == 0
    return LARGE if large else SMALL


def product(
    rows: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Computes `jaxfb.models.grouped_matmul.grouped_matmul`, with `transposed` for matrices [L, F, D].

    interpret: runs it on any device, slowly.
    """
    (number, before), after = rows.shape, matrices.shape[1 if transposed else 2]
    blocks = blocks_for(after)
    tiles = Tiles.of(sizes, number, blocks.m)
    grid = tiles.group.shape[0], after // blocks.n
    steps = before // blocks.k
    body = partial(_product_kernel, blocks=blocks, grid=grid, steps=steps, transposed=transposed)
    out = jax.ShapeDtypeStruct((number, after), rows.dtype)
    call = _call(body, PRODUCT, blocks, grid, out, interpret=interpret)
    return on_whole(call, tiles.group, tiles.start, tiles.end, rows, matrices)


def outer_product(
    rows: jax.Array, cotangent: jax.Array, sizes: jax.Array, sums: jax.Array, begun: jax.Array,
    *, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """Returns sums + the gradient of the matrices, float[L, D, F], or if `begun` is 0 the gradient alone."""
    ends, blocks = jnp.cumsum(sizes), blocks_for(cotangent.shape[1])
    grid = sizes.shape[0], rows.shape[1] // blocks.m, cotangent.shape[1] // blocks.n
    body = partial(_outer_product_kernel, blocks=blocks, grid=grid)
    out = jax.ShapeDtypeStruct(sums.shape, sums.dtype)
    call = _call(body, OUTER_PRODUCT, blocks, grid, out, {5: 0}, interpret=interpret)
    return on_whole(call, ends - sizes, ends, begun[None], rows, cotangent, sums)


def _call(body, name, blocks, grid, out, aliases=None, *, interpret):
    return pl.pallas_call(
        body,
        name=name,
        grid=(math.prod(grid),),
        out_shape=out,
        input_output_aliases=aliases or {},
        compiler_params=tl.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
    )


def _product_kernel(groups, starts, ends, rows, matrices, out, *, blocks, grid, steps, transposed):
    """Multiplies one tile's rows by some columns of its group's matrix."""
    num_tiles, num_columns = grid
    tile, column = _place(pl.program_id(0), num_tiles, num_columns, blocks.band)
    group, start, end = groups[tile], starts[tile], ends[tile]
    columns = pl.ds(column * blocks.n, blocks.n)

    @pl.when(start < end)
    def _():
        there = _there(start, end, blocks.m)

        def step(k, sums):
            contracted = pl.ds(k * blocks.k, blocks.k)
            left = tl.load(rows.at[pl.ds(start, blocks.m), contracted], mask=there, other=0)
            where = (group, columns, contracted) if transposed else (group, contracted, columns)
            return sums + tl.dot(left, tl.load(matrices.at[where]), trans_b=transposed)

        wide = jnp.promote_types(rows.dtype, jnp.float32)
        sums = lax.fori_loop(0, steps, step, jnp.zeros((blocks.m, blocks.n), wide))
        tl.store(out.at[pl.ds(start, blocks.m), columns], sums.astype(out.dtype), mask=there)


def _outer_product_kernel(starts, ends, begun, rows, cotangent, sums, out, *, blocks, grid):
    """Sums [m, n] of one group's gradient over all of its rows."""
    _, num_rows, num_columns = grid
    program, of_group = pl.program_id(0), num_rows * num_columns
    group = program // of_group
    row, column = _place(program % of_group, num_rows, num_columns, blocks.band)
    start, end = starts[group], ends[group]
    left_columns, right_columns = pl.ds(row * blocks.m, blocks.m), pl.ds(column * blocks.n, blocks.n)

    def step(k, gradient):
        first = start + k * blocks.k
        at, there = pl.ds(first, blocks.k), _there(first, end, blocks.k)
        left = tl.load(rows.at[at, left_columns], mask=there, other=0)
        right = tl.load(cotangent.at[at, right_columns], mask=there, other=0)
        return gradient + tl.dot(left, right, trans_a=True)

    steps = (end - start + blocks.k - 1) // blocks.k
    gradient = lax.fori_loop(0, steps, step, jnp.zeros((blocks.m, blocks.n), out.dtype))
    here = group, left_columns, right_columns
    has_begun = jnp.broadcast_to(begun[0] != 0, gradient.shape)
    tl.store(out.at[here], tl.load(sums.at[here], mask=has_begun, other=0) + gradient)


def _place(program, num_rows: int, num_columns: int, band: int):
    """Returns (block of rows, block of columns) of a program: a band of rows, column after column, then the next."""
    of_band = band * num_columns
    first, inside = program // of_band * band, program % of_band
    height = jnp.minimum(num_rows - first, band)
    return first + inside % height, inside // height


def _there(first, end, number: int):
    """Returns bool[number, 1]: which of so many rows from the first lie before the end."""
    return (first + jnp.arange(number, dtype=jnp.int32) < end)[:, None]
