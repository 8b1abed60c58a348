"""Multi-head latent attention: queries, keys and values projected from short vectors (DeepSeek-V2, arXiv:2405.04434).

Keys and values are expanded before they are attended to, so that every attention kernel and axis serves; values are
padded with zeros to the size of the keys.

Shapes: R = rows, T = tokens of a row, D = hidden_size, H = heads, K = head_size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfb.models.attention import Attend, Attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import Linear, RMSNorm, fan_in_init, residual_init
from jaxfb.parallel.tensor import constrain
from jaxfb.refusal import Refused


class LatentAttention(Attention):
    """Projects to short vectors, from these to queries, keys and values, attends, projects back. H split over
    `tensor`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        latent, width, heads, size = config.latent, config.hidden_size, config.num_heads, config.head_size
        if latent is None:
            raise Refused("[model] latent attention needs its sizes, model.latent")
        linear = partial(Linear, kernel_init=fan_in_init, rngs=rngs)
        if latent.query_rank is not None:
            self.query_down = linear(width, latent.query_rank)
            self.query_down_norm = RMSNorm(latent.query_rank, config)
            self.query_up = linear(latent.query_rank, heads * size)
        else:
            self.query = linear(width, heads * size)
        self.key_value_down = linear(width, latent.key_value_rank + latent.rotary_size)
        self.key_value_down_norm = RMSNorm(latent.key_value_rank, config)
        expanded = size - latent.rotary_size + latent.value_size
        self.key_value_up = linear(latent.key_value_rank, heads * expanded)
        self.output = Linear(heads * latent.value_size, width, kernel_init=residual_init(config), rngs=rngs)
        self.config, self.latent = config, latent

    def __call__(self, x_RTD: jax.Array, positions_RT: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        query, key, value = self._expanded(x_RTD, positions_RT)
        context_RTHK, kept = attend(self._scaled(query), key, value, *self._scores())
        return self._output(context_RTHK[..., : self.latent.value_size]), kept

    def _expanded(self, x_RTD: jax.Array, positions_RT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (queries, keys, values), each [R, T, H, K]."""
        latent, size = self.latent, self.config.head_size
        turned = partial(self._rotated, positions_RT=positions_RT)
        plain = size - latent.rotary_size
        query = self._heads(self._queries(x_RTD))
        query = jnp.concatenate([query[..., :plain], turned(query[..., plain:])], axis=-1)

        down = self.key_value_down(x_RTD)
        shared = turned(down[..., None, latent.key_value_rank :])
        both = self._heads(self.key_value_up(self.key_value_down_norm(down[..., : latent.key_value_rank])))
        shared = jnp.broadcast_to(shared, (*both.shape[:3], latent.rotary_size))
        key = jnp.concatenate([both[..., :plain], shared], axis=-1)
        missing = [(0, 0)] * 3 + [(0, size - latent.value_size)]
        return query, key, jnp.pad(both[..., plain:], missing)

    def _queries(self, x_RTD: jax.Array) -> jax.Array:
        if self.latent.query_rank is None:
            return self.query(x_RTD)
        return self.query_up(self.query_down_norm(self.query_down(x_RTD)))

    def _rotated(self, x: jax.Array, positions_RT: jax.Array) -> jax.Array:
        if self.latent.interleaved and self.config.rope_theta is not None:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return super()._rotated(x, positions_RT)

    def _heads(self, x: jax.Array) -> jax.Array:
        split = x.reshape(*x.shape[:2], self.config.num_heads, -1)
        return constrain(split, None, None, "tensor", None)
