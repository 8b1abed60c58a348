"""Ring attention by splash's kernels: what `jaxfb.parallel.context.ring` computes, with no scores in a TPU's memory.

A device's own pieces of the zigzag are in order, so that its own keys are a causal mask's. Of the keys of another
device its second piece of queries sees the first piece, and either its first piece of queries sees that too (keys
from a device before it) or its second piece of queries sees the second piece (from one after). That is two products of
half the queries with half the keys in every turn, of which nothing is masked.

Shapes: R = rows, T = tokens on this device, H = heads, G = kv heads, K = head size. Statistics are float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfb.models.attention_kernels import splash
from jaxfb.models.attention_kernels.splash_backward import causal_gradients, unmasked_gradients
from jaxfb.models.attention_kernels.splash_sums import (
    Keys,
    Queries,
    Sums,
    attend,
    begun,
    merged,
    sinks_gradient,
)
from jaxfb.parallel.context import AXIS, pass_on, size_here
from jaxfb.parallel.scores import PLAIN, Scores


def splash_ring(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores = PLAIN,
    *,
    segments: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Computes causal attention inside each segment over the whole sequence, of which every device has its zigzag part.

    Args:
      query: float[R, T, H, K].  key, value: float[R, T, G, K].
      scores: as those of `packed_attention`.
      segments: i32[R, T], or None.
      interpret: run the kernels step by step as plain JAX, on any platform: for tests.
    Returns:
      float[R, T, H, K].
    """
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (splash.scaled(query), key, value))
    out: Any = _ring(q, k, v, scores.sinks, segments, scores.softcap, interpret)
    return jnp.swapaxes(out, 1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _ring(q, k, v, sinks, segments, softcap, interpret) -> jax.Array:
    return _forward(q, k, v, sinks, segments, softcap, interpret)[0]


def _forward(q, k, v, sinks, segments, softcap, interpret):
    own, half = splash.for_sums(q.shape[1], q.shape[2], q.shape[2] // 2, softcap, interpret)
    queries, keys = Queries(q, segments), Keys(k, v, segments)

    def add(sums, keys, step):
        places = _places(q.shape[2], step)
        out, normalizer = attend(half, _both(queries, places.queries), _both(keys, places.keys))
        parts = zip(jnp.split(out, 2), jnp.split(normalizer, 2), places.queries, strict=True)
        for *part, place in parts:
            sums = _updated(sums, place, partial(merged, Sums(*part)))
        return sums

    def turn(carry, step):
        sums, keys = carry
        return (add(sums, keys, step), pass_on(keys)), None

    behind = pass_on(keys)
    sums = begun(*attend(own, queries, keys), sinks)
    last = size_here() - 1
    (sums, keys), _ = lax.scan(turn, (sums, behind), jnp.arange(1, last))
    sums = add(sums, keys, last)
    out, normalizer = (checkpoint_name(x, splash.KEPT) for x in (sums.out.astype(q.dtype), sums.normalizer))
    return out, (q, k, v, sinks, segments, out, normalizer)


def _backward(softcap, interpret, residuals, d_out):
    q, k, v, sinks, segments, out, normalizer = residuals
    queries, keys = Queries(q, segments, out, normalizer, d_out), Keys(k, v, segments)

    def add(carry, step):
        d_query, keys, of_keys = carry
        places = _places(q.shape[2], step)
        dq, *dkv = unmasked_gradients(
            _both(queries, places.queries), _both(keys, places.keys), softcap, interpret
        )
        for number in range(2):
            piece = lambda x, n=number: jnp.split(x, 2)[n]  # noqa: E731
            d_query = _updated(d_query, places.queries[number], lambda x, p=piece: x + p(dq))
            of_keys = _updated(
                of_keys,
                places.keys[number],
                lambda x, p=piece: [a + p(b) for a, b in zip(x, dkv, strict=True)],
            )
        return d_query, keys, of_keys

    def turn(carry, step):
        d_query, keys, of_keys = carry
        behind = pass_on(keys)
        d_query, _, of_keys = add(carry, step)
        return (d_query, behind, pass_on(of_keys)), None

    behind = pass_on(keys)
    d_query, *of_keys = causal_gradients(queries, keys, softcap, interpret)
    carry, _ = lax.scan(turn, (d_query, behind, pass_on(of_keys)), jnp.arange(1, size_here() - 1))
    d_query, _, of_keys = add(carry, size_here() - 1)
    d_key, d_value = pass_on(of_keys)
    d_sinks = None if sinks is None else sinks_gradient(sinks, queries)
    return d_query.astype(q.dtype), d_key.astype(k.dtype), d_value.astype(v.dtype), d_sinks, None


_ring.defvjp(_forward, _backward)


class _Places(NamedTuple):
    """Tells where the two pairs of pieces begin: of this device's queries, and of the keys that are here now."""

    queries: tuple[jax.Array | int, jax.Array | int]
    keys: tuple[jax.Array | int, jax.Array | int]


def _places(length: int, step: jax.Array | int) -> _Places:
    half = length // 2
    from_before = lax.axis_index(AXIS) - step >= 0
    either = jnp.where(from_before, 0, half)
    return _Places((half, either), (0, either))


def _time(x: jax.Array) -> int:
    """Returns the dim of tokens: [R, T] or [R, H, T, ...]."""
    return 1 if x.ndim == 2 else 2


def _both(tree: Any, places: tuple) -> Any:
    """Returns the halves of the arrays that begin at the two places, as twice the rows."""

    def cut(x):
        halves = [lax.dynamic_slice_in_dim(x, place, x.shape[_time(x)] // 2, _time(x)) for place in places]
        return jnp.concatenate(halves)

    return jax.tree.map(cut, tree)


def _updated(tree: Any, place: jax.Array | int, change: Any) -> Any:
    """Returns arrays whose half that begins at a place is changed."""
    cut = lambda x: lax.dynamic_slice_in_dim(x, place, x.shape[2] // 2, 2)  # noqa: E731
    put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, place, 2)  # noqa: E731
    return jax.tree.map(put, tree, change(jax.tree.map(cut, tree)))
