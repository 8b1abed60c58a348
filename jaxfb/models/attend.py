"""Chooses how a layer attends: over the tokens of one device, over a context axis, in a kernel on each tensor shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from jaxfb.mesh import platform_here
from jaxfb.models.attention import Attend, choose_backend, packed_attention
from jaxfb.models.attention_kernels import cudnn, splash, splash_gather, splash_ring
from jaxfb.models.attention_kernels.cudnn_gather import cudnn_gathered
from jaxfb.models.config import TransformerConfig
from jaxfb.parallel.context import context_attention, exchanged, size_here
from jaxfb.parallel.scores import PLAIN
from jaxfb.parallel.tensor import num_shards, on_head_shards

KERNELS = ("auto", "splash")
"""Values of `attention` with which a TPU's kernels may attend over a context axis."""


def attend_to(config: TransformerConfig, segments: jax.Array | None) -> Attend:
    """Returns the attention of a layer with this config: over rows of these segments, i32[R, T], or unpacked ones."""
    how = dict(backend=config.attention, context=config.context_attention, window=config.window)
    return partial(_attend_packed, segments=segments, **how)


def _attend_packed(query, key, value, scores=PLAIN, *, segments, backend, context, window):
    if size_here() == 1:
        return _whole(query, key, value, scores, segments, backend=backend, window=window), None
    context = context_method(context, backend, query, key, plain=scores.are_plain)
    if context == "all_to_all":
        attend = partial(_whole, backend=backend if _cuts_heads(key) else "xla", window=window)
        return exchanged(attend, query, key, value, scores, segments), None
    attend = _context_kernel(context, backend, window, query, key, scores.are_plain)
    if attend is not None:
        return _on_head_shards(attend, query, key, value, scores, segments), None
    attend = partial(context_attention, method=context, window=window)
    return attend(query, key, value, scores, segments=segments), None


def _whole(query, key, value, scores, segments, *, backend, window):
    """Returns attention over whole rows; a kernel runs on each tensor shard."""
    chosen = choose_backend(backend, query, key, packed=segments is not None, plain=scores.are_plain)
    attend = partial(packed_attention, backend=chosen, window=window)
    if chosen == "xla":
        return attend(query, key, value, scores, segments=segments)
    return _on_head_shards(attend, query, key, value, scores, segments)


def context_method(asked: str, backend: str, query: jax.Array, key: jax.Array, *, plain: bool = True) -> str:
    """Returns how a device's [R, T, H, K] and [R, T, G, K] attend over the context axis.

    For "auto" keys are gathered where a TPU's kernel takes them: a ring merges what its turns return through HBM,
    which takes a tenth of a step at 131,072 tokens over 16 devices. Without a kernel all scores of a device's
    queries would exist at once. On GPUs tokens are exchanged for heads where the heads can be cut, and else keys are
    gathered, if cuDNN's kernel takes what comes of it. 8B at 32,768 tokens on 32 H100, fsdp 8 x context 4, takes 3.8 s
    in place of 14.9 s by a ring and 13.5 GB in place of 39.3 GB (by XLA of jax 0.10.2).
    """
    if asked != "auto":
        return asked
    if backend in KERNELS and splash_gather.refusal(query, key) is None:
        return "all_gather"
    if not _takes_cudnn(backend, query, plain):
        return "ring"
    return "all_to_all" if _cuts_heads(key) else "all_gather"


def _takes_cudnn(backend: str, query: jax.Array, plain: bool) -> bool:
    """Returns whether cuDNN's kernel takes either half of a device's queries."""
    half = jax.ShapeDtypeStruct((query.shape[0], query.shape[1] // 2, *query.shape[2:]), query.dtype)
    return platform_here() == "gpu" and cudnn.runs(backend, half, packed=True, plain=plain)


def _cuts_heads(key: jax.Array) -> bool:
    """Returns whether the context axis and then the tensor axis divide the kv heads."""
    return key.shape[2] % (size_here() * num_shards()) == 0


def _context_kernel(
    method: str, backend: str, window: int | None, query: jax.Array, key: jax.Array, plain: bool
) -> Callable | None:
    """Returns a function by kernels for attention over a context axis; None where they cannot run."""
    if method == "all_gather" and _takes_cudnn(backend, query, plain):
        return partial(cudnn_gathered, window=window)
    if backend not in KERNELS:
        return None
    if method == "all_gather" and splash_gather.refusal(query, key) is None:
        return partial(splash_gather.splash_gathered, window=window)
    ring = method == "ring" and window is None and splash.refusal_of_halves(query, key) is None
    return splash_ring.splash_ring if ring else None


def _on_head_shards(attend, query, key, value, scores, segments):
    """Returns what a kernel makes of the heads of each tensor shard."""

    def of_shard(query, key, value, *more):
        *sinks, segments = more
        here = scores._replace(sinks=sinks[0].reshape(-1)) if sinks else scores
        return attend(query, key, value, scores=here, segments=segments)

    sinks = [] if scores.sinks is None else [scores.sinks[None, None, :, None]]
    return on_head_shards(of_shard, [query, key, value, *sinks], segments)
