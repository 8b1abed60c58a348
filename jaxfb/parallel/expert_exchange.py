"""Sends rows to the devices that have their experts, and back: one ragged all-to-all over `expert` each.

Shapes: S = rows of this device, D = width, L = experts of a device, X = size of the axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.compat import custom_vjp

AXIS = "expert"


@custom_vjp(2, 3)
def send(rows: jax.Array, counts: jax.Array, most: int, num_rows: int) -> jax.Array:
    """Sends rows [S, D], packed by owner, to their owners: [X * most, D], those of device x from x * most on.

    counts: i32[X, X, L], rows of each device for each device's experts.
    """
    return _route(rows, counts, most)


@custom_vjp(2, 3)
def bring_back(out: jax.Array, counts: jax.Array, most: int, num_rows: int) -> jax.Array:
    """Sends rows back, the inverse and transpose of `send`: [X * most, D] -> [S, D] on the devices that they came
    from.
    """
    return _route_back(out, counts, most, num_rows)


send.defvjp(
    lambda rows, counts, most, num_rows: (_route(rows, counts, most), counts),
    lambda most, num_rows, counts, cotangent: (_route_back(cotangent, counts, most, num_rows), None),
)
bring_back.defvjp(
    lambda out, counts, most, num_rows: (_route_back(out, counts, most, num_rows), counts),
    lambda most, num_rows, counts, cotangent: (_route(cotangent, counts, most), None),
)


class _Plan(NamedTuple):
    """The exchange of this device with each other, all i32[X]: its own rows that go there, where they start;
    rows that come from there, and where they start there."""

    sent: jax.Array
    start: jax.Array
    received: jax.Array
    start_there: jax.Array


def _plan(counts) -> _Plan:
    sizes, me = counts.sum(-1), lax.axis_index(AXIS)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    return _Plan(sizes[me], starts[me], sizes[:, me], starts[:, me])


def _route(rows, counts, most):
    """Exchanges rows between devices; XLA for CPUs has no ragged all-to-all, so there each part is padded to the
    worst case.
    """
    plan = _plan(counts)
    num_devices, number = counts.shape[0], rows.shape[0]

    def ragged(rows):
        at = jnp.full(num_devices, lax.axis_index(AXIS) * most, jnp.int32)
        empty = jnp.zeros((num_devices * most, rows.shape[1]), rows.dtype)
        return lax.ragged_all_to_all(rows, empty, plan.start, plan.sent, at, plan.received, axis_name=AXIS)

    def padded(rows):
        place = jnp.arange(most, dtype=jnp.int32)
        index = jnp.where(place < plan.sent[:, None], plan.start[:, None] + place, number)
        return lax.all_to_all(take(rows, index.reshape(-1)), AXIS, 0, 0, tiled=True)

    with jax.named_scope("expert_send"):
        return lax.platform_dependent(rows, cpu=padded, default=ragged)


def _route_back(out, counts, most, num_rows):
    plan = _plan(counts)

    def ragged(out):
        start = jnp.arange(counts.shape[0], dtype=jnp.int32) * most
        empty = jnp.zeros((num_rows, out.shape[1]), out.dtype)
        return lax.ragged_all_to_all(
            out, empty, start, plan.received, plan.start_there, plan.sent, axis_name=AXIS
        )

    def padded(out):
        place = jnp.arange(num_rows, dtype=jnp.int32)
        owner = (place[:, None] >= jnp.cumsum(plan.sent)).sum(1)
        index = owner * most + place - take(plan.start, owner)
        index = jnp.where(owner < plan.sent.shape[0], index, out.shape[0])
        return take(lax.all_to_all(out, AXIS, 0, 0, tiled=True), index)

    with jax.named_scope("expert_bring_back"):
        return lax.platform_dependent(out, cpu=padded, default=ragged)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], and zero where the index is len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
