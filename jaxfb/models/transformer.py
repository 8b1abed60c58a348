"""The built-in decoder-only transformer, written as `Pipelined(embed, layer, head)`.

What forward_backward runs. The modules are Flax; what leaves this file is pure functions over a nested dict:

    {"embed": {"embedding"}, "norm": {"scale"}, "head": {"kernel"} (absent if tied),
     "layers": {"attention_norm", "attention": {"query", "key", "value", "output"}, "mlp_norm",
                "mlp": {"gate", "up", "down"}}}          every leaf of "layers" stacked [num_layers, ...]

With `latent` attention has {"query_down", "query_down_norm", "query_up" (or "query" alone), "key_value_down",
"key_value_down_norm", "key_value_up", "output"}. A `Variant` may put "attention_out_norm" and "mlp_out_norm" beside or
in place of the two norms, and biases where Llama has none.

With experts a layer has, in place of "mlp", "moe": {"router": {"kernel", "bias" (absent without router_bias_rate)},
"experts": {"gate", "up", "down"} in three arrays [num_layers, num_experts, ...], "shared" like "mlp" (absent without a
shared expert)}; the engine may add "expert_load" [num_layers, num_experts] beside it (`balance.py`).

With layers of several kinds "layers" has {"layer_0": ..., "layer_1": ...}, those of a period, every leaf stacked
[num_periods, ...], and beside it "leading" the layers before the first period, by the same names, not stacked.

Shapes: R = rows, T = tokens of a row, D = hidden_size, V = vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfb.losses.language_model import next_token_loss
from jaxfb.models import lora, mtp, splash_ring
from jaxfb.models.adapted import lora_of
from jaxfb.models.attention import Attend, Attention, choose_backend, packed_attention
from jaxfb.models.balance import LOAD, counted_leaves, counted_tokens
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent_attention import LatentAttention
from jaxfb.models.layers import Outer, RMSNorm, SwiGLU, dropout
from jaxfb.models.moe import MoE
from jaxfb.models.pattern import LEADING, layer_name, named, stack_of
from jaxfb.models.pieces import layer_piece_of, runs_on_pieces
from jaxfb.parallel import rows as shared_rows
from jaxfb.parallel.context import context_attention, size_here, token_index
from jaxfb.parallel.scores import PLAIN
from jaxfb.parallel.tensor import on_head_shards, residual_stream, transformer_param_specs, vocabulary_dims
from jaxfb.types import LossOutput, Pipelined, Unembedding, VocabularyParallel

whole = partial(residual_stream, sequence_parallel=False)

# (hidden_RTD after the last norm, head kernel [D, V], microbatch, axis=None) -> LossOutput;
# with an axis, V is cut over it
HeadLoss = Callable[..., LossOutput]


class Block(nnx.Module):
    """A layer: attention, and an MLP or experts, with norms before them, after them or both. [R, T, D] -> the same."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norms = config.variant.norms
        if self.norms != "post":
            self.attention_norm = RMSNorm(config.hidden_size, config)
            self.mlp_norm = RMSNorm(config.hidden_size, config)
        if self.norms != "pre":
            self.attention_out_norm = RMSNorm(config.hidden_size, config)
            self.mlp_out_norm = RMSNorm(config.hidden_size, config)
        self.attention = (LatentAttention if config.latent else Attention)(config, rngs=rngs)
        if config.num_experts:
            self.moe = MoE(config, rngs=rngs)
        else:
            self.mlp = SwiGLU(config, rngs=rngs)
        self.has_experts, self.dropout = bool(config.num_experts), config.dropout
        self.sequence_parallel = config.sequence_parallel

    def __call__(
        self, x_RTD: jax.Array, positions_RT: jax.Array, attend: Attend, keys: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        return self.with_router(x_RTD, positions_RT, attend, keys)[:2]

    def with_router(
        self,
        x_RTD: jax.Array,
        positions_RT: jax.Array,
        attend: Attend,
        keys: jax.Array | None = None,
        counted_RT: jax.Array | None = None,
        load_E: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, LossOutput]:
        """Returns (hidden, what `attend` kept, the router's terms of the loss and metrics, of tokens where
        `counted_RT`).
        """
        with jax.named_scope("attention"):
            read = x_RTD if self.norms == "post" else self.attention_norm(x_RTD)
            mixed, kept = self.attention(whole(read), positions_RT, attend)
            added = mixed if self.norms == "pre" else self.attention_out_norm(mixed)
            x_RTD = x_RTD + dropout(added, self.dropout, keys, site=0)
        out = LossOutput({})
        with jax.named_scope("mlp"):
            read = whole(x_RTD if self.norms == "post" else self.mlp_norm(x_RTD))
            if self.has_experts:
                answer, out = self.moe(read, counted_RT, load_E)
            else:
                answer = self.mlp(read)
            added = answer if self.norms == "pre" else self.mlp_out_norm(answer)
            x_RTD = x_RTD + dropout(added, self.dropout, keys, site=1)
        return residual_stream(x_RTD, self.sequence_parallel), kept, out


def transformer(config: TransformerConfig, *, loss: HeadLoss | None = None) -> Pipelined:
    """Builds the transformer of `config` as three pure functions over the dict that `init_params` makes.

    A microbatch holds `tokens` i32[R, T] and optionally `segments` i32[R, T] (attention stays inside one) and
    `positions` i32[R, T] (0..T-1 if absent), beside what the loss reads. Computes in the params' dtype.

    Args:
      config: the sizes.
      loss: what the head computes; if None, `next_token_loss` in chunks of `config.loss_chunk`, with the
        config's label smoothing, z-loss and soft cap, and multi-token prediction. Your own loss goes
        without the latter.
    """
    stack = stack_of(config)
    period, last = [_layer_of(one) for one in stack.period], stack.period[-1]
    multi_token, layer_piece = None, None
    if loss is None and runs_on_pieces(stack):
        layer_piece = layer_piece_of(stack, [rebuilder(Block, one) for one in stack.period])
    if loss is None and config.mtp_depth:
        multi_token = mtp.MultiToken(config, rebuilder(partial(mtp.Depth, block=Block), last))
    if loss is None:
        loss = partial(
            next_token_loss,
            chunk=config.loss_chunk,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            logit_softcap=config.logit_softcap,
        )
    outer_of, leading = rebuilder(Outer, config), _leading_of(config)

    def read(microbatch, rng):
        counted = counted_tokens(microbatch) if config.num_experts else None
        return _Read(_positions(microbatch), microbatch.get("segments"), counted, rng)

    def embed(outer, microbatch, rng=None):
        hidden = outer_of(outer).embed(microbatch["tokens"])
        return jax.checkpoint(leading)(outer[LEADING], hidden, read(microbatch, rng)) if leading else hidden

    def layer(layer_params, hidden, microbatch, rng=None):
        given, outs = read(microbatch, rng), []
        for place, (run, own) in enumerate(zip(period, stack.split(layer_params), strict=True)):
            hidden, out = run(own, hidden, given.of_layer(place) if len(period) > 1 else given)
            outs.append(out)
        return (hidden, _of_period(outs)) if config.num_experts else hidden

    def head(outer, hidden, microbatch, rng=None, **axis):
        module = outer_of(outer)
        out = loss(whole(module.norm(hidden)), module.head_kernel, microbatch, **axis)
        if multi_token is None:
            return out
        given = mtp.Read(*read(microbatch, rng), partial(_attend_to, last))
        more = multi_token.terms(module, outer[mtp.NAME], hidden, microbatch, given, axis.get("axis"))
        return LossOutput({**out.terms, **more.terms}, {**out.metrics, **more.metrics}, out.outputs)

    def embed_part(outer, microbatch, rng, axis):
        part = outer_of(outer).embed.part(microbatch["tokens"], axis)
        if leading is None:
            return part
        own = jax.tree.map(partial(shared_rows.own, axis=axis), read(microbatch, rng))
        hidden = leading(outer[LEADING], shared_rows.take_sum(part, axis), own)
        return shared_rows.place(hidden, axis, part.shape[0])

    def head_part(outer, hidden, microbatch, rng, axis):
        return head(outer, hidden, microbatch, rng, axis=axis)

    def unembed(outer, hidden):
        module = outer_of(outer)
        return Unembedding(
            whole(module.norm(hidden)), module.head_kernel, config.logit_softcap, config.loss_chunk
        )

    shared = _shares_rows if multi_token or leading else None
    vocabulary = VocabularyParallel(vocabulary_dims, embed_part, head_part, shared)
    return Pipelined(
        embed,
        layer,
        head,
        transformer_param_specs,
        vocabulary,
        unembed,
        counted_leaves(config),
        layer_piece,
    )


def init_params(config: TransformerConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Draws random parameters of `transformer(config)`.

    Pure, so it can be jitted with `out_shardings` to be born sharded, or given to `jax.eval_shape`. The
    numbers depend on `key` alone and are drawn in float32 for every dtype.

    Args:
      config: the sizes.
      key: a PRNG key.
      dtype: of every leaf.
    Returns:
      The dict at the top of this file.
    """
    outer_key, layers_key = jax.random.split(key)
    params = _init(Outer, config)(outer_key)
    stack, keys = stack_of(config), jax.random.split(layers_key, config.num_layers)
    first = len(stack.leading)
    in_periods = keys[first:].reshape(stack.num_periods, len(stack.period))
    params["layers"] = stack.joined(
        [jax.vmap(_init(Block, one))(in_periods[:, place]) for place, one in enumerate(stack.period)]
    )
    if first:
        made = [_init(Block, one)(key) for one, key in zip(stack.leading, keys, strict=False)]
        params[LEADING] = named(made)
    if config.mtp_depth:
        params[mtp.NAME] = mtp.init_depths(stack.period[-1], Block, jax.random.fold_in(key, 2))
    params = lora.with_adapters(lora_of(config), params, jax.random.fold_in(key, 3))
    return jax.tree.map(lambda x: x.astype(dtype), params)


class _Read(NamedTuple):
    """Holds the inputs of layers besides hidden states, for the rows that this device works on."""

    positions: jax.Array
    segments: jax.Array | None
    counted: jax.Array | None
    keys: jax.Array | None

    def of_layer(self, number: int) -> _Read:
        """Returns the same with row keys folded with a number."""
        if self.keys is None:
            return self
        return self._replace(keys=jax.vmap(jax.random.fold_in, (0, None))(self.keys, number))


def _layer_of(config: TransformerConfig) -> Callable[[dict, jax.Array, _Read], tuple[jax.Array, LossOutput]]:
    """Returns a function of a layer's parameters, hidden and `_Read` to (hidden, its router's terms and metrics)."""
    block_of = rebuilder(Block, config)

    def run(params, hidden, read):
        attend, load = _attend_to(config, read.segments), params.get(LOAD)
        block = block_of(params, read.keys)
        after, _, out = block.with_router(hidden, read.positions, attend, read.keys, read.counted, load)
        return after, out

    return run


def _leading_of(config: TransformerConfig) -> Callable[[dict, jax.Array, _Read], jax.Array] | None:
    """Returns a function that runs the layers before the first period; None where there are none."""
    layers = [_layer_of(one) for one in stack_of(config).leading]
    behind = config.num_layers + config.mtp_depth  # numbers that no other layer's keys are folded with

    def run(params, hidden, read):
        for place, layer in enumerate(layers):
            hidden, _ = layer(params[layer_name(place)], hidden, read.of_layer(behind + place))
        return hidden

    return run if layers else None


def _of_period(outs: Sequence[LossOutput]) -> LossOutput:
    """Returns the sums of the layers' terms, and their metrics [layers with experts, ...], or of one layer [...]."""
    if len(outs) == 1:
        return outs[0]
    reporting = [out for out in outs if out.metrics]
    terms = jax.tree.map(lambda *parts: sum(parts), *[out.terms for out in reporting])
    return LossOutput(terms, jax.tree.map(lambda *each: jnp.stack(each), *[out.metrics for out in reporting]))


def _shares_rows(outer: dict) -> dict:
    """Returns tree like `outer` of bool: the leaves that each stage uses for its own rows."""
    return {
        name: jax.tree.map(lambda _, n=name: n in (mtp.NAME, LEADING), leaves)
        for name, leaves in outer.items()
    }


def _attend_to(config: TransformerConfig, segments: jax.Array | None) -> Attend:
    how = dict(backend=config.attention, context=config.context_attention, window=config.window)
    return partial(_attend_packed, segments=segments, **how)


def _attend_packed(query, key, value, scores=PLAIN, *, segments, backend, context, window):
    if size_here() > 1:
        attend = partial(context_attention, method=context, window=window)
        whole = window is None and context == "ring" and backend in ("auto", "splash")
        if whole and splash_ring.refusal(query, key) is None:
            return _on_head_shards(splash_ring.splash_ring, query, key, value, scores, segments), None
        return attend(query, key, value, scores, segments=segments), None
    chosen = choose_backend(backend, query, key, packed=segments is not None, plain=scores.are_plain)
    attend = partial(packed_attention, backend=chosen, window=window)
    if chosen == "xla":
        return attend(query, key, value, scores, segments=segments), None
    return _on_head_shards(attend, query, key, value, scores, segments), None


def _on_head_shards(attend, query, key, value, scores, segments):
    """Returns what a kernel makes of the heads of each tensor shard."""

    def of_shard(query, key, value, *more):
        *sinks, segments = more
        here = scores._replace(sinks=sinks[0].reshape(-1)) if sinks else scores
        return attend(query, key, value, scores=here, segments=segments)

    sinks = [] if scores.sinks is None else [scores.sinks[None, None, :, None]]
    return on_head_shards(of_shard, [query, key, value, *sinks], segments)


def _positions(microbatch: Mapping) -> jax.Array:
    tokens = microbatch["tokens"]
    return microbatch.get("positions", jnp.broadcast_to(token_index(tokens.shape[1]), tokens.shape))


def _init(module: Callable[..., nnx.Module], config: TransformerConfig) -> Callable[[jax.Array], dict]:
    return lambda key: nnx.to_pure_dict(nnx.state(module(config, rngs=nnx.Rngs(key))))


def rebuilder(module: Callable[..., nnx.Module], config: TransformerConfig) -> Callable[..., Any]:
    """Returns a function from a module's dict of arrays to the module; its structure is found once, abstractly.

    Arrays in the dict that are not the module's own are left out, but for those of adapters where the config has some.
    A second argument is the keys of the rows, which the adapters' dropout draws from.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))
    own, adapters = nnx.to_pure_dict(state), lora_of(config)

    def rebuild(params: Mapping, keys: jax.Array | None = None) -> Any:
        module = nnx.merge(graph, _own(params, own))
        if adapters is not None:
            lora.attach(module, params, adapters, keys)
        return module

    return rebuild


def _own(params: Mapping, like: Mapping) -> dict:
    """Returns the arrays of `params` that `like` has too."""
    return {
        name: _own(params[name], value) if isinstance(value, Mapping) else params[name]
        for name, value in like.items()
    }
