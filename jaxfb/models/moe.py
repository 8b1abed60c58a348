"""A mixture of experts in place of a layer's MLP: a router, many small MLPs, and a shared one.

Every token goes to its top-k experts and to the shared one, if there is one. What keeps the experts evenly used is
in `balance.py`.

Shapes: R = rows, T = tokens of a row, D = hidden_size, E = num_experts, L = experts of this device, F = width
of an expert, K = experts_per_token, S = sorted choices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxfb.models.activations import gated
from jaxfb.models.balance import Routing, router_losses, router_metrics, where_counted
from jaxfb.models.config import TransformerConfig
from jaxfb.models.grouped_matmul import Kernels, grouped_matmul
from jaxfb.models.layers import SwiGLU, statistics_dtype
from jaxfb.parallel import expert
from jaxfb.parallel.tensor import constrain
from jaxfb.types import LossOutput


class Router(nnx.Module):
    """Scores every expert for every token and picks the best. Computed in float32 at least."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.num_experts)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape))
        if config.has_router_bias:
            self.bias = nnx.Param(jnp.zeros(config.num_experts))
        if config.variant.mlp_bias:
            self.logit_bias = nnx.Param(jnp.zeros(config.num_experts))
        self.config = config

    def __call__(self, x_RTD: jax.Array) -> Routing:
        config, wide = self.config, statistics_dtype(x_RTD.dtype)
        logits = x_RTD.astype(wide) @ self.kernel[...].astype(wide)
        if config.variant.mlp_bias:
            logits += self.logit_bias[...].astype(wide)
        if config.router_scores == "softmax":
            probs = scores = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probs = scores / scores.sum(-1, keepdims=True)
        experts = lax.top_k(self._in_best_groups(self._biased(scores)), config.experts_per_token)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.router_renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return Routing(logits, probs, experts.astype(jnp.int32), weights * config.router_scale)

    def _biased(self, scores: jax.Array) -> jax.Array:
        """Returns the scores by which experts are chosen; expert outputs are weighted by the unbiased scores
        (arXiv:2408.15664).
        """
        if not self.config.has_router_bias:
            return scores
        return scores + lax.stop_gradient(self.bias[...]).astype(scores.dtype)

    def _in_best_groups(self, scores: jax.Array) -> jax.Array:
        """Returns the scores of the experts of each token's best groups, -inf for the others."""
        groups, best = self.config.router_groups, self.config.router_top_groups
        if best == groups:
            return scores
        grouped = scores.reshape(*scores.shape[:-1], groups, -1)
        of_groups = lax.top_k(grouped, 2)[0].sum(-1)
        chosen = jax.nn.one_hot(lax.top_k(of_groups, best)[1], groups, dtype=bool).any(-2)
        return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


class Experts(nnx.Module):
    """E SwiGLUs in three arrays, [E, D, F] twice and [E, F, D], E cut over `expert` and F over `tensor`; with biases
    three more, [E, F] twice and [E, D]. An adapter adds to what its matrix gives (`jaxfb.models.lora`).
    """

    adapters: Any = None

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
        self.activation, self.has_biases = config.variant.activation, config.variant.mlp_bias
        if self.has_biases:
            self.gate_bias, self.up_bias = (nnx.Param(jnp.zeros((number, inner))) for _ in range(2))
            self.down_bias = nnx.Param(jnp.zeros((number, width)))

    def kernels(self) -> tuple[Kernels, Kernels, Kernels]:
        """Returns the three arrays as the first call takes them."""
        gate, up, down = (Kernels.of(kernel[...]) for kernel in (self.gate, self.up, self.down))
        return gate, up, down

    def __call__(
        self, rows: expert.Weighted, sizes_L: jax.Array, kernels: tuple[Kernels, Kernels, Kernels]
    ) -> tuple[jax.Array, tuple[Kernels, Kernels, Kernels]]:
        """Runs each run of `sizes_L` rows through its expert; what follows the last run is undefined.

        Rows are multiplied by their weights before the last product, whose result the gradient of a weight then does
        not need.

        Returns (the weighted outputs [S, D], the kernels for the next call).
        """
        (rows_SD, weights_S1), (gate_kernel, up_kernel, down_kernel) = rows, kernels
        gate, gate_kernel = self._product("gate", gate_kernel, rows_SD, sizes_L)
        up, up_kernel = self._product("up", up_kernel, rows_SD, sizes_L)
        if self.has_biases:
            expert_S = _expert_of_row(sizes_L, rows_SD.shape[0])
            gate, up = gate + _of_rows(self.gate_bias, expert_S), up + _of_rows(self.up_bias, expert_S)
        inner_SF = constrain(self._weighted(gate, up, weights_S1), None, "tensor")
        out_SD, down_kernel = self._product("down", down_kernel, inner_SF, sizes_L)
        if self.has_biases:
            out_SD += weights_S1.astype(out_SD.dtype) * _of_rows(self.down_bias, expert_S)
        return constrain(out_SD, None, None), (gate_kernel, up_kernel, down_kernel)

    def _weighted(self, gate_SF: jax.Array, up_SF: jax.Array, weights_S1: jax.Array) -> jax.Array:
        """Returns what the last product multiplies, computed in the dtype of the weights and rounded once.

        XLA then computes its gradients, and computes it again, in one pass over gate and up; if it were rounded in
        between, in two.
        """
        gate, up = (rows.astype(weights_S1.dtype) for rows in (gate_SF, up_SF))
        return (gated(self.activation, gate, up) * weights_S1).astype(gate_SF.dtype)

    def _product(
        self, name: str, kernels: Kernels, rows: jax.Array, sizes_L: jax.Array
    ) -> tuple[jax.Array, Kernels]:
        out, kernels = kernels.multiply(rows, sizes_L)
        adapter = (self.adapters or {}).get(name)
        return out if adapter is None else out + adapter(
            partial(grouped_matmul, sizes=sizes_L), rows
        ), kernels


