"""The backward of splash attention by one kernel, which computes the scores once for all three gradients.

JAX's library has it as two kernels, one for queries and one for keys and values: seven products of a block of queries
with a block of keys, and the exponentials of its scores twice. Here they are five, and once. (The library's fused
kernel writes a gradient of the queries for every block of keys, rounded to the compute dtype, in memory that grows with
the square of the length.) The gradients of queries are summed in float32 in the chip's own memory until all keys have
been seen. Where those of all queries do not fit in it, the queries are cut into parts, which are computed in turn.

Shapes: R = rows, T = queries, S = keys, H = heads, G = kv heads, K = head size, N = visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfb.models.attention_kernels import splash, splash_gradients
from jaxfb.models.attention_kernels.splash_gradients import Settings, largest_sums
from jaxfb.models.attention_kernels.splash_order import Visits, in_order, unmasked, visits
from jaxfb.models.attention_kernels.splash_sums import Keys, Queries, attend, sinks_gradient


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def attended(kernel, order, query, keys: Keys, segments, sinks, settings: Settings) -> jax.Array:
    """Computes attention by a forward kernel, and its gradients by `gradients`.

    Args:
      kernel: of one row, which returns normalizers as well.
      order: the visits of each part of the queries.
      query: [R, H, T, K], scaled. segments: i32[R, T], or None. sinks: f32[H], or None.
    Returns:
      [R, H, T, K].
    """
    return _forward(kernel, order, query, keys, segments, sinks, settings)[0]


def _forward(kernel, order, query, keys, segments, sinks, settings):
    found = attend(kernel, Queries(query, segments), keys, sinks)
    out, normalizer = (checkpoint_name(x, splash.KEPT) for x in found)
    return out, (order, query, keys, segments, sinks, out, normalizer)


def _backward(settings, saved, d_out):
    order, query, keys, segments, sinks, out, normalizer = saved
    queries = Queries(query, segments, out, normalizer, d_out)
    d_query, d_key, d_value = gradients(order, queries, keys, settings, query.dtype)
    d_keys = Keys(d_key.astype(keys.key.dtype), d_value.astype(keys.value.dtype), None)
    d_sinks = None if sinks is None else sinks_gradient(sinks, queries)
    return None, None, d_query, d_keys, None, d_sinks


attended.defvjp(_forward, _backward)


def in_parts(
    distances: np.ndarray, heads: int, size: int, settings: Settings, make: Any = visits
) -> tuple[Visits, ...]:
    """Returns the visits of each equal part of the queries, so many that the sums of one fit in the chip's memory.

    Args:
      distances: i32[..., blocks of queries, blocks of keys], how many blocks the queries are behind the keys.
      heads: that share keys. size: of a head.
      make: (distances, block, window) -> the visits of a part.
    """
    number = _parts(distances.shape[-2], _heads_at_once(heads, size, settings.block), size, settings.block)
    return tuple(make(part, settings.block, settings.window) for part in np.split(distances, number, -2))


def _parts(blocks: int, heads: int, size: int, block: int) -> int:
    """Returns the number of parts of so many blocks of queries of so many heads."""
    fits = lambda n: heads * _bytes(blocks // n * block, size) <= largest_sums()  # noqa: E731
    return next(n for n in range(1, blocks + 1) if n == blocks or blocks % n == 0 and fits(n))


def gradients(
    order: Sequence[Visits], queries: Queries, keys: Keys, settings: Settings, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns these keys' part of the gradients of (query, key, value), by the normalizers of all keys.

    Args:
      order: the visits of each part of the queries.
      dtype: of the queries' gradients; those of keys and values are float32.
    """
    cut = lambda x: jnp.split(x, len(order), axis=1 if x.ndim == 2 else 2)  # noqa: E731
    of_parts = zip(*(cut(x) if x is not None else [None] * len(order) for x in queries), strict=True)
    d_queries, sums = [], None
    for part, (query, *others) in zip(order, of_parts, strict=True):
        if sums is not None:  # else the compiler keeps what each part gives until all are computed
            query, sums = lax.optimization_barrier((query, sums))
        d_query, *of_keys = _of_part(part, Queries(query, *others), keys, settings, dtype)
        d_queries.append(d_query)
        sums = of_keys if sums is None else [*map(jnp.add, sums, of_keys)]
    assert sums is not None
    d_key, d_value = sums
    return jnp.concatenate(d_queries, 2), d_key, d_value


def causal_gradients(queries: Queries, keys: Keys, softcap: float | None, interpret: bool) -> Any:
    """Returns the gradients, in float32, of causal attention of tokens to themselves and those before."""
    return _gradients_of(in_order, queries, keys, softcap, interpret)


def unmasked_gradients(queries: Queries, keys: Keys, softcap: float | None, interpret: bool) -> Any:
    """Returns the gradients, in float32, where all queries see all keys, of which there are as many."""
    return _gradients_of(unmasked, queries, keys, softcap, interpret)


def _gradients_of(
    distances: Any, queries: Queries, keys: Keys, softcap: float | None, interpret: bool
) -> Any:
    length, size = queries.query.shape[2:]
    settings = Settings(splash.block_size(length), None, softcap, interpret)
    blocks, shared = length // settings.block, queries.query.shape[1] // keys.key.shape[1]
    order = in_parts(distances(blocks, blocks), shared, size, settings)
    return gradients(order, queries, keys, settings)


def _of_part(visits: Visits, queries: Queries, keys: Keys, settings: Settings, dtype: Any) -> Any:
    """Returns the gradients of a part of the queries, and its share of those of keys and values."""
    kv_heads, heads, size = keys.key.shape[1], queries.query.shape[1], queries.query.shape[3]
    together = _heads_at_once(heads // kv_heads, size, settings.block)
    d_query, *of_turns = splash_gradients.call(visits, queries, keys, settings, together, dtype)
    return d_query, *(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2) for x in of_turns)


def _heads_at_once(shared: int, size: int, block: int) -> int:
    """Returns for how many of the heads that share keys the sums of one block of queries fit: nearly always all.

    With fewer, each group of heads has its own gradients of the keys, which take memory until they are added.
    """
    fits = lambda n: n == 1 or n * _bytes(block, size) <= largest_sums()  # noqa: E731
    return max(n for n in range(1, shared + 1) if shared % n == 0 and fits(n))


def _bytes(length: int, size: int) -> int:
    """Returns the bytes of the sums of one head's queries."""
    return 4 * length * -(-size // splash.LANES) * splash.LANES
