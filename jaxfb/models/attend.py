"""Chooses how a layer attends: over the tokens of one device, over a context axis, in a kernel on each tensor shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from jaxfb.models import splash, splash_gather, splash_ring
from jaxfb.models.attention import Attend, choose_backend, packed_attention
from jaxfb.models.config import TransformerConfig
from jaxfb.parallel.context import context_attention, exchanged, size_here
from jaxfb.parallel.scores import PLAIN
from jaxfb.parallel.tensor import on_head_shards

KERNELS = ("auto", "splash")
"""Values of `attention` with which a TPU's kernels may attend over a context axis."""


def attend_to(config: TransformerConfig, segments: jax.Array | None) -> Attend:
    """Returns the attention of a layer with this config: over rows of these segments, i32[R, T], or unpacked ones."""
    how = dict(backend=config.attention, context=config.context_attention, window=config.window)
    return partial(_attend_packed, segments=segments, **how)


def _attend_packed(query, key, value, scores=PLAIN, *, segments, backend, context, window):
    if size_here() == 1:
        return _whole(query, key, value, scores, segments, backend=backend, window=window), None
    context = context_method(context, backend, query, key)
    if context == "all_to_all":
        attend = partial(_whole, backend="xla" if backend == "xla" else "auto", window=window)
        return exchanged(attend, query, key, value, scores, segments), None
    attend = _context_kernel(context, window, query, key) if backend in KERNELS else None
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


def context_method(asked: str, backend: str, query: jax.Array, key: jax.Array) -> str:
    """Returns how a device's [R, T, H, K] and [R, T, G, K] attend over the context axis.

    For "auto" keys are gathered where a TPU's kernel takes them: a ring merges what its turns return through HBM,
    which takes a tenth of a step at 131,072 tokens over 16 devices. Without that kernel all scores of a device's
    queries would exist at once.
    """
    if asked != "auto":
        return asked
    gathers = backend in KERNELS and splash_gather.refusal(query, key) is None
    return "all_gather" if gathers else "ring"


def _context_kernel(method: str, window: int | None, query: jax.Array, key: jax.Array) -> Callable | None:
    """Returns a function by a TPU's kernels for attention over a context axis; None where they cannot run."""
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