class MoE(nnx.Module):
    """The weighted sum of each token's experts, and the shared expert. [R, T, D] -> [R, T, D]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.shared_expert_size:
            self.shared = SwiGLU(replace(config, mlp_size=config.shared_expert_size), rngs=rngs)
        self.config = config

    def __call__(
        self,
        x_RTD: jax.Array,
        counted_RT: jax.Array | None = None,
        load_E: jax.Array | None = None,
        beside: Any = (),
        segments_RT: jax.Array | None = None,
    ) -> tuple[jax.Array, LossOutput, Any]:
        """Returns (output, the router's terms of the loss and metrics, `beside`).

        Args:
          x_RTD: float[R, T, D].
          counted_RT: bool[R, T], False for padding, which goes to no expert and counts in no loss; None: all count.
          load_E: float[E], of each expert over the whole update, 1 where even; for the batch's balance loss.
          beside: arrays of the caller, to be computed while the first rows are sent.
          segments_RT: i32[R, T], which sequence of its row a token is of; None: a row is one.
        """
        x_RTD = where_counted(counted_RT, x_RTD)
        routing = self.router(x_RTD)
        shared = self.shared.inner(x_RTD) if self.config.shared_expert_size else None
        out_RTD, (shared, beside) = self._routed(x_RTD, routing, counted_RT, (shared, beside))
        if shared is not None:
            out_RTD += self.shared.outer(shared)
        terms = router_losses(routing, counted_RT, self.config, load_E, segments_RT)
        capacity = _capacity(self.config, math.prod(x_RTD.shape[:2]))
        return out_RTD, LossOutput(terms, router_metrics(routing, counted_RT, capacity)), beside

    def _routed(self, x_RTD, routing: Routing, counted_RT, beside) -> tuple[jax.Array, Any]:
        config, (rows, length, width) = self.config, x_RTD.shape
        chosen = routing.experts
        if counted_RT is not None:
            chosen = jnp.where(counted_RT[..., None], chosen, config.num_experts)
        out, beside = expert.dispatch(
            self.experts,
            self.experts.kernels(),
            x_RTD.reshape(-1, width),
            chosen.reshape(rows * length, -1),
            routing.weights.reshape(rows * length, -1),
            config.num_experts,
            self.experts.gate[...].shape[0],
            **how_dispatched(config, rows * length),
            beside=beside,
        )
        return constrain(out.reshape(x_RTD.shape), None, None, None), beside


def _expert_of_row(sizes_L: jax.Array, num_rows: int) -> jax.Array:
    """Returns the expert of each row, i32[S], of runs of so many rows; L for those behind the last run."""
    return jnp.searchsorted(jnp.cumsum(sizes_L), jnp.arange(num_rows), side="right").astype(jnp.int32)


def _of_rows(bias_LF: nnx.Param, expert_S: jax.Array) -> jax.Array:
    """Returns each row's bias; a row behind the last run has none, so that its undefined gradient goes nowhere."""
    return bias_LF[...].at[expert_S].get(mode="fill", fill_value=0)


def how_dispatched(config: TransformerConfig, tokens: int) -> dict[str, Any]:
    """Returns capacity, shares and buffer as `expert.dispatch` takes them, for so many tokens of a device."""
    shares = expert.shares_for(config.expert_mlp_size) if config.expert_overlap else (1,)
    return {"capacity": _capacity(config, tokens), "shares": shares, "buffer": config.expert_buffer}


def _capacity(config: TransformerConfig, tokens: int) -> int | None:
    if config.expert_capacity is None:
        return None
    return math.ceil(config.expert_capacity * tokens * config.experts_per_token / config.num_experts)
