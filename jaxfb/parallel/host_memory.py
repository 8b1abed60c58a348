"""Keeps arrays of a state in the host's memory between updates, where the device has pinned memory of its host."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from jaxfb.refusal import Refused, choice

PyTree = Any
HOST = "pinned_host"
MEMORIES = ("device", "host")


def check_memory(optimizer_memory: Any, mesh: Any) -> str:
    """Returns where an optimizer's state is kept.

    Raises:
      ValueError: it is none of MEMORIES, or the devices of the mesh reach no pinned memory of their host.
    """
    asked = choice("optimizer_memory", optimizer_memory, MEMORIES)
    if asked == "host" and not isinstance(mesh, AbstractMesh):  # on an abstract mesh nothing runs
        device = mesh.devices.flat[0]
        if HOST not in _memories(device):
            raise Refused(
                f'optimizer_memory="host" needs devices that reach pinned memory of their host, and '
                f'{device.device_kind} does not; use optimizer_memory="device"',
                [{"optimizer_memory": "device"}],
            )
    return asked


def _memories(device: Any) -> list[str]:
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):  # a device that is only compiled for
        return [HOST]


def is_on_host(place: Any) -> bool:
    """Returns whether a sharding is in the host's memory."""
    return getattr(place, "memory_kind", None) == HOST


def on_host(places: PyTree, tree: PyTree) -> PyTree:
    """Returns the NamedShardings of a tree with its arrays in the host's memory; vectors, being small, stay."""
    return jax.tree.map(
        lambda place, leaf: place.with_memory_kind(HOST) if len(leaf.shape) > 1 else place, places, tree
    )


def on_device(place: Any) -> NamedSharding:
    """Returns the same sharding in the device's memory."""
    return NamedSharding(place.mesh, place.spec) if is_on_host(place) else place


def brought(leaf: jax.Array) -> jax.Array:
    """Returns, outside of jit, an array on the devices."""
    return jax.device_put(leaf, on_device(leaf.sharding)) if is_on_host(leaf.sharding) else leaf


def fetched(tree: PyTree, places: PyTree) -> PyTree:
    """Returns, inside jit, the arrays of a tree on the devices; places: their NamedShardings."""
    return jax.tree.map(
        lambda leaf, place: jax.device_put(leaf, on_device(place)) if is_on_host(place) else leaf,
        tree,
        places,
    )


def put_back(tree: PyTree, places: PyTree) -> PyTree:
    """Returns, inside jit, arrays on the devices moved to their NamedShardings, in the host's memory or not."""

    def put(leaf, place):
        leaf = jax.lax.with_sharding_constraint(leaf, on_device(place))
        return jax.device_put(leaf, place) if is_on_host(place) else leaf

    return jax.tree.map(put, tree, places)


def constrained(tree: PyTree, places: PyTree) -> PyTree:
    """Returns arrays with their NamedShardings, as `with_sharding_constraint` does; those in the host's memory as
    they are.
    """
    return jax.tree.map(
        lambda leaf, place: leaf if is_on_host(place) else jax.lax.with_sharding_constraint(leaf, place),
        tree,
        places,
    )
