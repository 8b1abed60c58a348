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
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.losses.language_model import next_token_loss
from jaxfb.models import lora, mtp
from jaxfb.models.adapted import lora_of
from jaxfb.models.attend import attend_to
from jaxfb.models.balance import LOAD, counted_leaves, counted_tokens
from jaxfb.models.block import Block, Read, init_module, rebuilder, whole
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import Outer
from jaxfb.models.pattern import LEADING, Stack, layer_name, named, stack_of
from jaxfb.models.pieces import layer_piece_of, runs_on_pieces
from jaxfb.models.rope import positions_in_documents
from jaxfb.parallel import rows as shared_rows
from jaxfb.parallel.context import token_index
from jaxfb.parallel.table import Table
from jaxfb.parallel.tensor import transformer_param_specs, vocabulary_dims
from jaxfb.types import Halves, LossOutput, Pipelined, Unembedding, VocabularyParallel

# (hidden_RTD after the last norm, head kernel [D, V], microbatch, axis=None) -> LossOutput;
# with an axis, V is cut over it
HeadLoss = Callable[..., LossOutput]


def transformer(config: TransformerConfig, *, loss: HeadLoss | None = None) -> Pipelined:
    """Builds the transformer of `config` as three pure functions over the dict that `init_params` makes.

    A microbatch holds `tokens` i32[R, T] and optionally `segments` i32[R, T] (attention stays inside one) and
    `positions` i32[R, T] (if absent 0..T-1, or from 0 in each segment where rotary positions depend on a document's
    length), beside what the loss reads. A token outside [0, vocab_size) has an
    embedding of zeros and no gradient, on every mesh. Computes in the params' dtype.

    Args:
      config: the sizes.
      loss: what the head computes; if None, `next_token_loss` in chunks of `config.loss_chunk`, with the
        config's label smoothing, z-loss and soft cap, and multi-token prediction. Your own loss goes
        without the latter.
    """
    layers, outer = _Layers(config), _EmbedAndHead(config, loss)
    on_pieces = loss is None and runs_on_pieces(layers.stack)
    shared = _shares_rows if outer.multi_token or outer.leading else None
    return Pipelined(
        outer.embed,
        layers.run,
        outer.head,
        transformer_param_specs,
        VocabularyParallel(vocabulary_dims, outer.embed_part, outer.head, shared),
        outer.unembed,
        counted_leaves(config),
        layer_piece_of(layers.stack) if on_pieces else None,
        halves=layers.halves,
        tables=vocabulary_dims,
    )


class _Layers:
    """The layers of a transformer, of which `run` is one, or one period."""

    def __init__(self, config: TransformerConfig):
        self.stack = stack_of(config)
        self._with_experts = bool(config.num_experts)
        self._period = [_layer_of(one) for one in self.stack.period]

    @property
    def halves(self) -> Halves | None:
        """Returns attention, and MLP or experts, as two functions; None where a period has several layers."""
        if len(self.stack.period) != 1:
            return None
        (config,) = self.stack.period
        block_of = rebuilder(Block, config)

        def first(params, hidden, microbatch, rng=None):
            read = _read(microbatch, rng, self.stack)
            attend = attend_to(config, read.segments)
            return block_of(params, read.keys).attended(hidden, read.positions, attend, read.keys)[0]

        def second(params, hidden, microbatch, rng=None, beside=()):
            read = _read(microbatch, rng, self.stack)
            block, load = block_of(params, read.keys), params.get(LOAD)
            after, out, beside = block.transformed(
                hidden, read.keys, read.counted, load, beside, read.segments
            )
            return ((after, out) if self._with_experts else after), beside

        return Halves(first, second, ("mlp", "moe"))

    def run(self, layer_params, hidden, microbatch, rng=None):
        """Returns hidden, with experts (hidden, the terms and metrics of their routers)."""
        given, outs = _read(microbatch, rng, self.stack), []
        several = len(self._period) > 1
        for place, (run, own) in enumerate(zip(self._period, self.stack.split(layer_params), strict=True)):
            hidden, out = run(own, hidden, given.of_layer(place) if several else given)
            outs.append(out)
        return (hidden, _of_period(outs)) if self._with_experts else hidden


