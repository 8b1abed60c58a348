"""Keeps an array in the order of its rows, which a TPU's compiler is otherwise free to change."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxfb.mesh import platform_here


def in_rows(leaf: jax.Array) -> jax.Array:
    """Returns the same array, on TPUs and in the device's memory in the order of its rows."""
    on_device = jax.typeof(leaf).memory_space == jax.memory.Space.Device
    if leaf.ndim < 2 or not on_device or platform_here() != "tpu":
        return leaf
    return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim))))
