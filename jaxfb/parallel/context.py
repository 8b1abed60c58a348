"""The context axis: each device has part of every sequence, and attention combines the parts.

Causal attention works hardest at the end of a sequence, so the cut is a zigzag: of 2C pieces device c holds
pieces c and 2C-1-c, and all have the same work. Everything but `zigzag` runs inside `jax.shard_map`.

Shapes: R = rows, T = tokens on this device, H = heads, G = kv heads, N = H / G, K = head size, C = context.
Softmax statistics and sums are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.parallel.collectives import gather_summing_wide
from jaxfb.parallel.online_softmax import (
    attend,
    attend_backward,
    grouped,
    nothing,
    sinks_backward,
    visible,
    within_window,
)
from jaxfb.parallel.scores import PLAIN, Scores
from jaxfb.parallel.tensor import manual_size
from jaxfb.refusal import Refused, choice

AXIS = "context"
METHODS = ("ring", "all_gather", "all_to_all")


def zigzag(length: int, size: int) -> np.ndarray:
    """Returns the order that puts device c's pieces at places [c * length / size, (c + 1) * length / size):
    i32[length].

    Raises:
      ValueError: 2 * size does not divide the length.
    """
    if length % (2 * size):
        below = length - length % (2 * size)
        legal = [n for n in (below, below + 2 * size) if n]
        raise Refused(
            f"sequences of {length} tokens cannot be cut into 2 x context {size} = {2 * size} equal pieces; "
            f"use a length of {' or '.join(map(str, legal))}",
            [{"length": n} for n in legal],
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2 * size, -1)
    return np.concatenate([pieces[[c, 2 * size - 1 - c]].reshape(-1) for c in range(size)])


def size_here() -> int:
    """Returns the number of devices that a sequence is cut over where this is traced; 1 outside a mesh that cuts it."""
    return manual_size(AXIS)


def token_index(length: int, device: jax.Array | None = None) -> jax.Array:
    """Returns the places in the whole sequence of the `length` tokens that `device` holds: i32[length].

    device: None is this one.
    """
    size = size_here()
    if size == 1:
        return jnp.arange(length)
    device = lax.axis_index(AXIS) if device is None else device
    piece = jnp.arange(length // 2)
    return jnp.concatenate([device * (length // 2) + piece, (2 * size - 1 - device) * (length // 2) + piece])


def places_of_all(length: int) -> jax.Array:
    """Returns the places in the whole sequence of the `length` tokens of each device, one device after the other."""
    return jnp.concatenate([token_index(length, jnp.int32(device)) for device in range(size_here())])


def own_part(whole: jax.Array, dim: int) -> jax.Array:
    """Returns this device's tokens of an array with the whole sequence along `dim`."""
    size = size_here()
    return whole if size == 1 else jnp.take(whole, token_index(whole.shape[dim] // size), axis=dim)


def whole_rows(x: jax.Array) -> jax.Array:
    """Returns whole rows [R, T, ...] of an array of which this device has some tokens; `own_part` is its inverse."""
    if size_here() == 1:
        return x
    order = jnp.argsort(places_of_all(x.shape[1]))
    return jnp.take(lax.all_gather(x, AXIS, axis=1, tiled=True), order, axis=1)


def later(x: jax.Array, distance: int) -> jax.Array:
    """Returns x[:, t + distance] at every token t of this device, zero beyond the end of the whole sequence.

    Each piece takes the first tokens of the piece behind it, which is on another device or on this one: one gather of
    [R, 2 * distance, ...]. Has no gradient, being for tokens and masks.

    Args:
      x: [R, T/context, ...], in zigzag order.
    Raises:
      ValueError: a piece of a sequence that is cut is shorter than the distance.
    """
    size = size_here()
    pieces = jnp.split(x, 2 if size > 1 else 1, axis=1)
    length = pieces[0].shape[1]
    if size > 1 and distance > length:
        whole = x.shape[1] * size
        raise Refused(
            f"a token {distance} places later is beyond the next piece where sequences of {whole} tokens are cut "
            f"into pieces of {length}; use sequences of {2 * size * distance} or a smaller distance"
        )
    if size == 1:
        behind = [jnp.zeros_like(x[:, :distance])]  # all of a sequence that is shorter than the distance
    else:
        behind = _first_tokens_behind(pieces[0], pieces[1], distance)
    shifted = [
        jnp.concatenate([piece[:, distance:], head], axis=1)
        for piece, head in zip(pieces, behind, strict=True)
    ]
    return jnp.concatenate(shifted, axis=1)


def _first_tokens_behind(early: jax.Array, late: jax.Array, distance: int) -> list[jax.Array]:
    """Returns what follows this device's pieces c and 2C-1-c: the heads of pieces c+1 and 2C-c (zeros behind the
    last).
    """
    size, device = size_here(), lax.axis_index(AXIS)
    # not two permutes: in a loop with little else, XLA:CPU's devices meet in the wrong turn and abort (jax 0.10.2)
    heads = lax.all_gather(jnp.stack([early[:, :distance], late[:, :distance]]), AXIS)
    in_order = jnp.concatenate([heads[:, 0], heads[::-1, 1], jnp.zeros_like(heads[:1, 0])])
    return [in_order[device + 1], in_order[2 * size - device]]


def context_attention(
    query,
    key,
    value,
    scores: Scores = PLAIN,
    *,
    segments: jax.Array | None,
    method: str,
    window: int | None = None,
) -> jax.Array:
    """Computes causal attention inside each segment, over the whole sequence.

    Where no context axis cuts sequences, also outside of a mesh, every method computes the plain formula.

    Args:
      query: float[R, T/context, H, K].  key, value: float[R, T/context, G, K], in zigzag order.
      scores: soft cap and sinks.
      segments: i32[R, T/context] document ids, or None.
      method: "ring" passes keys and values around, hidden behind the compute, and never holds more than two
        devices' share of them; "all_gather" gathers them all; "all_to_all" exchanges tokens for heads (Ulysses; C must
        divide G). The built-in transformer runs kernels of one device in all three (`jaxfb.models.attend`).
      window: a token sees itself and the window - 1 tokens before it; None: all before it.
    Returns:
      float[R, T/context, H, K].
    Raises:
      ValueError: the method is unknown.
    """
    choice("method", method, METHODS, who="context_attention:")
    if segments is None:
        segments = jnp.ones(query.shape[:2], jnp.int32)
    if size_here() == 1:
        return _attended_whole(query, key, value, scores, segments, window)
    if method == "all_to_all":
        return exchanged(partial(_attended_whole, window=window), query, key, value, scores, segments)
    return {"ring": ring, "all_gather": gathered}[method](
        query, key, value, scores.sinks, segments, window, scores.softcap
    )


def gathered(query, key, value, sinks, segments, window=None, softcap=None) -> jax.Array:
    """Computes attention with all keys and values gathered over context; the transpose scatters their gradients."""
    gather = lambda x: gather_summing_wide(x, AXIS, 1)  # noqa: E731
    length = query.shape[1]
    everywhere = lax.all_gather(segments, AXIS, axis=1, tiled=True)
    mask = visible(token_index(length), places_of_all(length), segments, everywhere, window)
    return _attended(query, gather(key), gather(value), sinks, mask, softcap)


def exchanged(
    attend: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    segments: jax.Array | None,
) -> jax.Array:
    """Computes attention on whole sequences for 1/C of the heads (DeepSpeed-Ulysses, arXiv:2309.14509).

    Args:
      attend: (query [R, T * C, H / C, K], key, value [R, T * C, G / C, K], scores, segments i32[R, T * C] or None) ->
        [R, T * C, H / C, K], any causal attention on one device.
      query: float[R, T, H, K].  key, value: float[R, T, G, K], in zigzag order.
      segments: i32[R, T], or None.
    Returns:
      float[R, T, H, K].
    Raises:
      ValueError: C does not divide G.
    """
    size = size_here()
    if key.shape[2] % size:
        raise Refused(
            f"context attention by all_to_all needs kv heads that context {size} divides, got {key.shape[2]}; "
            'use "ring"'
        )
    back = places_of_all(query.shape[1])
    order = jnp.argsort(back)

    def to_heads(x):
        return jnp.take(lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True), order, axis=1)

    q, k, v = to_heads(query), to_heads(key), to_heads(value)
    if segments is not None:
        segments = jnp.take(lax.all_gather(segments, AXIS, axis=1, tiled=True), order, axis=1)
    if scores.sinks is not None:
        here = lax.dynamic_slice_in_dim(scores.sinks, lax.axis_index(AXIS) * q.shape[2], q.shape[2])
        scores = scores._replace(sinks=here)
    out = jnp.take(attend(q, k, v, scores, segments), back, axis=1)
    return lax.all_to_all(out, AXIS, split_axis=1, concat_axis=2, tiled=True)


def _attended_whole(query, key, value, scores, segments, window) -> jax.Array:
    """Computes attention to the keys of whole rows, whose scores exist at once."""
    places = jnp.arange(query.shape[1])
    mask = visible(places, places, segments, segments, window)
    return _attended(query, key, value, scores.sinks, mask, scores.softcap)


def _attended(query, key, value, sinks, mask, softcap) -> jax.Array:
    """Computes attention to keys that are all here, whose scores exist at once."""
    q = grouped(query, key.shape[2])
    sums = attend(nothing(q, sinks), q, key, value, mask, softcap)
    return (sums.out / sums.total[..., None]).astype(query.dtype).reshape(query.shape)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def ring(query, key, value, sinks, segments, window=None, softcap=None) -> jax.Array:
    """Computes ring attention (arXiv:2310.01889): online softmax while keys and values are passed along the ring."""
    return _ring_forward(query, key, value, sinks, segments, window, softcap)[0]


class _Block(NamedTuple):
    """Keys, values and segments of one device, on their way round."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array


def _ring_forward(query, key, value, sinks, segments, window, softcap):
    q = grouped(query, key.shape[2])
    block = _Block(key, value, segments)

    def add(sums, block, step):
        return _on_visible_half(
            step, partial(_add_block, sums, q, _Seen(segments, window, softcap, step)), block
        )

    own = _own_mask(query.shape[1], segments, window)
    sums = attend(nothing(q, sinks), q, key, value, own, softcap)

    def turn(carry, step):
        sums, block = carry
        return (add(sums, block, step), pass_on(block)), None

    last = size_here() - 1
    (sums, block), _ = lax.scan(turn, (sums, pass_on(block)), jnp.arange(1, last))
    sums = add(sums, block, last)
    out = sums.out / sums.total[..., None]
    result = out.astype(query.dtype).reshape(query.shape)
    return result, (query, key, value, sinks, segments, out, sums.top + jnp.log(sums.total))


def _ring_backward(window, softcap, residuals, cotangent):
    query, key, value, sinks, segments, out, normalizer = residuals
    q, wide = grouped(query, key.shape[2]), out.dtype
    d_out = grouped(cotangent, key.shape[2]).astype(wide)
    saved = (q, normalizer, d_out, jnp.sum(d_out * out, axis=-1))
    own = _own_mask(query.shape[1], segments, window)
    d_query, d_key, d_value = attend_backward(*saved, key, value, own, softcap)

    def add(carry, step):
        d_query, block, d_key, d_value = carry
        run = partial(_block_backward, saved, _Seen(segments, window, softcap, step))
        dq, dk, dv = _on_visible_half(step, run, block)
        return d_query + dq, block, d_key + dk, d_value + dv

    def turn(carry, step):
        d_query, block, d_key, d_value = add(carry, step)
        return (d_query, *pass_on((block, d_key, d_value))), None

    carry = (d_query, *pass_on((_Block(key, value, segments), d_key, d_value)))
    carry, _ = lax.scan(turn, carry, jnp.arange(1, size_here() - 1))
    d_query, _, d_key, d_value = add(carry, size_here() - 1)
    d_key, d_value = pass_on((d_key, d_value))
    return (
        d_query.reshape(query.shape).astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None if sinks is None else sinks_backward(sinks, normalizer, saved[-1]),
        None,
    )


ring.defvjp(_ring_forward, _ring_backward)


def _on_visible_half(step, run, block):
    """Runs on the half of (queries x keys) that is visible `step` places along the ring; no mask is left to do.

    From a device before this one, all queries see its first piece and none its second; from one after, only
    this device's second piece sees, and it sees both.
    """
    before = lax.axis_index(AXIS) - step >= 0
    half = block.key.shape[1] // 2
    first = jax.tree.map(lambda leaf: leaf[:, :half], block)
    return lax.cond(before, lambda: run(0, first, half), lambda: run(half, block, 2 * half))


class _Seen(NamedTuple):
    """Decides what this device's queries see of a block of keys that comes from `step` places before along the ring."""

    segments: jax.Array
    window: int | None
    softcap: float | None
    step: jax.Array | int

    def mask(self, start, block):
        """Returns bool[R, T - start, S]; no key is later than a query, so that only window and document count."""
        same = self.segments[:, start:, None] == block.segments[:, None, :]
        if self.window is None:
            return same
        length, size = self.segments.shape[1], size_here()
        keys = token_index(length, (lax.axis_index(AXIS) - self.step) % size)[: block.segments.shape[1]]
        return same & within_window(token_index(length)[start:], keys, self.window)


def _add_block(sums, q, seen, start, block, _):
    mask = seen.mask(start, block)
    part = jax.tree.map(lambda leaf: leaf[:, start:], sums)
    after = attend(part, q[:, start:], block.key, block.value, mask, seen.softcap)
    return jax.tree.map(lambda whole, tail: jnp.concatenate([whole[:, :start], tail], 1), sums, after)


def _block_backward(saved, seen, start, block, length):
    mask = seen.mask(start, block)
    q, normalizer, d_out, delta = (leaf[:, start:] for leaf in saved)
    dq, dk, dv = attend_backward(q, normalizer, d_out, delta, block.key, block.value, mask, seen.softcap)
    missing = saved[0].shape[1] - length
    tail = lambda x: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    return jnp.pad(dq, [(0, 0), (start, 0)] + [(0, 0)] * (dq.ndim - 2)), tail(dk), tail(dv)


def pass_on(tree: Any) -> Any:
    """Returns the arrays of the device before this one; this device's go to the one after it."""
    size = size_here()
    with jax.named_scope("context_ring"):
        return lax.ppermute(tree, AXIS, [(device, (device + 1) % size) for device in range(size)])


def _own_mask(length, segments, window):
    places = token_index(length)
    return visible(places, places, segments, segments, window)
