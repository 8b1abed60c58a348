"""Exchanges layers that are cut over devices, so that each device has some of them whole, and back.

For what cannot be computed on a part of a layer's matrix without sending intermediate results, such as an
orthogonalisation. Every device sends and receives as much as it holds, once for each axis and direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]


def map_whole_layers(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, place: NamedSharding
) -> jax.Array:
    """Returns `jax.vmap(function)(x)`, computed on whole layers.

    Args:
      function: of one layer's [..., rows, columns], keeping its shape.
      x: [layers, ..., rows, columns], cut as `place` tells: layers by stage, rows and columns in any way.
    Returns:
      The same, cut in the same way.
    """
    cut = _axes_of(place, x.ndim)
    axes = _shares(place.mesh, cut, x.shape[0])
    if not axes:
        return jax.vmap(function)(x)
    # an axis at a time: of several XLA makes no exchange, but gathers all
    cuts = [_Cut(cut[0], axes[:moved], _without(cut[1:], axes[:moved])) for moved in range(len(axes) + 1)]
    by_stage = x.reshape(_size(place.mesh, cut[0]), -1, *x.shape[1:])
    beyond = [(0, 0), (0, -by_stage.shape[1] % _size(place.mesh, axes))] + [(0, 0)] * (x.ndim - 1)
    padded = jnp.pad(by_stage, beyond, constant_values=1)  # no zeros: a function may divide by a norm
    whole = reduce(partial(_put, place.mesh), cuts, padded)
    found = reduce(partial(_put, place.mesh), reversed(cuts), jax.vmap(jax.vmap(function))(whole))
    return found[:, : by_stage.shape[1]].reshape(x.shape)


class _Cut(NamedTuple):
    """Describes how [stages, layers, ...] are cut."""

    stages: Axes
    layers: Axes
    others: tuple[Axes, ...]


def _put(mesh: Mesh | AbstractMesh, x: jax.Array, cut: _Cut) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(cut.stages, cut.layers, *cut.others)))


def _shares(mesh: Mesh | AbstractMesh, cut: tuple[Axes, ...], layers: int) -> Axes:
    """Returns the axes that share out layers: those that cut their matrices, and while there are more layers than
    devices, those along which they are replicated.
    """
    used, chosen = {axis for axes in cut for axis in axes}, [*cut[-2], *cut[-1]]
    for axis in mesh.axis_names:
        if axis not in used and _size(mesh, (*cut[0], *chosen, axis)) <= layers:
            chosen.append(axis)
    return tuple(axis for axis in chosen if mesh.shape[axis] > 1)


def _axes_of(place: NamedSharding, ndim: int) -> tuple[Axes, ...]:
    """Returns the axes along which each dimension is cut."""
    named = [() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in place.spec]
    return (*named, *[()] * (ndim - len(named)))


def _without(dims: tuple[Axes, ...], moved: Axes) -> tuple[Axes, ...]:
    return tuple(tuple(axis for axis in axes if axis not in moved) for axes in dims)


def _size(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
