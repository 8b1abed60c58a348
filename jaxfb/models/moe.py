"""A mixture of experts in place of a layer's MLP: a router, many small MLPs, and the losses that keep it even.

Every token goes to its top-k experts and to a shared one, if there is one. The losses are sums over rows and
tokens whose weights depend on the data alone, so they are as invariant under splits as the cross entropy.

Shapes: R = rows, T = tokens of a row, D = hidden_size, E = num_experts, L = experts of this device, F = width
of an expert, K = experts_per_token, S = sorted choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import SwiGLU, statistics_dtype
from jaxfb.parallel import expert
from jaxfb.parallel.tensor import constrain
from jaxfb.types import Sum

BALANCE, ROUTER_Z = "balance", "router_z"


class Routing(NamedTuple):
    """Where tokens go, in float32 (float64 for float64).

    logits:  float[R, T, E].
    probs:   float[R, T, E], adding up to 1: the softmax, or the sigmoids over their sum.
    experts: i32[R, T, K], likeliest first.
    weights: float[R, T, K], what each expert's answer is multiplied by.
    """

    logits: jax.Array
    probs: jax.Array
    experts: jax.Array
    weights: jax.Array


class Router(nnx.Module):
    """Scores every expert for every token and picks the best. Computed in float32 at least."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.num_experts)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape))
        self.config = config

    def __call__(self, x_RTD: jax.Array) -> Routing:
        config, wide = self.config, statistics_dtype(x_RTD.dtype)
        logits = x_RTD.astype(wide) @ self.kernel[...].astype(wide)
        if config.router_scores == "softmax":
            probs = scores = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probs = scores / scores.sum(-1, keepdims=True)
        weights, experts = lax.top_k(scores, config.experts_per_token)
        if config.router_renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return Routing(logits, probs, experts.astype(jnp.int32), weights * config.router_scale)


class Experts(nnx.Module):
    """E SwiGLUs in three arrays, [E, D, F] twice and [E, F, D]: E cut over `expert`, F over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        number, width, inner = config.num_experts, config.hidden_size, config.expert_mlp_size
        scaled = partial(
            nnx.initializers.variance_scaling,
            mode="fan_in", distribution="truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0,
        )  # fmt: skip
        read, write = scaled(1.0), scaled(1 / (2 * config.num_layers))
        self.gate = nnx.Param(read(rngs.params(), (number, width, inner)))
        self.up = nnx.Param(read(rngs.params(), (number, width, inner)))
        self.down = nnx.Param(write(rngs.params(), (number, inner, width)))

    def __call__(self, rows_SD: jax.Array, sizes_L: jax.Array) -> jax.Array:
        """Each run of `sizes_L` rows through its expert; what lies behind the last run is nobody's."""
        gate, up = (lax.ragged_dot(rows_SD, kernel[...], sizes_L) for kernel in (self.gate, self.up))
        inner_SF = constrain(nnx.silu(gate) * up, None, "tensor")
        return constrain(lax.ragged_dot(inner_SF, self.down[...], sizes_L), None, None)


