"""Splash attention of whole sequences on one device.

Shapes: R = rows, T = tokens of a row, H = heads, G = kv heads, K = head_size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from jaxfb.models.attention_kernels import splash
from jaxfb.models.attention_kernels.splash_backward import attended, in_parts
from jaxfb.models.attention_kernels.splash_gradients import Settings
from jaxfb.models.attention_kernels.splash_order import in_order
from jaxfb.models.attention_kernels.splash_sums import Keys
from jaxfb.parallel.scores import PLAIN, Scores


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    scores: Scores = PLAIN,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes causal attention inside each segment of each row: `packed_attention` by the kernel.

    A Pallas call is one device's, so over `tensor` each shard calls it with its own heads (`on_head_shards`).
    Grouped-query heads are not repeated.

    Args:
      query: float[R, T, H, K].  key, value: float[R, T, G, K].
      segments: i32[R, T], or None.
      scores, window: as those of `packed_attention`; blocks of which nothing is in it are skipped as well.
      interpret: run the kernel step by step as plain JAX, on any platform: for tests.
    Returns:
      float[R, T, H, K].
    """
    length, heads, size = query.shape[1:]
    settings = Settings(splash.block_size(length), window, scores.softcap, interpret)
    blocks = length // settings.block
    kernel = _kernel(heads, length, window, scores.softcap, interpret)
    order = in_parts(in_order(blocks, blocks), heads // key.shape[2], size, settings)
    q, k, v = (x.swapaxes(1, 2) for x in (splash.scaled(query), key, value))
    out: Any = attended(kernel, order, q, Keys(k, v, segments), segments, scores.sinks, settings)
    return out.swapaxes(1, 2)


@lru_cache(maxsize=64)
def _kernel(num_heads: int, length: int, window: int | None, softcap: float | None, interpret: bool) -> Any:
    """Returns the forward kernel of one row."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    if window is None:
        mask = library.CausalMask((length, length))
    else:
        mask = library.LocalMask((length, length), window_size=(window - 1, 0), offset=0)
    return splash.made(mask, num_heads, softcap, interpret)
