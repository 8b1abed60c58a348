"""Causal attention of a piece of each sequence to itself and to the pieces before it.

On a TPU splash's kernels compute it (`attention_kernels/splash_pieces.py`), elsewhere plain JAX does, here. The loop
over blocks of earlier keys ends where the piece begins, so that piece p of n costs what its queries see, but for its
own keys, which all of them are compared with. Nothing larger than the scores of one block of keys exists.

Shapes: R = rows, L = tokens of a piece, T = tokens of the sequence, H = heads, G = kv heads, K = head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.models.attention import choose_backend
from jaxfb.models.attention_kernels.splash_pieces import splash_piece_attention
from jaxfb.parallel.online_softmax import attend, attend_backward, grouped, nothing, sinks_backward, visible
from jaxfb.parallel.scores import Scores
from jaxfb.parallel.tensor import on_head_shards
from jaxfb.platforms.compat import custom_vjp

LARGEST_BLOCK = 1024
"""Keys of a block at the most: its scores take rows * heads * tokens of a piece * 4 KB."""


class Keys(NamedTuple):
    """Keys and values, of a piece [R, L, G, K] or of whole sequences [R, T, G, K]."""

    key: jax.Array
    value: jax.Array


class Seen(NamedTuple):
    """Decides what the queries of a piece see.

    number:   i32[], which piece.
    segments: i32[R, T], documents of the whole sequence.
    window, softcap: as in other attention; None for none.
    """

    number: jax.Array
    segments: jax.Array
    window: int | None
    softcap: float | None


def piece_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores,
    *,
    past: Keys,
    number: jax.Array,
    segments: jax.Array | None,
    window: int | None,
    backend: str = "xla",
) -> jax.Array:
    """Computes causal attention inside each segment for one piece of each row.

    Args:
      query: float[R, L, H, K].  key, value: float[R, L, G, K].
      scores: soft cap and sinks.
      past: float[R, T, G, K] twice, with those of earlier pieces; the rest is not read.
      number: i32[], which piece this is.
      segments: i32[R, T] document ids of the whole rows, or None.
      window: a token sees itself and the window - 1 tokens before it; None: all before it.
      backend: "auto" and "splash" run splash's kernels where a TPU's whole rows would; else plain JAX.
    Returns:
      float[R, L, H, K].
    """
    if backend in ("auto", "splash"):
        packed = segments is not None
        if choose_backend(backend, query, key, packed=packed, plain=scores.are_plain) == "splash":
            return _by_kernels(query, key, value, scores, past, (number, segments), window)
    if segments is None:
        segments = jnp.ones(past.key.shape[:2], jnp.int32)
    sinks = None if scores.sinks is None else scores.sinks[None, None, :, None]
    return _attention(query, Keys(key, value), past, sinks, number, segments, window, scores.softcap)


def _by_kernels(query, key, value, scores: Scores, past: Keys, whole: tuple, window: int | None) -> jax.Array:
    def of_shard(query, key, value, old_keys, old_values, *more):
        *sinks, (number, segments) = more
        here = scores._replace(sinks=sinks[0].reshape(-1)) if sinks else scores
        past = old_keys, old_values
        return splash_piece_attention(
            query, key, value, here, past=past, number=number, segments=segments, window=window
        )

    sinks = [] if scores.sinks is None else [scores.sinks[None, None, :, None]]
    return on_head_shards(of_shard, [query, key, value, *past, *sinks], whole)


@custom_vjp(6, 7)
def _attention(query, own, past, sinks, number, segments, window, softcap):
    return _forward(query, own, past, sinks, number, segments, window, softcap)[0]


def _forward(query, own, past, sinks, number, segments, window, softcap):
    def run(query, *heads_and_seen):
        own, past, sinks, seen = _parts(heads_and_seen, window, softcap)
        return _forward_here(query, own, past, sinks, seen)

    arrays = (query, own, past, sinks, number, segments)
    out, normalizer = _on_shards(run, query, own, past, sinks, whole=(number, segments))
    return out.astype(query.dtype), (*arrays, out, normalizer)


def _backward(window, softcap, saved, cotangent):
    query, own, past, sinks, number, segments, out, normalizer = saved

    def run(query, out, normalizer, cotangent, *heads_and_seen):
        own, past, sinks, seen = _parts(heads_and_seen, window, softcap)
        return _backward_here(query, out, normalizer, cotangent, own, past, sinks, seen)

    found = _on_shards(run, query, out, normalizer, cotangent, own, past, sinks, whole=(number, segments))
    d_query, d_own, d_past, d_sinks = found
    return d_query, d_own, d_past, d_sinks, None, None


_attention.defvjp(_forward, _backward)


def _on_shards(run, *heads: Any, whole: Any) -> Any:
    """Runs on every tensor shard by itself: the loop over blocks has no collective in it."""
    leaves, structure = jax.tree.flatten(heads)

    def on_leaves(*given):
        *leaves, whole = given
        return run(*jax.tree.unflatten(structure, leaves), whole)

    return on_head_shards(on_leaves, leaves, whole)


def _parts(given: tuple, window: int | None, softcap: float | None) -> tuple:
    *heads, (number, segments) = given
    return *heads, Seen(number, segments, window, softcap)


def _forward_here(query, own: Keys, past: Keys, sinks, seen: Seen) -> tuple[jax.Array, jax.Array]:
    """Returns (context float[R, L, H, K] and the scores' log normalizer [R, L, G, H / G], both in the sums' dtype)."""
    q = grouped(query, own.key.shape[2])
    sums = nothing(q, sinks)
    # a document may begin in a later block: a first block of which nothing is seen must not give inf - inf
    sums = sums._replace(top=jnp.maximum(sums.top, jnp.finfo(sums.top.dtype).min))
    for keys, block in _passes(own, past, seen):
        step = lambda j, sums, keys=keys, block=block: attend(sums, q, *block(j, keys), softcap=seen.softcap)  # noqa: E731
        sums = lax.fori_loop(*block.range, step, sums)
    out = sums.out / sums.total[..., None]
    return out.reshape(query.shape), sums.top + jnp.log(sums.total)


def _backward_here(query, out, normalizer, cotangent, own: Keys, past: Keys, sinks, seen: Seen):
    """Returns gradients of queries, of the piece's keys and values, of those of whole sequences, and of the sinks."""
    kv_heads = own.key.shape[2]
    q, d_out = grouped(query, kv_heads), grouped(cotangent, kv_heads).astype(out.dtype)
    delta = jnp.sum(d_out * grouped(out, kv_heads), axis=-1)
    d_q, gradients = jnp.zeros(q.shape, out.dtype), []
    for keys, block in _passes(own, past, seen):

        def step(j, carry, keys=keys, block=block):
            d_q, d_keys = carry
            more, *d_block = attend_backward(
                q, normalizer, d_out, delta, *block(j, keys), softcap=seen.softcap
            )
            put = partial(lax.dynamic_update_slice_in_dim, start_index=j * block.size, axis=1)
            return d_q + more, Keys(*(put(d, b) for d, b in zip(d_keys, d_block, strict=True)))

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, out.dtype), keys)
        d_q, d_keys = lax.fori_loop(*block.range, step, (d_q, zeros))
        gradients.append(jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_keys, keys))
    d_past, d_own = gradients
    d_sinks = None if sinks is None else sinks_backward(sinks, normalizer, delta).reshape(sinks.shape)
    return d_q.reshape(query.shape).astype(query.dtype), d_own, d_past, d_sinks