class MoE(nnx.Module):
    """The weighted sum of each token's experts, and the shared expert. [R, T, D] -> [R, T, D]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.shared_expert_size:
            self.shared = SwiGLU(replace(config, mlp_size=config.shared_expert_size), rngs=rngs)
        self.config = config

    def __call__(
        self, x_RTD: jax.Array, counted_RT: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Sum]]:
        """(answer, terms of the loss).

        Args:
          x_RTD: float[R, T, D].
          counted_RT: bool[R, T], False for padding, which goes to no expert and counts in no loss; None: all count.
        """
        x_RTD = _where(counted_RT, x_RTD)
        routing = self.router(x_RTD)
        out_RTD = self._routed(x_RTD, routing, counted_RT)
        if self.config.shared_expert_size:
            out_RTD += self.shared(x_RTD)
        return out_RTD, router_losses(routing, counted_RT, self.config)

    def _routed(self, x_RTD, routing: Routing, counted_RT) -> jax.Array:
        config, (rows, length, width) = self.config, x_RTD.shape
        chosen, weights = routing.experts, routing.weights
        if counted_RT is not None:
            chosen = jnp.where(counted_RT[..., None], chosen, config.num_experts)
        tokens = rows * length
        out = expert.dispatch(
            self.experts,
            x_RTD.reshape(tokens, width),
            chosen.reshape(tokens, -1),
            config.num_experts,
            self.experts.gate[...].shape[0],
            _capacity(config, tokens),
        ).reshape(rows, length, -1, width)
        mixed = jnp.einsum("rtk,rtkd->rtd", weights, out.astype(weights.dtype))
        return constrain(mixed.astype(x_RTD.dtype), None, None, None)


def counted_tokens(microbatch: Mapping[str, jax.Array]) -> jax.Array | None:
    """bool[R, T], False for padding: segment 0, or, without segments, a row in which no token counts in the loss."""
    if "segments" in microbatch:
        return microbatch["segments"] != 0
    mask = microbatch.get("loss_mask")
    if mask is None:
        return None
    return jnp.broadcast_to(_over_context((mask != 0).sum(1, keepdims=True)) > 0, mask.shape)


def router_losses(
    routing: Routing, counted_RT: jax.Array | None, config: TransformerConfig
) -> dict[str, Sum]:
    """The terms of one layer; those with a coefficient of 0 are left out. Added over layers they are means over them.

    "balance":  weight = rows that have tokens; a row's loss is 1 where its tokens are spread evenly.
    "router_z": weight = tokens; the square of each token's log normalizer (ST-MoE, arXiv:2202.08906).
    """
    terms = {}
    if config.balance_coefficient:
        total = config.balance_coefficient * balance_sum(routing.probs, routing.experts, counted_RT)
        terms[BALANCE] = Sum(total, _counted_rows(routing, counted_RT).astype(total.dtype))
    if config.router_z_coefficient:
        square = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
        total = config.router_z_coefficient * _where(counted_RT, square).sum()
        terms[ROUTER_Z] = Sum(total, _counted_tokens(routing, counted_RT).astype(total.dtype))
    return terms


def balance_sum(probs_RTE: jax.Array, experts_RTK: jax.Array, counted_RT: jax.Array | None) -> jax.Array:
    """Sum over rows of E / (K T) sum_e (choices of e) (mean probability of e): DeepSeek-V3's sequence-wise loss.

    (arXiv:2412.19437, eq. 17-20.) It is made row by row because only a loss that is a sum over rows does not
    depend on which rows share a microbatch. Where sequences are cut over `context`, choices and tokens are those
    of the whole row and probabilities those of this device, so the sum over context is the whole.
    """
    num_experts, per_token = probs_RTE.shape[-1], experts_RTK.shape[-1]
    made = experts_RTK[..., None] == jnp.arange(num_experts)
    made = made if counted_RT is None else made & counted_RT[..., None, None]
    choices_RE = _over_context(made.sum((1, 2)))
    tokens_R = jnp.maximum(choices_RE.sum(1) // per_token, 1).astype(probs_RTE.dtype)
    probs_RE = _where(counted_RT, probs_RTE).sum(1)
    row_losses = (choices_RE * probs_RE).sum(1) * num_experts / (per_token * tokens_R**2)
    return row_losses.sum()


def _counted_rows(routing: Routing, counted_RT) -> jax.Array:
    """Rows that have tokens, once each: the first device of `context` counts those that it has a part of."""
    if counted_RT is None:
        return jnp.asarray(routing.logits.shape[0])
    rows = (_over_context(counted_RT.sum(1)) > 0).sum()
    return rows if expert.manual_size("context") == 1 else jnp.where(lax.axis_index("context") == 0, rows, 0)


def _counted_tokens(routing: Routing, counted_RT) -> jax.Array:
    return jnp.asarray(math.prod(routing.logits.shape[:2])) if counted_RT is None else counted_RT.sum()


def _over_context(x: jax.Array) -> jax.Array:
    return x if expert.manual_size("context") == 1 else lax.psum(x, "context")


def _where(counted_RT, values: jax.Array) -> jax.Array:
    if counted_RT is None:
        return values
    return jnp.where(counted_RT.reshape(counted_RT.shape + (1,) * (values.ndim - 2)), values, 0)


def _capacity(config: TransformerConfig, tokens: int) -> int | None:
    if config.expert_capacity is None:
        return None
    return math.ceil(config.expert_capacity * tokens * config.experts_per_token / config.num_experts)
