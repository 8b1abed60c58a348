"""Causal grouped-query attention over packed rows.

A layer's middle part. What is attended to is an argument (`attend`): whole packed rows in training, a cache
in generation, so that one module serves both.

Shapes: R = rows, T = tokens of a row, S = tokens attended to, D = hidden_size, H = heads, G = kv heads,
K = head_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh

from jaxfb.mesh import axis_size, manual_axes, platform_here
from jaxfb.models.attention_kernels import cudnn, splash, splash_whole
from jaxfb.models.attention_kernels.blocked_attention import blocked_attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import Linear, RMSNorm, fan_in_init, residual_init, statistics_dtype
from jaxfb.models.rope import rotate, turns_by_product
from jaxfb.parallel.scores import PLAIN, Scores
from jaxfb.parallel.tensor import constrain, gathered_once_backward, residual_stream
from jaxfb.refusal import Refused

KEPT = "rotated"
"""Names rotated queries and keys, which `remat=selective` keeps in place of the projections that they are made from.

The backward reads these alone, since that of a rotation needs its angles only. When the projections were kept, they
were rotated a second time, and the TPU's compiler copied those of all layers into the order in which it did that
(libtpu 0.0.48: 70B on v5p:8x8x8 with fsdp 512 takes 74.7 GB and 8.21 s in place of 80.1 GB and 8.23 s). Only where
rotations are products (`rope.turns_by_product`): 8B on v5e:16x16 with pipe 4 and tensor 2 would take 5.48 s in place
of 5.29 s, and more memory, since the few heads of a device fill its tiles in part.
"""

# (query_RTHK, key_RTGK, value_RTGK, Scores if they are not plain) -> (context_RTHK, anything to hand back, as a cache)
Attend = Callable[..., tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Projects to queries, keys and values, rotates, attends, projects back. H and G split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width, size, variant = config.hidden_size, config.head_size, config.variant
        self.config = config

        def project(num_heads):
            return Linear(
                width, num_heads * size, use_bias=config.qkv_bias, kernel_init=fan_in_init, rngs=rngs
            )

        self.query = project(config.num_heads)
        self.key = project(config.num_kv_heads)
        self.value = project(config.num_kv_heads)
        self.output = Linear(
            config.num_heads * size,
            width,
            use_bias=variant.output_bias,
            kernel_init=residual_init(config),
            rngs=rngs,
        )
        if variant.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_heads))
        if config.qk_norm:
            whole = variant.qk_norm_over == "token"
            self.query_norm = RMSNorm(size * (config.num_heads if whole else 1), config)
            self.key_norm = RMSNorm(size * (config.num_kv_heads if whole else 1), config)

    def __call__(self, x_RTD: jax.Array, positions_RT: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        query, key, value = self._projected(x_RTD)
        query, key = self._rotated(query, positions_RT), self._rotated(key, positions_RT)
        context_RTHK, kept = attend(self._scaled(query), key, value, *self._scores())
        return self._output(context_RTHK), kept

    def _output(self, context_RTHK: jax.Array) -> jax.Array:
        """Returns what is added to the residual stream, float[R, T, D]."""
        joined = context_RTHK.reshape(*context_RTHK.shape[:2], -1)
        out_RTD = self.output(constrain(joined, None, None, "tensor"))
        out_RTD = gathered_once_backward(out_RTD, joined.shape[-1])
        return residual_stream(out_RTD, self.config.sequence_parallel)

    def _projected(self, x_RTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (query_RTHK, key_RTGK, value_RTGK), normalised where the config has it."""
        query, key, value = self.query(x_RTD), self.key(x_RTD), self.value(x_RTD)
        if not self.config.qk_norm:
            return self._heads(query), self._heads(key), self._heads(value)
        if self.config.variant.qk_norm_over == "token":
            query, key = self.query_norm(query), self.key_norm(key)
            return self._heads(query), self._heads(key), self._heads(value)
        return self.query_norm(self._heads(query)), self.key_norm(self._heads(key)), self._heads(value)

    def _rotated(self, x: jax.Array, positions_RT: jax.Array) -> jax.Array:
        config = self.config
        if config.rope_theta is None:
            return x
        size = config.variant.rotary_size(config.head_size)
        turned = rotate(x, positions_RT, config.rope_theta, config.rope_scaling, size=size)
        if config.qk_norm or not turns_by_product(x):  # a norm's backward reads its input as well
            return turned
        return checkpoint_name(turned, KEPT)

    def _scores(self) -> tuple[Scores, ...]:
        variant = self.config.variant
        if variant.has_plain_scores:
            return ()
        return (Scores(variant.attention_softcap, self.sinks[...] if variant.attention_sinks else None),)

    def _scaled(self, query: jax.Array) -> jax.Array:
        """Multiplies queries so that 1 / sqrt(K), by which every kernel multiplies, becomes the config's scale."""
        scale = self.config.variant.attention_scale
        if scale is None:
            return query
        factor = scale * self.config.head_size**0.5
        return (query.astype(statistics_dtype(query.dtype)) * factor).astype(query.dtype)

    def _heads(self, x: jax.Array) -> jax.Array:
        split = x.reshape(*x.shape[:2], -1, self.config.head_size)
        return constrain(split, None, None, "tensor", None)


