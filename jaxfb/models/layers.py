"""The pieces every layer is made of: RMSNorm, SwiGLU, rotary positions, row-keyed dropout, the two tables.

Flax modules with plain array parameters and no other state, so that one is rebuilt from a dict of arrays
inside any transformation. Arrays are computed in the dtype of the parameters, statistics in float32 at least.

Shapes: R = rows, T = tokens of a row, D = hidden_size, F = mlp_size, H = heads, K = head_size,
V = vocab_size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfb.models.activations import gated
from jaxfb.models.config import TransformerConfig
from jaxfb.models.products import product_of_tokens
from jaxfb.parallel.context import own_part, size_here
from jaxfb.parallel.look_up import look_up
from jaxfb.parallel.table import Table
from jaxfb.parallel.tensor import constrain, residual_stream

fan_in_init = nnx.initializers.lecun_normal()
table_init = nnx.initializers.normal(0.02)


class Linear(nnx.Linear):
    """x @ kernel (+ bias), and what an adapter adds to it (`jaxfb.models.lora`)."""

    adapter: Any = None

    def __init__(self, *sizes: int, use_bias: bool = False, **options: Any):
        super().__init__(*sizes, use_bias=use_bias, dot_general=product_of_tokens, **options)

    def __call__(self, inputs: jax.Array, *more: Any, **options: Any) -> jax.Array:
        out = super().__call__(inputs, *more, **options)
        return out if self.adapter is None else out + self.adapter(inputs)


def residual_init(config: TransformerConfig):
    """Returns an initializer of matrices that write into the residual stream, whose variance must not grow with depth
    (GPT-2).
    """
    return nnx.initializers.variance_scaling(1 / (2 * config.num_layers), "fan_in", "truncated_normal")


def statistics_dtype(dtype) -> jnp.dtype:
    """Returns float32, or float64 for float64: what norms, rotations and softmax are computed in."""
    return jnp.promote_types(dtype, jnp.float32)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dim (arXiv:1910.07467); Gemma's multiplies by 1 + scale."""

    def __init__(self, size: int, config: TransformerConfig):
        self.scale = nnx.Param(jnp.zeros(size) if config.variant.norm_offset else jnp.ones(size))
        self.eps, self.offset = config.norm_eps, config.variant.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(statistics_dtype(x.dtype))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(wide.dtype)
        return (normed * (1 + scale if self.offset else scale)).astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202). [R, T, D] -> [R, T, D], F split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width, mlp = config.hidden_size, config.mlp_size
        linear = partial(Linear, use_bias=config.variant.mlp_bias, rngs=rngs)
        self.gate = linear(width, mlp, kernel_init=fan_in_init)
        self.up = linear(width, mlp, kernel_init=fan_in_init)
        self.down = linear(mlp, width, kernel_init=residual_init(config))
        self.activation, self.sequence_parallel = config.variant.activation, config.sequence_parallel

    def __call__(self, x_RTD: jax.Array) -> jax.Array:
        return self.outer(self.inner(x_RTD))

    def inner(self, x_RTD: jax.Array) -> jax.Array:
        """Returns what `down` multiplies, float[R, T, F]."""
        inner_RTF = gated(self.activation, self.gate(x_RTD), self.up(x_RTD))
        return constrain(inner_RTF, None, None, "tensor")

    def outer(self, inner_RTF: jax.Array) -> jax.Array:
        """Returns the block's output, float[R, T, D], from what `inner` returned."""
        return residual_stream(self.down(inner_RTF), self.sequence_parallel)


class Embed(nnx.Module):
    """Token -> vector, perhaps scaled; zeros for an id outside [0, V). [R, T] -> [R, T, D], V split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(table_init(rngs.params(), (config.vocab_size, config.hidden_size)))
        self.scale, self.sequence_parallel = config.variant.embedding_scale, config.sequence_parallel

    def __call__(self, tokens_RT: jax.Array) -> jax.Array:
        found_RTD = self._found(tokens_RT)
        if self.scale is not None:
            found_RTD *= jnp.asarray(self.scale, found_RTD.dtype)
        return residual_stream(found_RTD, self.sequence_parallel)

    def _found(self, tokens_RT: jax.Array) -> jax.Array:
        matrix = self.embedding.get_value()
        if not isinstance(matrix, Table):
            # annotated where it is read, so that its gradient (a scatter) is made in shards as well
            matrix = constrain(matrix, "tensor", None)
        return look_up(matrix, tokens_RT)

    def part(self, tokens_RT: jax.Array, axis: str) -> jax.Array:
        """Embeds with V cut over a manual axis: zero for tokens elsewhere, so the sum over `axis` is whole."""
        return self(tokens_RT - jax.lax.axis_index(axis) * self.embedding[...].shape[0])


class Outer(nnx.Module):
    """The parts besides the layers: the embedding, the last norm, the head's matrix (none if tied)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed = Embed(config, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, config)
        if not config.tied_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, kernel_init=table_init, rngs=rngs)
        self.tied = config.tied_embeddings

    @property
    def head_kernel(self) -> jax.Array:
        """Returns the head's matrix [D, V], V split over `tensor`."""
        kernel = self.head_table
        return kernel.as_head(kernel.whole()) if isinstance(kernel, Table) else kernel

    @property
    def head_table(self) -> jax.Array | Table:
        """Returns the same, or the table that it was given as, which may be the embedding's."""
        kernel = (self.embed.embedding if self.tied else self.head.kernel).get_value()
        return kernel.T if self.tied and not isinstance(kernel, Table) else kernel


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, site: int) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest; nothing without keys or rate.

    Each row's mask depends on that row's key and `site` alone, never on how rows were split; where a context
    axis cuts the tokens, a device draws the whole row's and keeps its own.

    Args:
      x: [rows, tokens, ...].
      keys: key[rows] or None.
      site: tells apart the places in a layer that draw from the same keys.
    """
    if keys is None or rate == 0:
        return x
    keep = 1 - rate

    def draw(key, row):
        whole = (row.shape[0] * size_here(), *row.shape[1:])
        return own_part(jax.random.bernoulli(jax.random.fold_in(key, site), jnp.float32(keep), whole), 0)

    return jnp.where(jax.vmap(draw)(keys, x), x / keep, 0)
