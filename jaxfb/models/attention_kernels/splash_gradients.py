"""The Pallas kernel of a TPU that computes the gradients of attention, each score once.

The gradients of the queries of heads that share keys are summed in float32 in the chip's own memory until all keys
have been seen.

Shapes: R = rows, T = queries, S = keys, H = heads, G = kv heads, K = head size, N = visits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.mesh import kind_here
from jaxfb.models.attention_kernels.splash_order import Visits
from jaxfb.models.attention_kernels.splash_sums import Keys, Queries

NAME = "splash_gradients"
"""The kernel's name begins with this, and ends with the size of its blocks."""
PRODUCTS = 5
"""Of a block of queries with a block of keys: scores, their gradient, and those of queries, keys and values."""
MASKED = -0.7 * float(np.finfo(np.float32).max)
LARGEST_SUMS = 2**24
"""Bytes of the sums of queries' gradients in a chip's memory; most chips have 64 MB of it or more."""
LARGEST_SUMS_ON_V4 = 2**22
BESIDE_THE_SUMS = 2**23
"""Bytes of all else: blocks of 512 twice, and what is computed of a block's scores."""


class Settings(NamedTuple):
    """block: queries, and keys, of one block. window: tokens that a query sees, itself included. softcap: of scores."""

    block: int
    window: int | None = None
    softcap: float | None = None
    interpret: bool = False


def largest_sums() -> int:
    """Returns how many bytes of sums of queries' gradients fit in the chip's memory."""
    return LARGEST_SUMS_ON_V4 if kind_here() == "TPU v4" else LARGEST_SUMS


def call(
    visits: Visits, queries: Queries, keys: Keys, settings: Settings, together: int, dtype: Any
) -> Sequence[jax.Array]:
    """Returns the gradients, of `together` heads in a turn: [R, H, T, K], and twice f32[R, turns, S, K]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, heads, length, size = queries.query.shape
    kv_heads, num_keys, block, turns = *keys.key.shape[1:3], settings.block, heads // together
    specs = _Specs(block, size, together, turns // kv_heads)
    inputs = _inputs(queries, keys, specs)
    kernel = pl.pallas_call(
        partial(_kernel, settings=settings, together=together),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(rows, turns, len(visits.keys), together),
            in_specs=[spec for _, spec in inputs],
            out_specs=[specs.all_queries(length), specs.own_keys(), specs.own_keys()],
            scratch_shapes=[pltpu.VMEM((together, length // block, block, size), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.query.shape, dtype),
            *[jax.ShapeDtypeStruct((rows, turns, num_keys, size), jnp.float32)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_limit(dtype),
        ),
        name=f"{NAME}_{block}",
        interpret=settings.interpret,
    )
    return kernel(*visits, *(x for x, _ in inputs))


def _limit(dtype: Any) -> int:
    """Returns bytes of a chip's memory that the kernel may use: the sums, and twice what is written of them."""
    return largest_sums() + 2 * largest_sums() * jnp.dtype(dtype).itemsize // 4 + BESIDE_THE_SUMS


def _inputs(queries: Queries, keys: Keys, specs: _Specs) -> list[tuple[jax.Array, Any]]:
    """Returns what the kernel reads, and the part of it that a step does."""
    assert queries.out is not None and queries.normalizer is not None and queries.d_out is not None
    delta = jnp.sum(queries.out.astype(jnp.float32) * queries.d_out.astype(jnp.float32), -1)
    found = [
        (queries.query, specs.of_queries()),
        (queries.d_out, specs.of_queries()),
        (keys.key, specs.of_keys()),
        (keys.value, specs.of_keys()),
        (queries.normalizer[:, :, None], specs.statistics()),
        (delta[:, :, None], specs.statistics()),
    ]
    if queries.segments is None or keys.segments is None:
        return found
    return [
        *found,
        (queries.segments[:, None], specs.query_segments()),
        (keys.segments[:, :, None], specs.key_segments()),
    ]