class _EmbedAndHead:
    """Computes what comes before and after the layers: embedding, head and loss, over `outer` parameters."""

    def __init__(self, config: TransformerConfig, loss: HeadLoss | None):
        self._config, self._loss, self._takes_table = config, loss or _own_loss(config), loss is None
        self._module, self.leading, self.multi_token = rebuilder(Outer, config), _leading_of(config), None
        if loss is None and config.mtp_depth:
            self.multi_token = mtp.MultiToken(config)

    def embed(self, outer, microbatch, rng=None):
        hidden = self._module(outer).embed(microbatch["tokens"])
        if self.leading is None:
            return hidden
        return jax.checkpoint(self.leading)(outer[LEADING], hidden, self._read(microbatch, rng))

    def head(self, outer, hidden, microbatch, rng=None, axis=None):
        module, over = self._module(outer), {} if axis is None else {"axis": axis}
        kernel = module.head_table if self._takes_table else module.head_kernel
        out = self._loss(whole(module.norm(hidden)), kernel, microbatch, **over)
        if self.multi_token is None:
            return out
        given = self._read(microbatch, rng)
        more = self.multi_token.terms(module, outer[mtp.NAME], hidden, microbatch, given, axis)
        return LossOutput({**out.terms, **more.terms}, {**out.metrics, **more.metrics}, out.outputs)

    def embed_part(self, outer, microbatch, rng, axis):
        """Returns this device's part of hidden, whose sum over `axis` is hidden."""
        part = self._module(outer).embed.part(microbatch["tokens"], axis)
        if self.leading is None:
            return part
        own = jax.tree.map(partial(shared_rows.own, axis=axis), self._read(microbatch, rng))
        hidden = self.leading(outer[LEADING], shared_rows.take_sum(part, axis), own)
        return shared_rows.place(hidden, axis, part.shape[0])

    def unembed(self, outer, hidden):
        module, config = self._module(outer), self._config
        normed = whole(module.norm(hidden))
        table = module.head_table if isinstance(module.head_table, Table) else None
        return Unembedding(normed, module.head_kernel, config.logit_softcap, config.loss_chunk, table)

    def _read(self, microbatch, rng):
        return _read(microbatch, rng, stack_of(self._config))


def _own_loss(config: TransformerConfig) -> HeadLoss:
    return partial(
        next_token_loss,
        chunk=config.loss_chunk,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        logit_softcap=config.logit_softcap,
    )


def init_params(config: TransformerConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Draws random parameters of `transformer(config)`.

    Pure, so it can be jitted with `out_shardings` to be born sharded, or given to `jax.eval_shape`. The
    numbers depend on `key` alone and are drawn in float32 for every dtype.

    Args:
      config: the sizes.
      key: a PRNG key, typed or raw.
      dtype: of every leaf.
    Returns:
      The dict at the top of this file.
    """
    outer_key, layers_key = jax.random.split(key)
    params = init_module(Outer, config)(outer_key)
    stack, keys = stack_of(config), jax.random.split(layers_key, config.num_layers)
    first = len(stack.leading)
    in_periods = keys[first:].reshape(stack.num_periods, -1, *keys.shape[1:])  # a raw key is a row
    params["layers"] = stack.joined(
        [jax.vmap(init_module(Block, one))(in_periods[:, place]) for place, one in enumerate(stack.period)]
    )
    if first:
        made = [init_module(Block, one)(key) for one, key in zip(stack.leading, keys, strict=False)]
        params[LEADING] = named(made)
    if config.mtp_depth:
        params[mtp.NAME] = mtp.init_depths(stack.period[-1], jax.random.fold_in(key, 2))
    params = lora.with_adapters(lora_of(config), params, jax.random.fold_in(key, 3))
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _read(microbatch: Mapping, rng: jax.Array | None, stack: Stack) -> Read:
    counted = counted_tokens(microbatch) if any(one.num_experts for one in stack.period) else None
    return Read(_positions(microbatch, stack.turns_by_length), microbatch.get("segments"), counted, rng)


def _layer_of(config: TransformerConfig) -> Callable[[dict, jax.Array, Read], tuple[jax.Array, LossOutput]]:
    """Returns a function of a layer's parameters, hidden and `Read` to (hidden, its router's terms and metrics)."""
    block_of = rebuilder(Block, config)

    def run(params, hidden, read):
        attend, load = attend_to(config, read.segments), params.get(LOAD)
        block = block_of(params, read.keys)
        given = read.positions, attend, read.keys, read.counted, load, read.segments
        after, _, out = block.with_router(hidden, *given)
        return after, out

    return run


def _leading_of(config: TransformerConfig) -> Callable[[dict, jax.Array, Read], jax.Array] | None:
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
    """Returns a tree of bool like `outer`: the leaves that each stage uses for its own rows."""
    return {
        name: jax.tree.map(lambda _, n=name: n in (mtp.NAME, LEADING), leaves)
        for name, leaves in outer.items()
    }


def _positions(microbatch: Mapping, turns_by_length: bool) -> jax.Array:
    tokens = microbatch["tokens"]
    if "positions" in microbatch:
        return microbatch["positions"]
    if turns_by_length and "segments" in microbatch:
        return positions_in_documents(microbatch["segments"])
    return jnp.broadcast_to(token_index(tokens.shape[1]), tokens.shape)
