"""Stores a microbatch's values in a pipeline between two ticks.

What a stage keeps is written and read a layer at a time, so that the values of all its layers are never stacked and
copied.

Buffers may be in the host's memory; a value moves there as it is written, and back as it is read. The TPU's compiler
(libtpu 0.0.48) runs both beside other work: an input is written while the next layer runs, and read while the layer
behind runs its backward (`reads.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.parallel.row_order import in_rows
from jaxfb.types import PyTree

# Indices of slots, chunks and layers are never negative. JAX would count negative ones from the end, with three
# operations for every index of every leaf: more than half of those in a small model's pipeline.
read = partial(lax.dynamic_slice, allow_negative_indices=False)
write = partial(lax.dynamic_update_slice, allow_negative_indices=False)
read_one = partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
FROM_START = (np.int32(0),)


class Slot(NamedTuple):
    """Selects one of many places in buffers that a loop carries.

    buffers: leaves [num_slots, ...]; [num_slots, l, ...] where each layer has its own.
    index:   i32[], which of them.
    """

    buffers: PyTree
    index: jax.Array

    def put(self, values: PyTree, *place: jax.Array) -> Slot:
        """Writes values to buffers[index], or to buffers[index, place]."""

        def put(leaf, value):
            at = (self.index, *place, *FROM_START * value.ndim)
            value = value.astype(leaf.dtype).reshape((1,) * (1 + len(place)) + value.shape)
            value = _moved(value, jax.typeof(leaf).memory_space)
            return self.ordered(write(self.ordered(leaf), value, at))

        return self._replace(buffers=jax.tree.map(put, self.buffers, values))

    def get(self, *place: jax.Array) -> PyTree:
        """Reads buffers[index], or buffers[index, place]."""

        def get(leaf):
            where = 1 + len(place)
            at = (self.index, *place, *FROM_START * (leaf.ndim - where))
            value = read(self.ordered(leaf), at, (1,) * where + leaf.shape[where:])
            return _moved(value, jax.memory.Space.Device).reshape(leaf.shape[where:])

        return jax.tree.map(get, self.buffers)

    def ordered(self, leaf: jax.Array) -> jax.Array:
        """Returns a buffer in the order in which it is kept: any."""
        return leaf


class SlotInRows(Slot):
    """Selects one of many places in buffers that TPUs keep in the order of their rows.

    For pipelines with several chunks on a device: where forward and backward asked for two orders, the TPU's compiler
    copied all slots in every tick (libtpu 0.0.48: 8B on v5p, pipe 16, zb_v, remat none, 13.3 s a step in place of 9.1
    s). With one chunk they do not, and of sequences in pieces a given order costs memory: 83.3 GB in place of 70.1 GB
    of 8B at 131,072 tokens.
    """

    def ordered(self, leaf: jax.Array) -> jax.Array:
        """Returns the buffer in the order of its rows."""
        return in_rows(leaf)


def read_layer(layers: PyTree, place: jax.Array, chunk: jax.Array | None = None) -> PyTree:
    """Returns a layer's leaves of those of all, [l, ...]; chunk: of [num_chunks, l, ...], from that chunk."""
    if chunk is None:
        return jax.tree.map(lambda leaf: read_one(leaf, place), layers)
    return Slot(layers, chunk).get(place)


def empty_slots(shapes: PyTree, number: int, on_host: bool = False) -> PyTree:
    """Returns buffers [number, ...] for each leaf of `shapes`: zeros, or with on_host uncleared memory of the host.

    What is read of a slot before anything was written to it is masked. XLA for GPUs would make zeros on the device, and
    copy them to the host: a step of 14B on 8 H200 would take 66.7 GB and 64.9 s in place of 50.1 GB and 63.8 s.
    """
    if not on_host:
        return jax.tree.map(lambda leaf: jnp.zeros((number, *leaf.shape), leaf.dtype), shapes)
    host = jax.memory.Space.Host
    return jax.tree.map(lambda leaf: _moved(lax.empty((number, *leaf.shape), leaf.dtype), host), shapes)


def _moved(value: jax.Array, space: Any) -> jax.Array:
    """Returns the value in that `jax.memory.Space`: itself where it is there already."""
    return value if jax.typeof(value).memory_space == space else jax.device_put(value, space)
