"""The work of Pallas kernels, which no compiler sees into: by the name of the kernel and the shapes it is given."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from jaxfb.models.attention_kernels.splash import block_size
from jaxfb.models.attention_kernels.splash_gradients import NAME, PRODUCTS
from jaxfb.models.tiles import OUTER_PRODUCT, PRODUCT

_RAGGED = "ragged-dot"  # what XLA for TPUs makes of `lax.ragged_dot`
_GROUPED_TABLES = 5
_TABLES_ON_GPUS = 3
_GRADIENTS = re.compile(rf"{NAME}_(\d+)")
_SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)_")
# scores and output; scores, their gradient and that of queries; scores, their gradient, those of keys and of values
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}


def kernel_flops(name: str, operands: Sequence[tuple[int, ...]], share: float = 1.0) -> float:
    """Returns the FLOPs of the matrix products of one call; 0 of a kernel that is not known.

    Args:
      name: the kernel's, or that of an instruction of a compiled program named after it.
      operands: their shapes; splash's are the two or three tables of its mask (blocks of queries by blocks of keys),
        then queries [R, H, T, K] and keys [R, G, S, K], or of one row [H, T, K], and others; of a causal mask the
        places of queries, without rows, or with three tables, of which each device has its own, the masks [N, block,
        block] last. A ragged product's are tables, rows [S, D] and matrices [L, D, F]; those of the kernels for GPUs in
        `jaxfb.models.grouped_kernels` three tables, rows [S, D], and matrices or the other rows [S, F]. Those of
        `splash_gradients` are three tables [N] of visits and queries [R, H, T, K].
      share: of the rows of a ragged or grouped product, those that there are; the others are space for the worst case.
    """
    if name.startswith(_RAGGED):
        return share * _ragged_flops(operands)
    if name in (PRODUCT, OUTER_PRODUCT):
        return share * _grouped_flops(*operands[_TABLES_ON_GPUS : _TABLES_ON_GPUS + 2])
    if _is_grouped(operands):
        return share * _grouped_flops(*operands[_GROUPED_TABLES : _GROUPED_TABLES + 2])
    if found := _GRADIENTS.match(name):
        return _gradients_flops(int(found[1]), operands)
    found = _SPLASH.match(name)
    if found is None:
        return 0.0
    tables = 3 if operands[2] == operands[0] else 2
    *rows_and_heads, length, size = operands[tables]
    keys = operands[tables + 1][-2]
    if tables == 3:
        width = operands[0][1 if found[1] == "dkv" else 2]
        pairs = _pairs_of_own(length, keys, operands[-1][-1], width)
    else:
        pairs = _pairs(operands, length, keys, _is_causal(name, operands))
    return 2.0 * _PRODUCTS[found[1]] * math.prod(rows_and_heads) * size * pairs


def _gradients_flops(block: int, operands: Sequence[tuple[int, ...]]) -> float:
    """Counts a pair of blocks for each visit in the tables [N], of every row and head of queries [R, H, T, K]."""
    (visits,), (rows, heads, _, size) = operands[0], operands[3]
    return 2.0 * PRODUCTS * rows * heads * size * visits * block**2


def _pairs_of_own(queries: int, keys: int, block: int, width: int) -> float:
    """Returns the (query, key) pairs of a device whose tables are as wide as a window, or as all blocks."""
    causal = queries * (keys + block) / 2
    return causal if width * block >= queries else min(causal, queries * width * block)


def _is_causal(name: str, operands: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a kernel is given places of queries, which have no rows; nor have segments where there is one
    row, two arrays.
    """
    without_rows = sum(len(shape) == 2 for shape in operands[5:])
    return without_rows > (2 if "_segmented" in name and len(operands[2]) == 3 else 0)


def _pairs(operands: Sequence[tuple[int, ...]], queries: int, keys: int, causal: bool) -> float:
    """Returns the (query, key) pairs that are computed: those of blocks of which a causal mask, or a window, lets
    something be seen.

    Queries may be some of a longer sequence, cut so that each device's see as much.
    """
    visited = math.prod(operands[0][1:]) * block_size(queries) * block_size(keys)  # fewer with a window
    return min(visited, queries * (keys + block_size(keys)) / 2) if causal else visited


def _ragged_flops(operands: Sequence[tuple[int, ...]]) -> float:
    capacity = next((shape[0] for shape in operands if len(shape) == 2), 0)
    matrices = next((shape for shape in operands if len(shape) == 3), (0, 0, 0))
    return 2.0 * capacity * matrices[1] * matrices[2]


def _is_grouped(operands: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether it is Megablox's product of grouped rows, whose name is that of whatever calls it.

    Its tables are the number of tiles [], where each group begins [L + 1], the group and the place of each tile
    [N], and the first group [1].
    """
    if [len(shape) for shape in operands[:_GROUPED_TABLES]] != [0, 1, 1, 1, 1]:
        return False
    _, _, groups, places, first = operands[:_GROUPED_TABLES]
    ranks = [len(shape) for shape in operands[_GROUPED_TABLES : _GROUPED_TABLES + 2]]
    return groups == places and first == (1,) and ranks in ([2, 2], [2, 3])


def _grouped_flops(rows: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Counts each row [S, D] with one matrix of [L, D, F], or transposed; or, for the gradient of the matrices, with a
    row of [S, F].
    """
    return 2.0 * rows[0] * (math.prod(other[1:]) if len(other) == 3 else rows[1] * other[1])
