"""Attention of a piece of each sequence to itself and to earlier pieces, by splash's kernels: no scores in memory.

Without a window, the keys of each earlier piece are one call of a kernel without a mask, in a loop that ends where the
piece begins; the calls' results are summed as those of a ring are. One kernel over the cache, with the piece's place in
its mask, would need no sums, but step through the blocks of all later pieces as well: a step that computes nothing is
not free, and on average there are as many as of the others.

With a window, one call sees the piece's own keys and those that a window reaches before it.

Shapes: R = rows, L = tokens of a piece, T = tokens of the sequence, H = heads, G = kv heads, K = head size.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfb.models.attention_kernels import splash
from jaxfb.models.attention_kernels.splash_backward import (
    attended,
    causal_gradients,
    in_parts,
    unmasked_gradients,
)
from jaxfb.models.attention_kernels.splash_gradients import Settings
from jaxfb.models.attention_kernels.splash_order import in_order
from jaxfb.models.attention_kernels.splash_sums import (
    Keys,
    Queries,
    Sums,
    attend,
    begun,
    merged,
    sinks_gradient,
)
from jaxfb.parallel.scores import Scores

BEFORE = -1
"""The segment of keys before the first token."""


def splash_piece_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    *,
    past: tuple[jax.Array, jax.Array],
    number: jax.Array,
    segments: jax.Array | None,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `piece_attention` on one device's heads, with the same arguments.

    Args:
      past: keys and values, float[R, T, G, K].
      interpret: run the kernels step by step as plain JAX, on any platform: for tests.
    Returns:
      float[R, L, H, K].
    """
    whole = past[0].shape[1]
    q, k, v = (x.swapaxes(1, 2) for x in (splash.scaled(query), key, value))
    if window is None or window >= whole:
        out: Any = _to_all(q, k, v, Keys(*past, segments), scores.sinks, number, scores.softcap, interpret)
    else:
        out = _in_window(q, k, v, Keys(*past, segments), scores, number, window, interpret)
    return out.swapaxes(1, 2)


def _in_window(q, k, v, past: Keys, scores: Scores, number, window: int, interpret: bool) -> jax.Array:
    """Returns [R, H, L, K]; past: [R, T, G, K] with the segments of the sequence."""
    length, whole = q.shape[2], past.key.shape[1]
    kernel = _window_kernel(q.shape[1], length, whole, window, scores.softcap, interpret)
    settings = Settings(splash.block_size(length), window, scores.softcap, interpret)
    back, start = _reach(length, whole, window), number * length
    distances = in_order(*((n // settings.block) for n in (length, back + length, back)))
    is_real = jnp.arange(back) >= back - start

    def before(x, nothing):
        """Takes the tokens before the piece; those before the first token are `nothing`."""
        found = lax.dynamic_slice_in_dim(x, jnp.maximum(start - back, 0), back, axis=1)
        found = jnp.roll(found, jnp.maximum(back - start, 0), axis=1)
        return jnp.where(is_real.reshape(-1, *(1,) * (x.ndim - 2)), found, nothing)

    segments = jnp.ones(past.key.shape[:2], jnp.int32) if past.segments is None else past.segments
    own = lax.dynamic_slice_in_dim(segments, start, length, axis=1)
    ids = jnp.concatenate([before(segments, BEFORE), own], axis=1)
    keys, values = (
        jnp.concatenate([before(old, 0).swapaxes(1, 2), new], axis=2)
        for old, new in ((past.key, k), (past.value, v))
    )
    order = in_parts(distances, q.shape[1] // k.shape[1], q.shape[3], settings)
    return attended(kernel, order, q, Keys(keys, values, ids), own, scores.sinks, settings)


def _reach(length: int, whole: int, window: int) -> int:
    """Returns how many tokens before a piece its window may reach, a multiple of the kernel's blocks."""
    block = splash.block_size(length)
    return min(-(-(window - 1) // block) * block, whole - length)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _to_all(q, k, v, past, sinks, number, softcap, interpret) -> jax.Array:
    """Returns [R, H, L, K]; past: as for `_in_window`."""
    return _forward(q, k, v, past, sinks, number, softcap, interpret)[0]


def _forward(q, k, v, past: Keys, sinks, number, softcap, interpret):
    own, earlier = splash.for_sums(q.shape[1], q.shape[2], q.shape[2], softcap, interpret)
    ids = _part(past.segments, number, q.shape[2])
    queries = Queries(q, ids)

    def add(j, sums):
        return merged(Sums(*attend(earlier, queries, _piece(past, j, q.shape[2]))), sums)

    sums = begun(*attend(own, queries, Keys(k, v, ids)), sinks)
    sums = lax.fori_loop(0, number, add, sums)
    out, normalizer = (checkpoint_name(x, splash.KEPT) for x in (sums.out.astype(q.dtype), sums.normalizer))
    return out, (q, k, v, past, sinks, number, out, normalizer)


def _backward(softcap, interpret, saved, d_out):
    q, k, v, past, sinks, number, out, normalizer = saved
    ids = _part(past.segments, number, q.shape[2])
    queries = Queries(q, ids, out, normalizer, d_out)

    def add(j, carry):
        d_query, of_keys = carry
        more, *d_keys = unmasked_gradients(queries, _piece(past, j, q.shape[2]), softcap, interpret)
        return d_query + more, [put(*both, j) for both in zip(of_keys, d_keys, strict=True)]

    def put(whole, d, j):
        d = d.swapaxes(1, 2).astype(whole.dtype)
        return lax.dynamic_update_slice_in_dim(whole, d, j * q.shape[2], 1)

    d_query, d_key, d_value = causal_gradients(queries, Keys(k, v, ids), softcap, interpret)
    nothing = [jnp.zeros_like(past.key), jnp.zeros_like(past.value)]
    d_query, (old_keys, old_values) = lax.fori_loop(0, number, add, (d_query, nothing))
    d_sinks = None if sinks is None else sinks_gradient(sinks, queries)
    return (
        d_query.astype(q.dtype),
        d_key.astype(k.dtype),
        d_value.astype(v.dtype),
        Keys(old_keys, old_values, None),
        d_sinks,
        None,
    )


_to_all.defvjp(_forward, _backward)


def _piece(past: Keys, number: jax.Array, tokens: int) -> Keys:
    """Returns the keys of one piece, [R, G, L, K]."""
    key, value = (_part(x, number, tokens).swapaxes(1, 2) for x in (past.key, past.value))
    return Keys(key, value, _part(past.segments, number, tokens))


def _part(x: Any, number: jax.Array, tokens: int) -> Any:
    return None if x is None else lax.dynamic_slice_in_dim(x, number * tokens, tokens, axis=1)


@lru_cache(maxsize=64)
def _window_kernel(
    num_heads: int, length: int, whole: int, window: int, softcap: float | None, interpret: bool
) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention

    back = _reach(length, whole, window)
    mask = splash_attention.LocalMask((length, back + length), window_size=(window - 1, 0), offset=back)
    return splash.made(mask, num_heads, softcap, interpret)
