"""Arranges the devices along mesh axes in a grid, for collectives across its rows and within each of them.

All functions here run inside `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import get_abstract_mesh

from jaxfb.mesh import kind_here
from jaxfb.parallel.collectives import Groups, neighbours, summed_in, torus_dims, two_steps


@dataclass(frozen=True)
class Grid:
    """Rows of devices: the device at `row * within + place` along the axes is at that place of that row.

    outer, inner: the mesh axes across and within rows; the same one axis for both, or several that differ.
    across: how many rows there are. within: how many devices are in a row.
    """

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    across: int
    within: int

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return self.across * self.within

    def gather_across(self, x: jax.Array) -> jax.Array:
        """Gathers along the first dim what the devices at this place have in all rows."""
        return lax.all_gather(x, self.outer, axis=0, tiled=True, axis_index_groups=self._groups(0))

    def gather_within(self, x: jax.Array, dim: int) -> jax.Array:
        """Gathers along `dim` what the devices in this row have."""
        return lax.all_gather(x, self.inner, axis=dim, tiled=True, axis_index_groups=self._groups(1))

    def scatter_within(self, x: jax.Array, dim: int, dtype: Any) -> jax.Array:
        """Returns this device's part along `dim` of the sum over its row; dtype: as of `reduce_scatter`."""
        scatter = partial(lax.psum_scatter, axis_name=self.inner, scatter_dimension=dim, tiled=True)
        return summed_in(dtype, partial(scatter, axis_index_groups=self._groups(1)), x)

    def exchange(self, x: jax.Array, cut: int, join: int) -> jax.Array:
        """Cuts x along one dim, sends each row of devices its part, and joins along another dim what they send."""
        return lax.all_to_all(x, self.outer, cut, join, axis_index_groups=self._groups(0), tiled=True)

    def _groups(self, which: int) -> Groups | None:
        """Returns the groups across (0) or within (1); None where axes of a mesh make them."""
        return two_steps(self.size, self.within)[which] if self.outer == self.inner else None


def grids(axes: tuple[str, ...]) -> list[Grid]:
    """Returns the grids of the devices along mesh axes, outermost first, in the order of `shapes`."""
    sizes = {axis: size for axis in axes if (size := get_abstract_mesh().shape[axis]) > 1}
    names = tuple(sizes)
    found = shapes(tuple(sizes.values()), torus_dims(kind_here()))
    if len(names) < 2:
        return [Grid(names, names, *shape) for shape in found]
    return [Grid(names[:-cut], names[-cut:], *shape) for cut, shape in enumerate(found, 1)]


def shapes(sizes: Sequence[int], dims: int) -> list[tuple[int, int]]:
    """Returns (rows, devices in a row) of the grids of devices along axes of these sizes, those with the most rows
    first.

    Of one axis, a row is one dimension of the torus, or all but one; of several, some of the axes.

    dims: of the torus.
    """
    if len(sizes) > 1:
        return [(math.prod(sizes[:cut]), math.prod(sizes[cut:])) for cut in range(len(sizes) - 1, 0, -1)]
    size = math.prod(sizes)
    row = neighbours(size, dims)
    return [(size // n, n) for n in sorted({row, size // row})] if row else []