def packed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores = PLAIN,
    *,
    segments: jax.Array | None,
    backend: str,
    window: int | None = None,
) -> jax.Array:
    """Computes causal attention inside each segment of each row. A token always sees itself, so padding is finite.

    Args:
      query: float[R, T, H, K].  key, value: float[R, T, G, K].
      scores: soft cap and sinks.
      segments: i32[R, T] document ids, 0 for padding; None when each row is one document.
      backend: "auto", "xla", "cudnn" or "splash".
      window: a token sees itself and the window - 1 tokens before it; None: all before it.
    Returns:
      float[R, T, H, K].
    """
    packed = segments is not None
    chosen = choose_backend(backend, query, key, packed=packed, plain=scores.are_plain)
    if chosen == "splash":
        return splash_whole.splash_attention(query, key, value, segments, scores, window=window)
    if chosen == "cudnn":
        return cudnn.causal(query, key, value, segments, window)
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) if packed else None
    return blocked_attention(query, key, value, scores, mask=mask, is_causal=True, window=window)


def choose_backend(backend: str, query: Any, key: Any, *, packed: bool, plain: bool = True) -> str:
    """Chooses "xla", "cudnn" or "splash" for a config's setting: "auto" is flash attention wherever it can train.

    On NVIDIA GPUs that is cuDNN's, from Ampere on (compute capability 8.0), in bfloat16 or float16, with a head size
    that is a multiple of 8 and at most 128 (256 from Hopper on), and for packed rows an even T. They are legal but not
    free: cuDNN takes the segments as a bias in the compute dtype (`jaxfb.models.attention_kernels.cudnn`).

    On TPUs it is splash, in bfloat16 or float32, where T is a multiple of 128, the head size at most 256, and `tensor`
    divides the kv heads; inside `jax.shard_map`, as in the engine: elsewhere XLA might have to cut it, and cannot.

    Args:
      query: [R, T, H, K], or its shape and dtype.  key: likewise, [R, T, G, K].
      plain: scores have no soft cap and no sinks, neither of which cuDNN's has.
    Raises:
      ValueError: "cudnn" or "splash" was asked for where it cannot run.
    """
    if backend == "auto":
        return _best(query, key, packed, plain)
    refused = {
        "cudnn": lambda: cudnn.refusal(query, packed, plain),
        "splash": lambda: splash.refusal(query, key),
    }
    if backend in refused and (refusal := refused[backend]()):
        raise Refused(f"[model] attention={backend!r} {refusal}, or attention='auto'", [{"backend": "auto"}])
    return backend


def _best(query: Any, key: Any, packed: bool, plain: bool) -> str:
    platform, in_engine = platform_here(), not jax.sharding.get_abstract_mesh().empty
    if platform == "gpu" and cudnn.runs("auto", query, packed=packed, plain=plain):
        return "cudnn"
    if platform == "tpu" and in_engine and splash.refusal(query, key) is None:
        return "splash"
    return "xla"


def check_backend(config: TransformerConfig, mesh: Mesh, dtype: Any, length: int, *, packed: bool) -> None:
    """Raises the ValueError of `choose_backend` that a layer of the engine would, before anything is traced.

    A context axis has its own attention, so there is nothing to refuse, but where it exchanges tokens for heads: then
    each device attends to whole rows.
    """
    context = axis_size(mesh, "context")
    if context > 1 and config.context_attention != "all_to_all":
        return
    inside = mesh.abstract_mesh.update_axis_types({axis: AxisType.Manual for axis in manual_axes(mesh)})
    query, key = (
        jax.ShapeDtypeStruct((1, length, heads // context, config.head_size), dtype)
        for heads in (config.num_heads, config.num_kv_heads)
    )
    with jax.sharding.use_abstract_mesh(inside):
        choose_backend(config.attention, query, key, packed=packed, plain=config.variant.has_plain_scores)
