"""Splits replicated rows over a mesh axis: every device computes its share, then all-gathers the results.

Used after a pipeline's last stage, where all devices have the same hidden states. In the gradient, too, a
value that every device has is one value: its cotangent is equal on all of them, and not one part on each.

Of R rows device i takes the n = ceil(R / axis size) from i * n on; where they do not divide, the last ones are
repeated and results for the repetitions are dropped. Everything here runs inside `jax.shard_map`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.parallel.collectives import psum, psum_scatter_of_one
from jaxfb.platforms.compat import custom_vjp


def own(x: jax.Array, axis: str) -> jax.Array:
    """Returns this device's rows of replicated data (tokens, masks, keys): [R, ...] -> [n, ...]. No gradient."""
    return x[jnp.minimum(_places(x.shape[0], axis), x.shape[0] - 1)]


def is_real(rows: int, axis: str) -> jax.Array:
    """Returns bool[n]: which of this device's rows are not repetitions."""
    return _places(rows, axis) < rows


@custom_vjp(1)
def take(x: jax.Array, axis: str) -> jax.Array:
    """Returns this device's rows of a replicated array: [R, ...] -> [n, ...]. Its gradient is gathered from all
    devices.
    """
    return own(x, axis)


def _take_backward(axis, rows, cotangent):
    return (lax.all_gather(cotangent, axis, axis=0, tiled=True)[: rows.shape[0]],)


take.defvjp(lambda x, axis: (own(x, axis), jnp.zeros(x.shape[:1], bool)), _take_backward)


@custom_vjp(1, 2)
def give(x: jax.Array, axis: str, rows: int) -> jax.Array:
    """All-gathers the results of all devices: [n, ...] -> [R, ...]. Its gradient stays with each row's device."""
    return lax.all_gather(x, axis, axis=0, tiled=True)[:rows]


def _give_backward(axis, rows, _, cotangent):
    real = is_real(rows, axis).reshape(-1, *[1] * (cotangent.ndim - 1))
    return (jnp.where(real, own(cotangent, axis), 0),)


give.defvjp(lambda x, axis, rows: (give(x, axis, rows), None), _give_backward)


def take_sum(x: jax.Array, axis: str) -> jax.Array:
    """Returns this device's rows of the sum over `axis` of parts [R, ...], of which each device has one."""
    missing = _per_device(x.shape[0], axis) * lax.axis_size(axis) - x.shape[0]
    padded = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    return psum_scatter_of_one(padded, axis, 0)


def place(x: jax.Array, axis: str, rows: int) -> jax.Array:
    """Returns this device's rows [n, ...] at their places among [R, ...] and zeros elsewhere: a part of a sum over
    `axis`.
    """
    everywhere = jnp.zeros((lax.axis_size(axis) * x.shape[0], *x.shape[1:]), x.dtype)
    return lax.dynamic_update_slice_in_dim(everywhere, x, lax.axis_index(axis) * x.shape[0], 0)[:rows]


@custom_vjp(1)
def total(x: jax.Array, axis: str) -> jax.Array:
    """Sums over `axis` on every device; each part's gradient is that of the sum."""
    return psum(x, axis)


total.defvjp(lambda x, axis: (psum(x, axis), None), lambda axis, _, cotangent: (cotangent,))


def _per_device(rows: int, axis: str) -> int:
    return -(-rows // lax.axis_size(axis))


def _places(rows: int, axis: str) -> jax.Array:
    """Returns i32[n], where this device's rows are among all; those that are none of these R are repetitions."""
    per_device = _per_device(rows, axis)
    return lax.axis_index(axis) * per_device + jnp.arange(per_device)
