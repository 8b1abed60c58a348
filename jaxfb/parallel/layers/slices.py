"""Takes stacked leaves, [num_layers, ...], apart into slices of a layer on each device, and writes slices back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.host_memory import fetched, put_back
from jaxfb.parallel.sharding import axes_of, in_layers, moment_specs

PyTree = Any


@dataclass(frozen=True)
class Slices:
    """Cuts the first dim of stacked leaves: `steps` slices, each with as many layers of every one of `shards` devices.

    A leaf is opened before it is cut, to [shards, layers of a device, ...] if shards > 1, so that a slice moves no
    layer between devices.
    """

    steps: int
    shards: int

    def opened(self, leaf: jax.Array) -> jax.Array:
        """Returns a whole leaf in the shape that `take` and `put` use."""
        return leaf if self.shards == 1 else leaf.reshape(self.shards, -1, *leaf.shape[1:])

    def closed(self, leaf: jax.Array) -> jax.Array:
        """Returns an opened leaf, or what `lax` cut of one, in its own shape."""
        return leaf if self.shards == 1 else leaf.reshape(-1, *leaf.shape[2:])

    def take(self, leaf: jax.Array, step: Any, place: NamedSharding) -> jax.Array:
        """Returns a slice of an opened leaf, on the devices; place: the whole leaf's."""
        part = lax.dynamic_slice_in_dim(leaf, step * self._size(leaf), self._size(leaf), self._dim)
        return self.closed(fetched(part, self._place(place)))

    def put(self, leaf: jax.Array, part: jax.Array, step: Any, place: NamedSharding) -> jax.Array:
        """Returns an opened leaf with one slice replaced, which is moved to where the leaf is."""
        part = put_back(self.opened(part), self._place(place))
        return lax.dynamic_update_slice_in_dim(leaf, part, step * self._size(leaf), self._dim)

    def shape(self, leaf: Any) -> tuple[int, ...]:
        """Returns the shape of a slice."""
        return (leaf.shape[0] // self.steps, *leaf.shape[1:])

    @property
    def _dim(self) -> int:
        return 0 if self.shards == 1 else 1

    def _size(self, leaf: jax.Array) -> int:
        return leaf.shape[self._dim] // self.steps

    def _place(self, place: NamedSharding) -> NamedSharding:
        if self.shards == 1:
            return place
        first, *others = place.spec or (None,)
        return NamedSharding(place.mesh, P(first, None, *others), memory_kind=place.memory_kind)


def slices_of(leaves: list[Any], places: list[NamedSharding]) -> Slices:
    """Returns how stacked leaves with those NamedShardings are cut, so that no slice moves a layer between devices."""
    shards = math.lcm(*(_shards(place) for place in places))
    if not leaves or any(leaf.shape[0] % shards for leaf in leaves):
        return Slices(1, 1)
    return Slices(math.gcd(*(leaf.shape[0] // shards for leaf in leaves)), shards)


def stacked_params(params: PyTree) -> PyTree:
    """Returns a tree of bool: which of a `Pipelined`'s parameters are [num_layers, ...]."""
    return jax.tree_util.tree_map_with_path(lambda path, _: in_layers(path), params)


def stacked_moments(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns a tree of bool: which arrays of an optimizer's state mirror such a parameter."""
    marks = jax.tree.map(lambda stacked: P("layers") if stacked else P(), stacked_params(params))
    found = moment_specs(opt_state, params, marks)
    return jax.tree.map(lambda mark: mark != P(), found, is_leaf=lambda mark: isinstance(mark, P))


def _shards(place: NamedSharding) -> int:
    first = place.spec[0] if len(place.spec) else None
    return math.prod(place.mesh.shape[axis] for axis in axes_of(first))
