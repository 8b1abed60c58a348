"""Sends rows to the devices that have their experts, and back: one ragged all-to-all over `expert` each.

A device receives a `Window` at a time of all the rows that come to it, in the order of its experts, and for an expert
in that of the devices that sent them. Rows of an expert from a device are a run; nothing is sorted where they arrive.

Shapes: S = rows of this device, C = rows of a window, D = width, L = experts of a device, X = size of the axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxfb.mesh import by_platform
from jaxfb.platforms.compat import custom_vjp

PyTree = Any

AXIS = "expert"
LANES = 128  # numbers of four bytes that a TPU moves at once


class Window(NamedTuple):
    """The runs of a window, as this device exchanges them with each other, all i32[X, L].

    sent:        its own rows that go to each expert there.  start: where they start here.
    place:       where they start in the window there.
    received:    rows from there for each of its own experts.  place_here: where they start in the window here.
    start_there: where they start there.
    """

    sent: jax.Array
    start: jax.Array
    place: jax.Array
    received: jax.Array
    place_here: jax.Array
    start_there: jax.Array

    @classmethod
    def of(cls, counts: jax.Array, before: jax.Array, first: jax.Array | int, size: int) -> Window:
        """Makes the window of `size` rows from the `first` on.

        counts: i32[X, X, L], rows of each device for each device's experts; before: i32[X], rows of each device that
        come before these.
        """
        number = counts.shape[0]
        here = before[:, None] + starts(counts.reshape(number, -1), 1)
        order = counts.transpose(1, 2, 0)
        there = starts(order.reshape(number, -1), 1).reshape(order.shape).transpose(2, 0, 1) - first
        begin = jnp.clip(there, 0, size)
        sent = jnp.clip(there + counts, 0, size) - begin
        start = here.reshape(counts.shape) + jnp.clip(-there, 0, counts)
        me = lax.axis_index(AXIS)
        return cls(sent[me], start[me], begin[me], sent[:, me], begin[:, me], start[:, me])

    @property
    def sizes(self) -> jax.Array:
        """Returns how many rows there are of each of this device's experts, i32[L]."""
        return self.received.sum(0, dtype=jnp.int32)


class Weighted(NamedTuple):
    """Rows [S, D] and the weight by which the output for each is multiplied [S, 1]."""

    values: jax.Array
    weights: jax.Array


