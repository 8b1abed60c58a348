"""Keeps experts evenly used, and reports it: losses, a bias in the choice, and counts. Part of the model.

All of it is made of sums over tokens of the whole update, so nothing about its split is in it:

  balance        a loss of each sequence by itself (DeepSeek-V3, arXiv:2412.19437, eq. 17-20).
  batch_balance  a loss of the whole update (Switch, arXiv:2101.03961, eq. 4, with every choice counted): a token
                 pays, for each expert, its probability times that expert's load. The load is counted over the
                 update in a separate forward pass; it carries no gradient, as everywhere.
  router_z       the router's squared log normalizer (ST-MoE, arXiv:2202.08906).
  bias           no loss: after each update the bias of an expert that had too few tokens goes up (arXiv:2408.15664).

Shapes: R = rows, T = tokens of a row, E = num_experts, K = experts_per_token, L = num_layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import stack_of
from jaxfb.parallel.context import size_here
from jaxfb.types import Counted, PyTree, Sum

BALANCE, BATCH_BALANCE, ROUTER_Z = "balance", "batch_balance", "router_z"
LOAD, ENTROPY, DROPPED = "expert_load", "router_entropy", "dropped_choices"


class Routing(NamedTuple):
    """The destinations of tokens, in float32 (float64 for float64).

    logits:  float[R, T, E].
    probs:   float[R, T, E], adding up to 1: the softmax, or the sigmoids over their sum.
    experts: i32[R, T, K], likeliest first.
    weights: float[R, T, K], what each expert's output is multiplied by.
    """

    logits: jax.Array
    probs: jax.Array
    experts: jax.Array
    weights: jax.Array


def counted_tokens(microbatch: Mapping[str, jax.Array]) -> jax.Array | None:
    """Returns bool[R, T], False for padding: segment 0, or, without segments, a row in which no token counts in the
    loss.
    """
    if "segments" in microbatch:
        return microbatch["segments"] != 0
    mask = microbatch.get("loss_mask")
    if mask is None:
        return None
    return jnp.broadcast_to(_over_context((mask != 0).sum(1, keepdims=True)) > 0, mask.shape)


def router_losses(
    routing: Routing,
    counted_RT: jax.Array | None,
    config: TransformerConfig,
    load_E: jax.Array | None = None,
) -> dict[str, Sum]:
    """Returns the terms of one layer; those with a coefficient of 0 are left out. Added over layers they are means
    over them.

    "balance":       weight = rows that have tokens; a row's loss is 1 where its tokens are spread evenly.
    "batch_balance": weight = tokens; 1 where those of the update are spread evenly. 0 while `load_E` is not known.
    "router_z":      weight = tokens; the square of each token's log normalizer.
    """
    tokens, terms = _counted_tokens(routing, counted_RT).astype(routing.logits.dtype), {}
    if config.balance_coefficient:
        total = config.balance_coefficient * balance_sum(routing.probs, routing.experts, counted_RT)
        terms[BALANCE] = Sum(total, _counted_rows(routing, counted_RT).astype(total.dtype))
    if config.batch_balance_coefficient:
        load_E = jnp.zeros(config.num_experts) if load_E is None else lax.stop_gradient(load_E)
        total = (where_counted(counted_RT, routing.probs) * load_E.astype(tokens.dtype)).sum()
        terms[BATCH_BALANCE] = Sum(config.batch_balance_coefficient * total, tokens)
    if config.router_z_coefficient:
        square = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
        total = config.router_z_coefficient * where_counted(counted_RT, square).sum()
        terms[ROUTER_Z] = Sum(total, tokens)
    return terms


def balance_sum(probs_RTE: jax.Array, experts_RTK: jax.Array, counted_RT: jax.Array | None) -> jax.Array:
    """Computes the sum over rows of E / (K T) sum_e (choices of e) (mean probability of e): DeepSeek-V3's
    sequence-wise loss.

    It is made row by row because only a loss that is a sum over rows does not depend on which rows share a
    microbatch. Where sequences are cut over `context`, choices and tokens are those of the whole row and
    probabilities those of this device, so the sum over context is the whole.
    """
    num_experts, per_token = probs_RTE.shape[-1], experts_RTK.shape[-1]
    choices_RE = _over_context(_choices(experts_RTK, counted_RT, num_experts))
    tokens_R = jnp.maximum(choices_RE.sum(1) // per_token, 1).astype(probs_RTE.dtype)
    probs_RE = where_counted(counted_RT, probs_RTE).sum(1)
    row_losses = (choices_RE * probs_RE).sum(1) * num_experts / (per_token * tokens_R**2)
    return row_losses.sum()


def router_metrics(
    routing: Routing, counted_RT: jax.Array | None, capacity: int | None = None
) -> dict[str, Sum]:
    """Returns the metrics of one layer.

    "expert_load":     [E], choices of each expert / an even share of them: 1 where even.
    "router_entropy":  of each token's probabilities, in nats; log(E) where the router has no preference.
    "dropped_choices": with a capacity, the share of choices that no expert took.
    """
    *_, num_experts = routing.probs.shape
    choices_E = _choices(routing.experts, counted_RT, num_experts).sum(0)
    made = choices_E.sum().astype(routing.probs.dtype)
    entropies = where_counted(counted_RT, jax.scipy.special.entr(routing.probs).sum(-1))
    metrics = {
        LOAD: Sum(choices_E, jnp.broadcast_to(made / num_experts, choices_E.shape)),
        ENTROPY: Sum(entropies.sum(), _counted_tokens(routing, counted_RT).astype(entropies.dtype)),
    }
    if capacity is not None:
        metrics[DROPPED] = Sum(jnp.maximum(choices_E - capacity, 0).sum().astype(made.dtype), made)
    return metrics


def counted_leaves(config: TransformerConfig) -> Counted | None:
    """Returns what a transformer with these experts counts over the whole update, for the engine; None if nothing."""
    before = partial(_with_load, config) if config.batch_balance_coefficient else None
    after = partial(_move_bias, config) if config.router_bias_rate else None
    return Counted(_are_counted, before, after) if config.num_experts and (before or after) else None


def _are_counted(params: PyTree) -> PyTree:
    def is_counted(path, _):
        names = [str(getattr(key, "key", key)) for key in path]
        return names[-1] == LOAD or names[-2:] == ["router", "bias"]

    return jax.tree_util.tree_map_with_path(is_counted, params)


def _with_load(config: TransformerConfig, params: PyTree, metrics: dict) -> PyTree:
    """Returns params with the load of each layer's experts, [L, E], or in each layer that of all together."""
    load = metrics[LOAD]
    if config.batch_balance_layers == "together":
        load = jax.tree.map(lambda x: jnp.broadcast_to(x.reshape(-1, x.shape[-1]).sum(0), x.shape), load)
    return _with_experts_changed(config, params, load.value, lambda layer, load: layer | {LOAD: load})


