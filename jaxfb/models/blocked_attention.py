"""Softmax attention in plain JAX, a block of queries at a time: what runs where no flash kernel does.

Causal queries never meet the keys behind their block, which saves three eighths of the products, of the softmax and of
what is kept for the backward. The backward is written by hand: autodiff makes each gradient of the scores twice, once
as it lies and once transposed, and transposing [queries, keys] costs a CPU more than the product it is for.

Shapes: R = rows, T = queries, S = keys, H = heads, G = kv heads, N = H / G, B = queries of a block, K = head size.
Scores, softmax and sums are float32 (float64 for float64), probabilities are kept in the queries' dtype.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.models.layers import statistics_dtype

_MOST_BLOCKS = 4  # the program grows with them; 4 save three quarters of what can be saved
_SMALLEST_BLOCK = 64


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Computes softmax(query . key / sqrt(K)) . value. Equals `jax.nn.dot_product_attention` to rounding; reverse
    mode only.

    Args:
      query: float[R, T, H, K].  key, value: float[R, S, G, K]; G divides H.
      mask: bool[R, 1, T, S], True where a query may look; everywhere if None.
      is_causal: query t looks at keys 0..t only; T is S.
    Returns:
      float[R, T, H, K].
    """
    rows, length, _, size = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, size).transpose(0, 2, 3, 1, 4)
    key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
    context = _attend(grouped, key, value, None if mask is None else mask[:, :, None], is_causal)
    return context.transpose(0, 3, 1, 2, 4).reshape(query.shape)


class _Block(NamedTuple):
    """Queries [first, end) and the keys [0, seen) they may look at."""

    first: int
    end: int
    seen: int

    def visible(self, mask: jax.Array | None, is_causal: bool) -> jax.Array:
        """Returns bool, broadcastable to [R, G, N, B, seen]."""
        whole = jnp.ones((self.end - self.first, self.seen), bool)
        seen = jnp.tril(whole, self.first) if is_causal else whole
        return seen if mask is None else seen & mask[..., self.first : self.end, : self.seen]


def causal_blocks(length: int) -> list[_Block]:
    """Returns the blocks of so many causal queries."""
    size = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS))
    ends = [min(first + size, length) for first in range(0, length, size)]
    return [_Block(first, end, end) for first, end in zip([0, *ends], ends, strict=False)]


def _blocks(num_queries: int, num_keys: int, is_causal: bool) -> list[_Block]:
    return causal_blocks(num_queries) if is_causal else [_Block(0, num_queries, num_keys)]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, mask, is_causal):
    """Computes attention: [R, G, N, T, K], [R, G, S, K] twice -> [R, G, N, T, K]."""
    return _forward(query, key, value, mask, is_causal)[0]


def _forward(query, key, value, mask, is_causal):
    probs, context = [], []
    for block in _blocks(query.shape[3], key.shape[2], is_causal):
        here = query[..., block.first : block.end, :]
        probs.append(_probs(here, key[:, :, : block.seen], block.visible(mask, is_causal)))
        context.append(_product("rgms,rgsk->rgmk", probs[-1], value[:, :, : block.seen]))
    return jnp.concatenate(context, axis=3).astype(query.dtype), (query, key, value, probs)


def _backward(is_causal, kept, cotangent):
    query, key, value, probs = kept
    of_blocks = [
        _block_backward(
            *(x[..., block.first : block.end, :] for x in (query, cotangent)),
            *(x[:, :, : block.seen] for x in (key, value)),
            prob,
        )
        for block, prob in zip(_blocks(query.shape[3], key.shape[2], is_causal), probs, strict=True)
    ]
    to_query, to_key, to_value = zip(*of_blocks, strict=True)
    return (
        jnp.concatenate(to_query, axis=3).astype(query.dtype),
        _sum_from_first(to_key).astype(key.dtype),
        _sum_from_first(to_value).astype(value.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


def _probs(query, key, visible):
    """Computes probabilities: [R, G, N, B, K], [R, G, seen, K] -> [R, G, N, B, seen]."""
    scores = _product("rgmk,rgsk->rgms", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min / 2)
    return jax.nn.softmax(scores, axis=-1).astype(query.dtype)


def _block_backward(query, cotangent, key, value, prob):
    """Returns gradients of a block's queries, and its part of those of the keys and values it sees."""
    to_prob = _product("rgmk,rgsk->rgms", cotangent, value)
    wide = prob.astype(to_prob.dtype)
    centered = to_prob - jnp.sum(wide * to_prob, axis=-1, keepdims=True)
    to_scores = (wide * centered / query.shape[-1] ** 0.5).astype(query.dtype)
    return (
        _product("rgms,rgsk->rgmk", to_scores, key),
        _over_queries(to_scores, query),
        _over_queries(prob, cotangent),
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


def _sum_from_first(parts):
    """Adds arrays [R, G, seen, K] that all begin at key 0; the last is the longest."""
    *shorter, total = parts
    for part in shorter:
        total = total.at[:, :, : part.shape[2]].add(part)
    return total
