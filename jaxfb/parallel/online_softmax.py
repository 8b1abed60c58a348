"""Softmax attention over one block of keys after another, forward and backward, as flash attention computes it.

Shapes: R = rows, T = queries, S = keys of a block, G = kv heads, N = heads / G, K = head size. Statistics and sums are
float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.parallel.scores import slope, soft_capped


class Sums(NamedTuple):
    """Online softmax of a query's scores so far: out f[R, T, G, N, K]; top and total f[R, T, G, N]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def visible(query_places, key_places, query_segments, key_segments, window):
    """Returns bool[R, T, S]: the key is not later, in the window, and of the same document."""
    causal = query_places[:, None] >= key_places[None, :]
    if window is not None:
        causal &= within_window(query_places, key_places, window)
    return causal[None] & (query_segments[:, :, None] == key_segments[:, None, :])


def within_window(query_places: jax.Array, key_places: jax.Array, window: int) -> jax.Array:
    """Returns bool[T, S]: the key is less than `window` places before the query, or later."""
    return query_places[:, None] - key_places[None, :] < window


def grouped(query, kv_heads):
    """Returns queries by the kv head that each reads: [R, T, H, K] -> [R, T, G, N, K]."""
    rows, length, _, size = query.shape
    return query.reshape(rows, length, kv_heads, -1, size)


def nothing(q, sinks) -> Sums:
    """Returns the sums before any key; sinks are scores whose values are 0."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    shape, out = q.shape[:-1], jnp.zeros(q.shape, wide)
    if sinks is None:
        return Sums(out, jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide))
    top = jnp.broadcast_to(sinks.astype(wide).reshape(shape[2:]), shape)
    return Sums(out, top, jnp.ones(shape, wide))


def _scores(q, key, softcap):
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("rtgnk,rsgk->rtgns", q, key, preferred_element_type=wide) / q.shape[-1] ** 0.5
    return soft_capped(scores, softcap)


def _masked(scores, mask):
    return jnp.where(mask[:, :, None, None, :], scores, -jnp.inf)


def attend(sums: Sums, q, key, value, mask, softcap) -> Sums:
    """Adds one more block of keys to the sums; a query that has seen nothing yet must see something in it."""
    scores = _masked(_scores(q, key, softcap), mask)
    top = jnp.maximum(sums.top, scores.max(-1))
    probs, scale = jnp.exp(scores - top[..., None]), jnp.exp(sums.top - top)
    added = jnp.einsum(
        "rtgns,rsgk->rtgnk", probs.astype(value.dtype), value, preferred_element_type=top.dtype
    )
    return Sums(sums.out * scale[..., None] + added, top, sums.total * scale + probs.sum(-1))


def attend_backward(q, normalizer, d_out, delta, key, value, mask, softcap):
    """Computes gradients of one block: (d q, d key, d value), in the dtype of the sums."""
    scores = _scores(q, key, softcap)
    probs = jnp.exp(_masked(scores, mask) - normalizer[..., None])
    product = partial(jnp.einsum, preferred_element_type=d_out.dtype)
    d_value = product("rtgns,rtgnk->rsgk", probs.astype(value.dtype), d_out.astype(value.dtype))
    d_probs = product("rtgnk,rsgk->rtgns", d_out.astype(value.dtype), value)
    d_scores = probs * (d_probs - delta[..., None]) / q.shape[-1] ** 0.5
    if softcap is not None:
        d_scores *= slope(scores, softcap)
    d_scores = d_scores.astype(q.dtype)
    return product("rtgns,rsgk->rtgnk", d_scores, key), product("rtgns,rtgnk->rsgk", d_scores, q), d_value


def sinks_backward(sinks, normalizer, delta):
    """Computes the sinks' gradient: each has taken its probability of what the other scores' values give."""
    prob = jnp.exp(sinks.astype(delta.dtype).reshape(delta.shape[2:]) - normalizer)
    return -jnp.sum(prob * delta, axis=(0, 1)).reshape(-1).astype(sinks.dtype)
