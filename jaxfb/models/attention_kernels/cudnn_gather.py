"""Attention over a context axis of GPUs by cuDNN's kernel on gathered keys.

A device's queries are an early and a late piece of the sequence (`jaxfb.parallel.context.zigzag`). The early one sees
keys of the sequence's first half only, so that a device computes three quarters of all scores of its queries, of which
a causal query needs half.

Shapes: R = rows, T = tokens on this device, H = heads, G = kv heads, K = head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.models.attention_kernels import cudnn
from jaxfb.parallel.collectives import gather_summing_wide
from jaxfb.parallel.context import AXIS, places_of_all, size_here, token_index
from jaxfb.parallel.scores import PLAIN, Scores


def cudnn_gathered(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores = PLAIN,
    *,
    segments: jax.Array | None,
    window: int | None = None,
) -> jax.Array:
    """Computes causal attention inside each segment over the whole sequence, of which every device has its zigzag part.

    Args:
      query: float[R, T, H, K].  key, value: float[R, T, G, K].
      scores, window: as those of `packed_attention`; cuDNN's scores are plain.
      segments: i32[R, T], or None.
    Returns:
      float[R, T, H, K].
    """
    length = query.shape[1]
    segments = jnp.ones(query.shape[:2], jnp.int32) if segments is None else segments
    everywhere = lax.all_gather(segments, AXIS, axis=1, tiled=True)
    queries = cudnn.Tokens(token_index(length)[None], segments)
    keys = cudnn.Tokens(places_of_all(length)[None], everywhere)
    key, value = (cudnn.wide(gather_summing_wide(x, AXIS, 1)) for x in (key, value))
    first, second = slice(length // 2), slice(length // 2, length)
    early_keys, early_value, early = jax.tree.map(_of_first_half, (key, value, keys))
    found = [
        cudnn.among(query[:, first], early_keys, early_value, queries.part(first), early, window),
        cudnn.among(query[:, second], key, value, queries.part(second), keys, window),
    ]
    return jnp.concatenate(found, axis=1)


def _of_first_half(x: jax.Array) -> jax.Array:
    """Returns the tokens in the first half of the sequence, of [R, all of them, ...] in the order of devices."""
    rows, length = x.shape[:2]
    return x.reshape(rows, size_here(), 2, -1, *x.shape[2:])[:, :, 0].reshape(rows, length // 2, *x.shape[2:])
