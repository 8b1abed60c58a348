"""Keeps experts evenly used, and reports it: losses, a bias in the choice, and counts. Part of the model.

All of it is made of sums over tokens of the whole update, so nothing about its split is in it:

  balance        a loss of each sequence by itself (DeepSeek-V3, arXiv:2412.19437, eq. 17-20); where several are packed
                 in a row, of each of them.
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
from jaxfb.parallel.context import size_here, whole_rows
from jaxfb.types import Counted, PyTree, Sum

BALANCE, BATCH_BALANCE, ROUTER_Z = "balance", "batch_balance", "router_z"
LOAD, ENTROPY, DROPPED = "expert_load", "router_entropy", "dropped_choices"
_TOKENS_AT_ONCE = 4096
"""How many tokens are compared with all others of their row at a time, which bounds the memory of the comparison where
the compiler does not fuse it."""


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
    segments_RT: jax.Array | None = None,
) -> dict[str, Sum]:
    """Returns the terms of one layer; those with a coefficient of 0 are left out. Added over layers they are means
    over them.

    "balance":       weight = tokens; 1 where the tokens of each sequence are spread evenly.
    "batch_balance": weight = tokens; 1 where those of the update are spread evenly. 0 while `load_E` is not known.
    "router_z":      weight = tokens; the square of each token's log normalizer.
    """
    tokens, terms = _counted_tokens(routing.logits, counted_RT).astype(routing.logits.dtype), {}
    if config.balance_coefficient:
        balance = balance_of_sequences(routing.probs, routing.experts, counted_RT, segments_RT)
        terms[BALANCE] = Sum(config.balance_coefficient * balance.total, balance.weight)
    if config.batch_balance_coefficient:
        load_E = jnp.zeros(config.num_experts) if load_E is None else lax.stop_gradient(load_E)
        total = (where_counted(counted_RT, routing.probs) * load_E.astype(tokens.dtype)).sum()
        terms[BATCH_BALANCE] = Sum(config.batch_balance_coefficient * total, tokens)
    if config.router_z_coefficient:
        square = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
        total = config.router_z_coefficient * where_counted(counted_RT, square).sum()
        terms[ROUTER_Z] = Sum(total, tokens)
    return terms


def balance_of_sequences(
    probs_RTE: jax.Array,
    experts_RTK: jax.Array,
    counted_RT: jax.Array | None,
    segments_RT: jax.Array | None = None,
) -> Sum:
    """Computes DeepSeek-V3's sequence-wise loss: the sum over sequences of tokens * sum_e f_e p_e; weight = tokens.

    f_e is the share of a sequence's choices that went to expert e, divided by an even share, and p_e the expert's mean
    probability in that sequence. Equivalently each token adds, for each expert, its probability times f_e. The sum is
    therefore the same whichever sequences share a row or a microbatch, and however `context` cuts them.

    Args:
      segments_RT: i32[R, T], which sequence of its row a token is of; None: a row is one.
    """
    num_experts = probs_RTE.shape[-1]
    choices_RTE = _choices_in_sequence(experts_RTK, counted_RT, segments_RT, num_experts)
    choices_RTE = choices_RTE.astype(probs_RTE.dtype)
    load_RTE = choices_RTE * num_experts / jnp.maximum(choices_RTE.sum(-1, keepdims=True), 1)
    total = (where_counted(counted_RT, probs_RTE) * load_RTE).sum()
    return Sum(total, _counted_tokens(probs_RTE, counted_RT).astype(total.dtype))


def router_metrics(
    routing: Routing, counted_RT: jax.Array | None, capacity: int | None = None
) -> dict[str, Sum]:
    """Returns the metrics of one layer.

    "expert_load":     [E], choices of each expert / an even share of them: 1 where even.
    "router_entropy":  of each token's probabilities, in nats; log(E) where the router has no preference.
    "dropped_choices": with a capacity, the share of choices that no expert took.
    """
    *_, num_experts = routing.probs.shape
    choices_E = _chosen(routing.experts, counted_RT, num_experts).sum((0, 1))
    made = choices_E.sum().astype(routing.probs.dtype)
    entropies = where_counted(counted_RT, jax.scipy.special.entr(routing.probs).sum(-1))
    metrics = {
        LOAD: Sum(choices_E, jnp.broadcast_to(made / num_experts, choices_E.shape)),
        ENTROPY: Sum(entropies.sum(), _counted_tokens(routing.logits, counted_RT).astype(entropies.dtype)),
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


def _chosen(experts_RTK: jax.Array, counted_RT: jax.Array | None, num_experts: int) -> jax.Array:
    """Returns i32[R, T, E], 1 where a token of this device chose an expert."""
    made = experts_RTK[..., None] == jnp.arange(num_experts)
    made = made if counted_RT is None else made & counted_RT[..., None, None]
    return made.sum(2, dtype=jnp.int32)


def _choices_in_sequence(
    experts_RTK: jax.Array, counted_RT: jax.Array | None, segments_RT: jax.Array | None, num_experts: int
) -> jax.Array:
    """Returns [R, T, E], how often the whole sequence of a token chose each expert; [R, 1, E] without segments.

    With segments it is the product of two matrices of zeros and ones, which is exact: is token s in the sequence of
    token t, and did s choose e. On TPUs this takes less time than a scatter that adds choices up by sequence.
    """
    chosen_RTE = _chosen(experts_RTK, counted_RT, num_experts)
    if segments_RT is None:
        return _over_context(chosen_RTE.sum(1, keepdims=True))
    of_row_RT, chosen_RTE = whole_rows(segments_RT), whole_rows(chosen_RTE.astype(jnp.bfloat16))

    def of_token(segment_R: jax.Array) -> jax.Array:
        is_same_RT = (segment_R[:, None] == of_row_RT).astype(jnp.bfloat16)
        return jnp.einsum("rt,rte->re", is_same_RT, chosen_RTE, preferred_element_type=jnp.float32)

    return jnp.moveaxis(lax.map(of_token, segments_RT.T, batch_size=_TOKENS_AT_ONCE), 0, 1)


def _counted_tokens(of_RT_: jax.Array, counted_RT: jax.Array | None) -> jax.Array:
    return jnp.asarray(math.prod(of_RT_.shape[:2])) if counted_RT is None else counted_RT.sum()


def _over_context(x: jax.Array) -> jax.Array:
    return x if size_here() == 1 else lax.psum(x, "context")


def where_counted(counted_RT: jax.Array | None, values: jax.Array) -> jax.Array:
    """Returns values [R, T, ...], and 0 at tokens that do not count."""
    if counted_RT is None:
        return values
    return jnp.where(counted_RT.reshape(counted_RT.shape + (1,) * (values.ndim - 2)), values, 0)
