"""Runs cuDNN's attention; over long packed rows a block of queries at a time.

To cuDNN the documents of a packed row are a bias [R, 1, T, S] in the compute dtype, and its backward returns a gradient
of that bias, as large (its own packed layout has no public JAX name). Whole, each takes 2 GB a row at 32,768 tokens and
34 GB at 131,072. So the queries of longer rows are taken in blocks, each with the keys that it may see, and the bias of
a block is made again for its backward.

Shapes: R = rows, T = queries, S = keys, H = heads, G = kv heads, K = head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.models.layers import statistics_dtype
from jaxfb.parallel.online_softmax import visible
from jaxfb.platforms.kinds import compute_capability

LARGEST_WHOLE = 2**31
"""Bytes of a bias up to which one call takes all queries: it leaves out the keys behind each query, which a call for a
block does not. 8B at 32,768 tokens on 32 H100, fsdp 8 x context 4, takes 3.84 s and 13.5 GB so, in blocks 4.07 s and
11.3 GB (by XLA of jax 0.10.2)."""
LARGEST_PART = 2**30
"""Bytes of the bias of a block."""
GROUPS = 8
"""How many groups of queries see different keys: those before the group's end."""
_KEPT = "dot_product_attention_fwd_wrapper"


class Tokens(NamedTuple):
    """Describes tokens: their places in the sequence, i32[1, T], and their documents, i32[R, T]."""

    places: jax.Array
    segments: jax.Array

    def part(self, of: slice) -> Tokens:
        """Returns some of the tokens."""
        return Tokens(self.places[:, of], self.segments[:, of])


def refusal(query: Any, packed: bool, plain: bool) -> str | None:
    """Returns why cuDNN cannot take these queries and what it could take, or None."""
    limit = 256 if compute_capability() >= 9 else 128
    _, length, _, size = query.shape
    if not plain:
        return "has neither a soft cap nor sinks; use attention='xla'"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {query.dtype}; use compute_dtype='bfloat16'"
    if size % 8 or size > limit:
        nearest = min(limit, max(8, round(size / 8) * 8))
        return f"takes head sizes that are multiples of 8 up to {limit}, not {size}; use head_size={nearest}"
    if packed and length % 2:
        return f"takes packed rows of even length, not {length}; use a sequence length of {length + 1}"
    return None


def runs(backend: str, query: Any, *, packed: bool, plain: bool) -> bool:
    """Returns whether a config's setting is cuDNN's attention for these queries on a GPU; arguments as those of
    `choose_backend`.
    """
    wanted = backend == "cudnn" or (backend == "auto" and compute_capability() >= 8)
    return wanted and refusal(query, packed, plain) is None


def causal(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, window: int | None
) -> jax.Array:
    """Computes causal attention inside each segment; arguments as those of `packed_attention`."""
    if segments is None:
        return _call(query, key, value, is_causal=True, window=window)
    tokens = Tokens(jnp.arange(query.shape[1])[None], segments)
    if takes_whole(query):
        return _call(query, key, value, _bias(tokens, tokens, window, query.dtype), is_causal=True)
    key, value = wide(key), wide(value)
    found: list[jax.Array] = []
    for group in groups(query.shape[1], window):
        if found:  # one after the other, or XLA makes the biases of several at a time
            found[-1], key, value, tokens = lax.optimization_barrier((found[-1], key, value, tokens))
        own, seen = slice(group.first, group.end), slice(group.oldest, group.end)
        queries, keys = tokens.part(own), tokens.part(seen)
        found.append(among(query[:, own], key[:, seen], value[:, seen], queries, keys, window))
    return jnp.concatenate(found, axis=1)


def takes_whole(query: Any) -> bool:
    """Returns whether one call takes these queries [R, T, H, K] of packed rows, or their shape."""
    return _size_of_bias(query, query.shape[1]) <= LARGEST_WHOLE


def among(
    query: jax.Array, key: jax.Array, value: jax.Array, queries: Tokens, keys: Tokens, window: int | None
) -> jax.Array:
    """Computes attention of queries to those of the given keys that each may see, a block of queries at a time.

    Args:
      query: float[R, T, H, K].  key, value: float[R, S, G, K], `wide`, so that their gradients are summed in float32.
    Returns:
      [R, T, H, K] in the dtype of the queries.
    """

    def attend(query, queries):
        dtype = query.dtype
        return _call(query, key.astype(dtype), value.astype(dtype), _bias(queries, keys, window, dtype))

    # the backward makes the bias again, but keeps what the kernel found
    block = jax.checkpoint(attend, policy=lambda primitive, *_, **__: primitive.name == _KEPT)
    size, length = block_size(query, key.shape[1]), query.shape[1]
    alike, rest = slice(length // size * size), slice(length // size * size, length)
    blocks = jax.tree.map(lambda x: _blocks(x, size), (query[:, alike], queries.part(alike)))
    found = _joined(lax.map(lambda given: block(*given), blocks))
    if length % size == 0:
        return found
    return jnp.concatenate([found, block(query[:, rest], queries.part(rest))], axis=1)


def wide(x: jax.Array) -> jax.Array:
    """Returns keys or values in the dtype in which autodiff adds up the gradients that each block makes of them."""
    return x.astype(statistics_dtype(x.dtype))


class Group(NamedTuple):
    """Describes queries [first, end), which see keys of [oldest, end)."""

    first: int
    end: int
    oldest: int


def groups(length: int, window: int | None) -> list[Group]:
    """Returns the groups of so many causal queries, all of even length: cuDNN takes no other bias."""
    size, back = _even(-(-length // GROUPS)), length if window is None else _even(window)
    return [Group(first, min(first + size, length), max(first - back, 0)) for first in range(0, length, size)]


def _even(number: int) -> int:
    return number + number % 2


def _size_of_bias(query: Any, keys: int) -> int:
    """Returns its bytes for all of the queries."""
    return query.shape[0] * query.shape[1] * keys * query.dtype.itemsize


def block_size(query: Any, keys: int) -> int:
    """Returns how many queries a block has: as many as LARGEST_PART allows, but at most half of them, so that blocks
    are a loop, whose turns XLA does not run at a time, each with its bias.
    """
    length = query.shape[1]
    allowed = length * LARGEST_PART // _size_of_bias(query, keys)
    return min(length, max(128, allowed // 128 * 128))


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """Cuts [R, n * size, ...] into [n, R, size, ...]."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 0, 1)


def _joined(blocks: jax.Array) -> jax.Array:
    """Joins what `_blocks` cut."""
    return jnp.swapaxes(blocks, 0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])


def _bias(queries: Tokens, keys: Tokens, window: int | None, dtype: Any) -> jax.Array:
    """Returns [R, 1, T, S], 0 where a query may look and far below every score elsewhere."""
    seen = visible(queries.places[0], keys.places[0], queries.segments, keys.segments, window)
    far = 2.0**15 if dtype == jnp.float16 else 2.0**41  # cuDNN subtracts two of them from each other
    # a product in place of `where`, whose constants autodiff would keep whole for the backward
    return ((seen.astype(dtype) - 1) * far)[:, None]


def _call(query, key, value, bias=None, *, is_causal=False, window=None) -> jax.Array:
    near = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, bias, is_causal=is_causal, implementation="cudnn", local_window_size=near
    )
