"""Softmax attention as sums over blocks of keys, each by a splash kernel: what a ring and pieces of a sequence add up.

A kernel returns what it sums in float32 in the compute dtype. Blocks are summed in float32: each one's result is
rounded once, and their sum once more.

Shapes: R = rows, T = queries, S = keys of a block, H = heads, G = kv heads, K = head size. Statistics are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.models.attention_kernels import splash


class Keys(NamedTuple):
    """A block of keys and values [R, G, S, K], and their segments i32[R, S]."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


class Queries(NamedTuple):
    """Queries and what the backward needs beside them; `None` of it in the forward.

    query, out, d_out: [R, H, T, K]; normalizer: f32[R, H, T], the logarithm of the sum of exponentials of the scores.
    """

    query: jax.Array
    segments: jax.Array | None
    out: jax.Array | None = None
    normalizer: jax.Array | None = None
    d_out: jax.Array | None = None


class Sums(NamedTuple):
    """Attention to the keys so far: out f32[R, H, T, K], and the normalizer f32[R, H, T] of its softmax."""

    out: jax.Array
    normalizer: jax.Array


def attend(
    kernel: Any, queries: Queries, keys: Keys, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [R, H, T, K], normalizer f32[R, H, T]) of these keys, and sinks, alone."""

    def one_row(queries, keys):
        ids = splash.segment_ids(queries.segments, keys.segments)
        out, (normalizer,) = kernel(queries.query, keys.key, keys.value, ids, sinks)
        return out, normalizer

    return jax.vmap(one_row)(queries, keys)


def begun(out: jax.Array, normalizer: jax.Array, sinks: jax.Array | None) -> Sums:
    """Returns the sums after a first block; sinks: f32[H], scores whose values are 0."""
    sums = Sums(out.astype(jnp.float32), normalizer)
    if sinks is None:
        return sums
    nothing = jnp.zeros_like(sums.out), jnp.broadcast_to(sinks[:, None], normalizer.shape)
    return merged(Sums(*nothing), sums)


def merged(part: Sums, sums: Sums) -> Sums:
    """Returns the sums with those of one more block; `part.out` may be in the compute dtype."""
    normalizer = jnp.logaddexp(sums.normalizer, part.normalizer)
    shares = (jnp.exp(one.normalizer - normalizer)[..., None] for one in (sums, part))
    before, added = (one.out * share for one, share in zip((sums, part), shares, strict=True))
    return Sums(before + added, normalizer)


def sinks_gradient(sinks: jax.Array, queries: Queries) -> jax.Array:
    """Computes it: each sink has taken its probability of what the other scores' values give."""
    assert queries.d_out is not None and queries.out is not None and queries.normalizer is not None
    delta = jnp.sum(queries.d_out.astype(jnp.float32) * queries.out.astype(jnp.float32), axis=-1)
    prob = jnp.exp(sinks[:, None] - queries.normalizer)
    return -jnp.sum(prob * delta, axis=(0, 2)).astype(sinks.dtype)
