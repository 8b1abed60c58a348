"""Softmax attention in plain JAX, a block of queries at a time: what runs where no flash kernel does.

Causal queries never meet the keys behind their block, which saves three eighths of the products, of the softmax and of
what is kept for the backward; with a window they do not meet the keys before it either. The backward is written by
hand: autodiff makes each gradient of the scores twice, once as it lies and once transposed, and transposing
[queries, keys] costs a CPU more than the product it is for.

Shapes: R = rows, T = queries, S = keys, H = heads, G = kv heads, N = H / G, B = queries of a block, K = head size.
Scores, softmax and sums are float32 (float64 for float64), probabilities are kept in the queries' dtype.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.models.layers import statistics_dtype
from jaxfb.parallel.scores import PLAIN, Scores, slope, soft_capped
from jaxfb.platforms.compat import custom_vjp

_MOST_BLOCKS = 4  # the program grows with them; 4 save three quarters of what can be saved
_MOST_BLOCKS_WITH_WINDOW = 16  # each sees no more than the window and itself
_SMALLEST_BLOCK = 64


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores = PLAIN,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    window: int | None = None,
) -> jax.Array:
    """Computes softmax(query . key / sqrt(K)) . value. Equals `jax.nn.dot_product_attention` to rounding; reverse
    mode only.

    Args:
      query: float[R, T, H, K].  key, value: float[R, S, G, K]; G divides H.
      scores: soft cap and sinks.
      mask: bool[R, 1, T, S], True where a query may look; everywhere if None.
      is_causal: query t looks at keys 0..t only; T is S.
      window: a causal query t looks at keys t - window + 1..t only; None: at all of 0..t.
    Returns:
      float[R, T, H, K].
    """
    rows, length, _, size = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, size).transpose(0, 2, 3, 1, 4)
    key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
    sinks = None if scores.sinks is None else scores.sinks.reshape(key.shape[1], -1)
    look = _Look(is_causal, window, scores.softcap)
    context = _attend(grouped, key, value, sinks, None if mask is None else mask[:, :, None], look)
    return context.transpose(0, 3, 1, 2, 4).reshape(query.shape)


class _Look(NamedTuple):
    """Describes which keys a query sees besides what a mask hides, and the soft cap of their scores."""

    is_causal: bool
    window: int | None
    softcap: float | None


class _Block(NamedTuple):
    """Queries [first, end) and the keys [oldest, seen) they may look at."""

    first: int
    end: int
    oldest: int
    seen: int

    def visible(self, mask: jax.Array | None, look: _Look) -> jax.Array:
        """Returns bool, broadcastable to [R, G, N, B, keys of the block]."""
        whole = jnp.ones((self.end - self.first, self.seen - self.oldest), bool)
        seen = jnp.tril(whole, self.first - self.oldest) if look.is_causal else whole
        if look.window is not None:
            seen = jnp.triu(seen, self.first - self.oldest - look.window + 1)
        return seen if mask is None else seen & mask[..., self.first : self.end, self.oldest : self.seen]

    def keys_of(self, x: jax.Array) -> jax.Array:
        """Returns the keys of the block, of [R, G, S, K]."""
        return x[:, :, self.oldest : self.seen]


def causal_blocks(length: int, window: int | None = None) -> list[_Block]:
    """Returns the blocks of so many causal queries. With a window they are no longer than it, where that is not many
    blocks.
    """
    size = -(-length // _MOST_BLOCKS)
    if window is not None:
        size = min(size, max(window, -(-length // _MOST_BLOCKS_WITH_WINDOW)))
    size = max(_SMALLEST_BLOCK, size)
    ends = [min(first + size, length) for first in range(0, length, size)]
    back = length if window is None else window - 1
    return [_Block(first, end, max(first - back, 0), end) for first, end in pairwise([0, *ends])]


def _blocks(num_queries: int, num_keys: int, look: _Look) -> list[_Block]:
    if not look.is_causal:
        return [_Block(0, num_queries, 0, num_keys)]
    return causal_blocks(num_queries, look.window)


@custom_vjp(5)
def _attend(query, key, value, sinks, mask, look):
    """Computes attention: [R, G, N, T, K], [R, G, S, K] twice, [G, N] or None -> [R, G, N, T, K]."""
    return _forward(query, key, value, sinks, mask, look)[0]


def _forward(query, key, value, sinks, mask, look):
    probs, context = [], []
    for block in _blocks(query.shape[3], key.shape[2], look):
        here = query[..., block.first : block.end, :]
        probs.append(_probs(here, block.keys_of(key), sinks, block.visible(mask, look), look.softcap))
        context.append(_product("rgms,rgsk->rgmk", probs[-1].of_keys, block.keys_of(value)))
    return jnp.concatenate(context, axis=3).astype(query.dtype), (query, key, value, sinks, probs)


def _backward(look, kept, cotangent):
    query, key, value, sinks, probs = kept
    blocks = _blocks(query.shape[3], key.shape[2], look)
    of_blocks = [
        _block_backward(
            query[..., block.first : block.end, :],
            cotangent[..., block.first : block.end, :],
            block.keys_of(key),
            block.keys_of(value),
            prob,
            look.softcap,
        )
        for block, prob in zip(blocks, probs, strict=True)
    ]
    to_query, to_key, to_value, to_sinks = zip(*of_blocks, strict=True)
    return (
        jnp.concatenate(to_query, axis=3).astype(query.dtype),
        _sum_of_keys(blocks, to_key).astype(key.dtype),
        _sum_of_keys(blocks, to_value).astype(value.dtype),
        None if sinks is None else jnp.stack(to_sinks).sum(0).astype(sinks.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


class _Probs(NamedTuple):
    """Holds the probabilities [R, G, N, B, seen] of keys, and [R, G, N, B, 1] of the sinks if there are any."""

    of_keys: jax.Array
    of_sinks: jax.Array | None


def _probs(query, key, sinks, visible, softcap) -> _Probs:
    """Computes probabilities of [R, G, N, B, K] and [R, G, seen, K]."""
    scores = _scores(query, key, softcap)
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min / 2)
    if sinks is None:
        return _Probs(jax.nn.softmax(scores, axis=-1).astype(query.dtype), None)
    sink = sinks.astype(scores.dtype)[None, :, :, None, None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sink)
    of_keys, of_sinks = jnp.exp(scores - top), jnp.exp(sink - top)
    total = of_keys.sum(-1, keepdims=True) + of_sinks
    return _Probs((of_keys / total).astype(query.dtype), of_sinks / total)


def _scores(query, key, softcap):
    return soft_capped(_product("rgmk,rgsk->rgms", query, key) / query.shape[-1] ** 0.5, softcap)


def _block_backward(query, cotangent, key, value, prob: _Probs, softcap):
    """Returns gradients of a block's queries, its part of those of the keys and values it sees, and of the sinks."""
    to_prob = _product("rgmk,rgsk->rgms", cotangent, value)
    wide = prob.of_keys.astype(to_prob.dtype)
    mean = jnp.sum(wide * to_prob, axis=-1, keepdims=True)
    to_scores = wide * (to_prob - mean) / query.shape[-1] ** 0.5
    if softcap is not None:
        to_scores *= slope(_scores(query, key, softcap), softcap)
    to_scores = to_scores.astype(query.dtype)
    return (
        _product("rgms,rgsk->rgmk", to_scores, key),
        _over_queries(to_scores, query),
        _over_queries(prob.of_keys, cotangent),
        None if prob.of_sinks is None else -jnp.sum(prob.of_sinks * mean, axis=(0, 3, 4)),
    )


def _product(subscripts, of_queries, of_keys):
    """Multiplies [R, G, N, B, ...] with [R, G, seen, K], N and B as one dim m, or XLA transposes the keys in memory."""
    product = _einsum(subscripts, _matrices(of_queries), of_keys)
    return product.reshape(*of_queries.shape[:4], -1)


def _over_queries(of_keys, of_queries):
    """Sums over N and B [R, G, N, B, S] times [R, G, N, B, K]: wide[R, G, S, K], transposing the small one."""
    small = _matrices(of_queries).swapaxes(2, 3)
    return _einsum("rgkm,rgms->rgks", small, _matrices(of_keys)).swapaxes(2, 3)


def _matrices(x):
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _einsum(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=statistics_dtype(a.dtype))


def _sum_of_keys(blocks, parts):
    """Adds arrays [R, G, keys of each block, K] to [R, G, S, K]; the last block sees the last key."""
    total = jnp.pad(parts[-1], [(0, 0), (0, 0), (blocks[-1].oldest, 0), (0, 0)])
    for block, part in zip(blocks[:-1], parts, strict=False):
        total = total.at[:, :, block.oldest : block.seen].add(part)
    return total