class _Specs(NamedTuple):
    """Makes the parts of arrays that one step of the grid (row, turn, visit, head of the turn) works on.

    size: of a head. together: heads of a turn. turns: of the heads that share keys.
    """

    block: int
    size: int
    together: int
    turns: int

    def of_queries(self) -> Any:
        """Returns a block of [R, H, T, K]."""
        at = lambda row, turn, n, head, keys, queries, _: (row, turn * self.together + head, queries[n], 0)  # noqa: E731
        return _spec((None, None, self.block, self.size), at)

    def statistics(self) -> Any:
        """Returns a block of [R, H, 1, T]."""
        at = lambda row, turn, n, head, keys, queries, _: (row, turn * self.together + head, 0, queries[n])  # noqa: E731
        return _spec((None, None, 1, self.block), at)

    def of_keys(self) -> Any:
        """Returns a block of [R, G, S, K]."""
        return _spec(
            (None, None, self.block, self.size),
            lambda row, turn, n, head, keys, *_: (row, turn // self.turns, keys[n], 0),
        )

    def own_keys(self) -> Any:
        """Returns a block of [R, turns of all heads, S, K]."""
        return _spec(
            (None, None, self.block, self.size), lambda row, turn, n, head, keys, *_: (row, turn, keys[n], 0)
        )

    def all_queries(self, length: int) -> Any:
        """Returns a turn's heads of [R, H, T, K]."""
        return _spec((None, self.together, length, self.size), lambda row, turn, *_: (row, turn, 0, 0))

    def query_segments(self) -> Any:
        """Returns a block of [R, 1, T]."""
        return _spec((None, 1, self.block), lambda row, turn, n, head, keys, queries, _: (row, 0, queries[n]))

    def key_segments(self) -> Any:
        """Returns a block of [R, S, 1]."""
        return _spec((None, self.block, 1), lambda row, turn, n, head, keys, *_: (row, keys[n], 0))


def _spec(shape: tuple[int | None, ...], at: Any) -> Any:
    from jax.experimental import pallas as pl

    return pl.BlockSpec(shape, at)


def _kernel(keys, queries, distance, *refs, settings: Settings, together: int) -> None:
    """Adds what one head's block of queries and a block of keys give to the sums of their gradients.

    Those of keys and values stay where they are written to until other keys are next.
    """
    from jax.experimental import pallas as pl

    *inputs, d_query, d_key, d_value, query_sums = refs
    visit, head = pl.program_id(2), pl.program_id(3)
    last = keys.shape[0] - 1
    begins = (visit == 0) | (keys[visit] != keys[jnp.maximum(visit - 1, 0)])

    @pl.when((visit == 0) & (head == 0))
    def _():
        query_sums[...] = jnp.zeros_like(query_sums)

    @pl.when(begins & (head == 0))
    def _():
        d_key[...] = jnp.zeros_like(d_key)
        d_value[...] = jnp.zeros_like(d_value)

    def add(is_whole: bool) -> None:
        for_queries, for_keys, for_values = _products(
            *(ref[...] for ref in inputs), distance=None if is_whole else distance[visit], settings=settings
        )
        query_sums[head, queries[visit]] += for_queries
        d_key[...] += for_keys
        d_value[...] += for_values

    far, window = distance[visit], settings.window
    whole = (far >= 1) & (True if window is None else (far + 1) * settings.block <= window)
    pl.when(whole)(partial(add, True))
    pl.when((far >= 0) & ~whole)(partial(add, False))

    @pl.when((visit == last) & (head == together - 1))
    def _():
        d_query[...] = query_sums[...].reshape(d_query.shape).astype(d_query.dtype)


def _products(
    query: jax.Array,
    d_out: jax.Array,
    key: jax.Array,
    value: jax.Array,
    normalizer: jax.Array,
    delta: jax.Array,
    query_segments: jax.Array | None = None,
    key_segments: jax.Array | None = None,
    *,
    distance: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a block's part of the gradients, float32 [queries, K], and twice [keys, K].

    Scores have the keys first, so that the two products that give gradients of keys and values need no transpose.

    Args:
      normalizer, delta: f32[1, queries]. query_segments: i32[1, queries]. key_segments: i32[keys, 1].
      distance: of the queries from the keys in blocks; None where all is seen.
    """
    scores = _dot(key, query, 1, 1)
    capped, slope = _capped(scores, settings.softcap)
    seen = _seen(scores.shape, distance, settings)
    if query_segments is not None:
        same = key_segments == query_segments
        seen = same if seen is None else seen & same
    if seen is not None:
        capped = jnp.where(seen, capped, MASKED)
    prob = jnp.exp(capped - normalizer)
    for_values = _dot(prob.astype(d_out.dtype), d_out, 1, 0)
    d_scores = (_dot(value, d_out, 1, 1) - delta) * prob * slope
    for_keys = _dot(d_scores.astype(query.dtype), query, 1, 0)
    for_queries = _dot(d_scores.T.astype(key.dtype), key, 1, 0)
    return for_queries, for_keys, for_values


def _dot(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    """Returns the product in float32 over one dim of each."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _capped(scores: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | float]:
    """Returns the scores as the softmax reads them, and their derivative."""
    if softcap is None:
        return scores, 1.0
    share = jnp.tanh(scores / softcap)
    return share * softcap, 1 - share * share


def _seen(shape: tuple[int, ...], distance: jax.Array | None, settings: Settings) -> jax.Array | None:
    """Returns which of [keys, queries] the causal mask and the window leave."""
    if distance is None:
        return None
    place = lax.broadcasted_iota(jnp.int32, shape, 1) - lax.broadcasted_iota(jnp.int32, shape, 0)
    behind = place + distance * settings.block
    seen = behind >= 0
    return seen if settings.window is None else seen & (behind < settings.window)