def packed(rows: jax.Array) -> jax.Array:
    """Returns rows [S, D] as they are exchanged, [S, n, D / n]: n numbers of a short dtype are a word.

    So a TPU keeps a row in one piece of its memory, which it needs to send it. XLA gives rows this shape itself, for
    each exchange, and gives each result the other one: the whole array of rows or outputs in every turn.
    """
    number = max(1, 4 // rows.dtype.itemsize)
    if number == 1 or rows.shape[1] % (number * LANES):
        return rows
    return rows.reshape(rows.shape[0], number, -1)


def unpacked(rows: jax.Array) -> jax.Array:
    """Returns what was `packed` as [S, D]."""
    return rows.reshape(rows.shape[0], -1)


def starts(counts: jax.Array, axis: int = 0) -> jax.Array:
    """Returns where each of some runs starts that lie behind one another."""
    return jnp.cumsum(counts, axis, dtype=counts.dtype) - counts


@jax.custom_vjp
def send(rows: jax.Array, window: Window, into: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends rows [S, D] to their experts.

    Returns (what arrives of the window, in `into` [C, D]; the rows for the next window). Where no row of the window is,
    `into` stays; it has no gradient. The gradient of the rows is put together window by window, in one array.
    """
    return route(rows, window, into), rows


@jax.custom_vjp
def all_computed(arrays: PyTree) -> PyTree:
    """Returns the same arrays, none of which is there before all are; their gradients do not wait for one another."""
    return lax.optimization_barrier(arrays)


all_computed.defvjp(
    lambda arrays: (lax.optimization_barrier(arrays), None), lambda _, cotangents: (cotangents,)
)


def send_weighted(rows: Weighted, window: Window, size: int) -> tuple[Weighted, Weighted]:
    """Sends rows of S and their weights to their experts.

    Returns (what arrives of the window, of `size`; the rows for the next window).
    """
    sent = [send(one, window, empty_like(one, size)) for one in rows]
    arrived, following = zip(*sent, strict=True)
    return Weighted(*arrived), Weighted(*following)


def _send_forward(rows, window, into):
    return send(rows.value, *_values((window, into))), _values(window)


def _send_backward(window, cotangents):
    arrived, rows = cotangents
    if isinstance(arrived, SymbolicZero):
        return None if isinstance(rows, SymbolicZero) else rows, None, None
    return route_back(arrived, window, or_empty(rows)), None, None


@custom_vjp(3)
def bring_back(
    outputs: jax.Array, window: Window, into: jax.Array, size: int, arrived: jax.Array
) -> jax.Array:
    """Sends the outputs of a window [size, D] back to where its rows came from, in `into` [S, D]; the inverse and
    transpose of `send`.

    arrived: the rows that they are computed from. In the backward the outputs' gradients are sent only after these rows
      are here, so that they travel during the products of the rows.
    """
    return route_back(outputs, window, into)


def _bring_back_forward(outputs, window, into, size, arrived):
    kept = _values((window, arrived))
    return bring_back(*_values((outputs, window, into)), size, kept[1]), kept


def _bring_back_backward(size, kept, cotangent):
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None
    (window, arrived), into = kept, cotangent
    cotangent, _ = lax.optimization_barrier((cotangent, arrived))
    return route(cotangent, window, empty_like(cotangent, size)), None, into, None


send.defvjp(_send_forward, _send_backward, symbolic_zeros=True)
bring_back.defvjp(_bring_back_forward, _bring_back_backward, symbolic_zeros=True)


def route(rows: jax.Array, window: Window, into: jax.Array) -> jax.Array:
    """Exchanges rows between devices; XLA for CPUs has no ragged all-to-all, so there each part is padded to the
    worst case.
    """

    def ragged(rows, into):
        sizes = window.start, window.sent, window.place, window.received
        return lax.ragged_all_to_all(rows, into, *map(jnp.ravel, sizes), axis_name=AXIS)

    def padded(rows, into):
        space, most = into.shape[0], min(rows.shape[0], into.shape[0])
        begin, number = _runs(window.start, window.sent)
        place = jnp.arange(most, dtype=jnp.int32)
        index = jnp.where(place < number[:, None], begin[:, None] + place, rows.shape[0])
        came = lax.all_to_all(take(unpacked(rows), index.reshape(-1)), AXIS, 0, 0, tiled=True)
        row = jnp.arange(space, dtype=jnp.int32)
        ends = (window.place_here + window.received).T
        run = jnp.searchsorted(ends.reshape(-1), row, side="right")
        expert, source = run // ends.shape[1], run % ends.shape[1]
        within = starts(window.received, 1).at[source, expert].get(mode="clip")
        begins = window.place_here.at[source, expert].get(mode="clip")
        there = (row < ends[-1, -1])[:, None]
        here = jnp.where(there, take(came, source * most + within + row - begins), unpacked(into))
        return here.reshape(into.shape)

    with jax.named_scope("expert_send"):
        return by_platform(rows, into, cpu=padded, default=ragged)


def route_back(outputs: jax.Array, window: Window, into: jax.Array) -> jax.Array:
    """Exchanges rows the other way."""

    def ragged(outputs, into):
        sizes = window.place_here, window.received, window.start_there, window.sent
        return lax.ragged_all_to_all(outputs, into, *map(jnp.ravel, sizes), axis_name=AXIS)

    def padded(outputs, into):
        space, most = outputs.shape[0], min(into.shape[0], outputs.shape[0])
        place = jnp.arange(most, dtype=jnp.int32)
        ends = jnp.cumsum(window.received, 1)
        expert = (place[None, :, None] >= ends[:, None, :]).sum(-1, dtype=jnp.int32)
        begins = jnp.take_along_axis(window.place_here - ends + window.received, expert, 1, mode="clip")
        index = jnp.where(place < ends[:, -1:], begins + place, space)
        came = lax.all_to_all(take(unpacked(outputs), index.reshape(-1)), AXIS, 0, 0, tiled=True)
        begin, number = _runs(window.start, window.sent)
        row = jnp.arange(into.shape[0], dtype=jnp.int32)
        owner = jnp.maximum(jnp.searchsorted(begin, row, side="right") - 1, 0)
        within = row - begin[owner]
        there = (within >= 0) & (within < number[owner])
        back = jnp.where(there[:, None], take(came, owner * most + within), unpacked(into))
        return back.reshape(into.shape)

    with jax.named_scope("expert_bring_back"):
        return by_platform(outputs, into, cpu=padded, default=ragged)


def _runs(start, sent):
    """Returns (where the rows for each device start, how many they are), i32[X] each: runs of a window for a device
    lie behind one another.
    """
    first = jnp.argmax(sent > 0, axis=1)
    return jnp.take_along_axis(start, first[:, None], 1)[:, 0], sent.sum(1)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], and zero where the index is len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def empty_like(x: jax.Array, number: int | None = None) -> jax.Array:
    """Returns rows as x has, of which nobody may read what he has not written; as many as in x, or `number`."""
    return lax.empty((x.shape[0] if number is None else number, *x.shape[1:]), x.dtype)


def or_empty(x: jax.Array | SymbolicZero) -> jax.Array:
    """Returns x, a gradient; undefined rows where it is none."""
    return lax.empty(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x


def _values(tree):
    return jax.tree.map(lambda leaf: leaf.value, tree)
