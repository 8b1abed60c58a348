"""Stores a microbatch's values in a pipeline between two ticks.

A stage writes and reads its own a layer at a time, so that no stage's worth of them is ever stacked and copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


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
            at = (self.index, *place, *(jnp.int32(0),) * value.ndim)
            return lax.dynamic_update_slice(
                leaf, value.astype(leaf.dtype).reshape((1,) * (1 + len(place)) + value.shape), at
            )

        return Slot(jax.tree.map(put, self.buffers, values), self.index)

    def get(self, *place: jax.Array) -> PyTree:
        """Reads buffers[index], or buffers[index, place]."""

        def get(leaf):
            where = 1 + len(place)
            at = (self.index, *place, *(jnp.int32(0),) * (leaf.ndim - where))
            return lax.dynamic_slice(leaf, at, (1,) * where + leaf.shape[where:]).reshape(leaf.shape[where:])

        return jax.tree.map(get, self.buffers)