class _Pass(NamedTuple):
    """Cuts keys into blocks: those with numbers in `range` are visited; the first key stands at `first` of the
    sequence.
    """

    seen: Seen
    tokens: int
    size: int
    first: jax.Array
    range: tuple[Any, Any]

    def __call__(self, j: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (key, value, mask bool[R, L, size]) of block j."""
        start = self.seen.number * self.tokens
        block = Keys(*(lax.dynamic_slice_in_dim(x, j * self.size, self.size, axis=1) for x in keys))
        of_piece = lax.dynamic_slice_in_dim(self.seen.segments, start, self.tokens, axis=1)
        at = self.first + j * self.size
        of_keys = lax.dynamic_slice_in_dim(self.seen.segments, at, self.size, axis=1)
        places = start + jnp.arange(self.tokens), at + jnp.arange(self.size)
        return block.key, block.value, visible(*places, of_piece, of_keys, self.seen.window)


def block_of_keys(tokens: int) -> int:
    """Returns the keys of a block, for pieces of so many tokens."""
    return next(n for n in range(min(tokens, LARGEST_BLOCK), 0, -1) if tokens % n == 0)


def _passes(own: Keys, past: Keys, seen: Seen) -> list[tuple[Keys, _Pass]]:
    """Returns the two runs over blocks of keys: earlier pieces, then this one."""
    tokens = own.key.shape[1]
    size = block_of_keys(tokens)
    start, blocks = seen.number * tokens, tokens // size
    oldest = 0 if seen.window is None else jnp.maximum(start - seen.window + 1, 0) // size
    earlier = _Pass(seen, tokens, size, jnp.zeros_like(start), (oldest, seen.number * blocks))
    return [(past, earlier), (own, _Pass(seen, tokens, size, start, (0, blocks)))]
