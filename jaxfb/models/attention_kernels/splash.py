"""Splash attention, the flash attention of a TPU: a Pallas kernel that comes with JAX.

`attention.py` runs it where `choose_backend` returns "splash". Scores exist a block at a time, in the chip's own
memory, and blocks above the diagonal are skipped; of the forward it keeps the output and a softmax normalizer a query.

Shapes: R = rows, T = tokens of a row, H = heads, G = kv heads, K = head_size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.mesh import platform_here
from jaxfb.parallel.tensor import AXIS, automatic_axes
from jaxfb.platforms.compat import config_value

KEPT = "splash_attention"
"""The name under which what the backward needs of the forward is known to `jax.checkpoint`."""
LANES = 128
LARGEST_BLOCK = 512
LARGEST_HEAD = 256


def refusal(query: Any, key: Any) -> str | None:
    """Returns why the kernel cannot take [R, T, H, K] and [R, T, G, K], or where they are traced, and what it could
    take.
    """
    return _refused_here(key.shape[2]) or refused_sizes(query.dtype, query.shape[1], query.shape[3])


def refusal_of_halves(query: Any, key: Any) -> str | None:
    """Returns `refusal` of half of a device's [R, T, H, K] and [R, T, G, K] over a context axis: of one piece each."""
    halves = (
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2, *x.shape[2:]), x.dtype) for x in (query, key)
    )
    return refusal(*halves)


def _refused_here(kv_heads: int) -> str | None:
    platform, automatic = platform_here(), automatic_axes()
    others = [axis for axis in automatic if axis != AXIS]
    shards = jax.sharding.get_abstract_mesh().shape[AXIS] if AXIS in automatic else 1
    if platform != "tpu":
        return f"runs on TPUs, not on a {platform}; use attention='xla'"
    if others:
        return f"cannot be cut over automatic axes, here {', '.join(others)}; run it inside jax.shard_map over them"
    if config_value("jax_enable_x64"):  # grouped heads mix int32 and int64 in it
        return "needs jax_enable_x64 off; turn it off"
    if kv_heads % shards:
        nearest = kv_heads + shards - kv_heads % shards
        return f"takes kv heads that tensor={shards} divides, not {kv_heads}; use num_kv_heads={nearest}"
    return None


def refused_sizes(dtype: Any, length: int, head_size: int) -> str | None:
    """Returns why the kernel cannot take a dtype and sizes. Tokens must fill the 128 lanes of a vector; heads are
    padded to them, and
    sizes up to 256 have been compiled for every TPU from v4 to TPU7x."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, not {dtype}; use compute_dtype='bfloat16'"
    if length % LANES:
        nearest = max(LANES, round(length / LANES) * LANES)
        return (
            f"takes lengths that are multiples of {LANES}, not {length}; use a sequence length of {nearest}"
        )
    if head_size > LARGEST_HEAD:
        return f"takes head sizes up to {LARGEST_HEAD}, not {head_size}; use head_size={LARGEST_HEAD}"
    return None


def block_size(length: int) -> int:
    """Returns queries, and keys, of one block: the largest multiple of 128 up to 512 that divides the length.

    512 is what MaxText trains with: a block's scores are 1 MB of float32, so that all that the kernels hold at a time
    fits the memory beside the matrix unit on every generation, and a product is large enough to keep that unit busy.
    """
    return next(size for size in range(LARGEST_BLOCK, 0, -LANES) if length % size == 0)


def scaled(query: jax.Array) -> jax.Array:
    """Scales queries in float32, since the kernel's scores are plain products and 1 / sqrt(K) is not in bfloat16."""
    return (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)


def segment_ids(ids: jax.Array | None, of_keys: jax.Array | None = None) -> Any:
    """Returns what a kernel takes as segments of one row; of_keys: where keys are not those of the queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return None if ids is None else splash.SegmentIds(q=ids, kv=ids if of_keys is None else of_keys)


def made(mask: Any, num_heads: int, softcap: float | None, interpret: bool) -> Any:
    """Returns a function of one row whose heads all have this mask, and its normalizers.

    (q [H, T, K], k, v [G, S, K], SegmentIds or None, sinks [H] or None) -> (out [H, T, K], (normalizer f32[H, T],)).
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

    block = block_size(mask.shape[0])
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            mask=MultiHeadMask([mask for _ in range(num_heads)]),
            block_sizes=splash.BlockSizes(block, block),
            attn_logits_soft_cap=softcap,
            interpret=interpret,
            save_residuals=True,
        )
    # numbers of which blocks to visit: on the host, so that a program for other devices may hold them
    return jax.tree.map(np.asarray, kernel)


@lru_cache(maxsize=64)
def for_sums(
    num_heads: int, length: int, seen: int, softcap: float | None, interpret: bool
) -> tuple[Any, Any]:
    """Returns two kernels that give normalizers: a causal one of `length` tokens, one of `seen` without a mask."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    masks = splash.CausalMask((length, length)), splash.FullMask((seen, seen))
    own, others = (made(mask, num_heads, softcap, interpret) for mask in masks)
    return own, others
