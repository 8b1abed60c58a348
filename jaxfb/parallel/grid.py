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
    adjacent: whether it is the devices across that are next to each other: then the device at `place * across + row` is
      at that place of that row.
    """

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    across: int
    within: int
    adjacent: bool = False

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

    def scatter_across(self, x: jax.Array) -> jax.Array:
        """Returns this row's part along the first dim of the sum over the devices at this place of all rows."""
        groups = self._groups(0)
        return lax.psum_scatter(x, self.outer, scatter_dimension=0, tiled=True, axis_index_groups=groups)

    def row(self) -> jax.Array:
        """Returns the number of the row in which this device is."""
        index = lax.axis_index(self.outer)
        if self.outer != self.inner:
            return index
        return index % self.across if self.adjacent else index // self.within

    def exchange(self, x: jax.Array, cut: int, join: int) -> jax.Array:
        """Cuts x along one dim, sends each row of devices its part, and joins along another dim what they send."""
        return lax.all_to_all(x, self.outer, cut, join, axis_index_groups=self._groups(0), tiled=True)

    def _groups(self, which: int) -> Groups | None:
        """Returns the groups across (0) or within (1); None where axes of a mesh make them."""
        if self.outer != self.inner:
            return None
        return two_steps(self.size, self.across if self.adjacent else self.within)[which ^ self.adjacent]


def grids(axes: tuple[str, ...]) -> list[Grid]:
    """Returns the grids of the devices along mesh axes, outermost first, in the order of `shapes`."""
    names, found = _found(axes)
    if len(names) < 2:
        return [Grid(names, names, *shape) for shape in found]
    return [Grid(names[:-cut], names[-cut:], *shape) for cut, shape in enumerate(found, 1)]


def adjacent_grids(axes: tuple[str, ...]) -> list[Grid]:
    """Returns those in which the devices across are next to each other, in the order of `adjacent_shapes`."""
    names, found = _found(axes, adjacent=True)
    if len(names) < 2:
        return [Grid(names, names, *shape, adjacent=True) for shape in found]
    return [Grid(names[-cut:], names[:-cut], *shape, adjacent=True) for cut, shape in enumerate(found, 1)]


def _found(axes: tuple[str, ...], adjacent: bool = False) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """Returns the axes of several devices, outermost first, and the shapes of the devices along them."""
    sizes = {axis: size for axis in axes if (size := get_abstract_mesh().shape[axis]) > 1}
    shapes_of = adjacent_shapes if adjacent else shapes
    return tuple(sizes), shapes_of(tuple(sizes.values()), torus_dims(kind_here()))


def adjacent_shapes(sizes: Sequence[int], dims: int) -> list[tuple[int, int]]:
    """Returns the same as `shapes`, of grids in which the devices across are next to each other."""
    found = shapes(sizes, dims)
    return [(within, across) for across, within in found] if len(sizes) > 1 else found


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