def _move_bias(config: TransformerConfig, params: PyTree, metrics: dict) -> PyTree:
    """Returns params with every bias [L, E] a step of the rate higher or lower; where the load is the mean it stays.

    All stay where no load was counted, since an update may be of another loss alone.
    """
    if LOAD not in metrics:
        return params

    def moved(layer, choices):
        router = layer["moe"]["router"]
        bias = router["bias"]
        step = jnp.asarray(config.router_bias_rate, bias.dtype) * _too_few(choices).astype(bias.dtype)
        return layer | {"moe": layer["moe"] | {"router": router | {"bias": bias + step}}}

    return _with_experts_changed(config, params, metrics[LOAD].total, moved)


def _with_experts_changed(
    config: TransformerConfig, params: PyTree, counts: jax.Array, change: Callable[[dict, jax.Array], dict]
) -> PyTree:
    """Returns params with `change(layer, its counts [L, E])` in place of each layer that has experts.

    Args:
      counts: [L, E], or [L, N, E] of the N layers with experts in each of L periods.
    """
    stack = stack_of(config)
    layers = stack.split(params["layers"])
    each = iter(jnp.moveaxis(counts, 1, 0) if len(layers) > 1 else counts[None])
    changed = [
        change(layer, next(each)) if one.num_experts else layer
        for one, layer in zip(stack.period, layers, strict=True)
    ]
    return params | {"layers": stack.joined(changed)}


def _too_few(choices: jax.Array) -> jax.Array:
    """Computes sign(mean - choices) of i32[..., E], without rounding."""
    whole, rest = jnp.divmod(choices.sum(-1, keepdims=True), choices.shape[-1])
    return jnp.where(choices == whole, jnp.sign(rest), jnp.sign(whole - choices))


def _choices(experts_RTK: jax.Array, counted_RT: jax.Array | None, num_experts: int) -> jax.Array:
    """Returns i32[R, E], how often each row's tokens on this device chose each expert."""
    made = experts_RTK[..., None] == jnp.arange(num_experts)
    made = made if counted_RT is None else made & counted_RT[..., None, None]
    return made.sum((1, 2), dtype=jnp.int32)


def _counted_rows(routing: Routing, counted_RT) -> jax.Array:
    """Counts rows that have tokens, once each: the first device of `context` counts those that it has a part of."""
    if counted_RT is None:
        return jnp.asarray(routing.logits.shape[0])
    rows = (_over_context(counted_RT.sum(1)) > 0).sum()
    return rows if size_here() == 1 else jnp.where(lax.axis_index("context") == 0, rows, 0)


def _counted_tokens(routing: Routing, counted_RT) -> jax.Array:
    return jnp.asarray(math.prod(routing.logits.shape[:2])) if counted_RT is None else counted_RT.sum()


def _over_context(x: jax.Array) -> jax.Array:
    return x if size_here() == 1 else lax.psum(x, "context")


def where_counted(counted_RT: jax.Array | None, values: jax.Array) -> jax.Array:
    """Returns values [R, T, ...], and 0 at tokens that do not count."""
    if counted_RT is None:
        return values
    return jnp.where(counted_RT.reshape(counted_RT.shape + (1,) * (values.ndim - 2)), values, 0)
