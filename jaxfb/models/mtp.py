"""Multi-token prediction: further layers behind the last, each of which predicts one token further ahead.

Part of the model's head, after DeepSeek-V3 (arXiv:2412.19437, section 2.2). At depth d = 1, 2, ..., with h_0 the
output of the last layer and t the tokens,

    h_d[i] = layer_d(project_d([norm(h_{d-1}[i]); norm(embedding(t[i + d]))]))
    loss_d = cross entropy of head(norm_d(h_d[i])) against the target of place i + d

with the model's own embedding and head. A place counts in loss_d where i + d is in the same document, with the
weight of i + d in the loss; so the last d places of every document do not count. Each loss_d is a separate term
("mtp_1", ...), times mtp_weight / mtp_depth, divided by its own weight.

DeepSeek-V3's published weights differ (`mtp_as_published`): h_0 is the output of the model's last norm and h_d that of
norm_d, and the token's half comes first in project_d.

The layers of a model with experts have experts, balanced by their own sequence-wise loss ("mtp_1_balance") of the
places where i + d is in the same document: behind these a depth reads tokens of the next one. The batch-wise loss and
the router's bias belong to the model's own layers.

In a pipeline whose stages share out the vocabulary, they share out the rows of the layers too (`parallel.rows`).

Shapes: R = rows, or this device's share of them; T = tokens of a row; D = hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfb.losses.language_model import next_token_loss
from jaxfb.models.attend import attend_to
from jaxfb.models.attention import Attend
from jaxfb.models.block import Block, Read, init_module, rebuilder
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import Linear, Outer, RMSNorm, fan_in_init
from jaxfb.models.pattern import stack_of
from jaxfb.parallel import rows as shared_rows
from jaxfb.parallel.context import later
from jaxfb.parallel.tensor import residual_stream
from jaxfb.types import LossOutput, Sum

NAME = "mtp"


class Depth(nnx.Module):
    """A depth: two norms, a projection of both halves, a layer of the model's kind, the norm before the head."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.hidden_norm, self.token_norm = RMSNorm(width, config), RMSNorm(width, config)
        self.project = Linear(2 * width, width, kernel_init=fan_in_init, rngs=rngs)
        # what is counted over the whole batch is counted in the model's own layers
        alone = replace(config, batch_balance_coefficient=0.0, router_bias_rate=0.0)
        self.block = Block(alone, rngs=rngs)
        self.norm = RMSNorm(width, config)
        self.sequence_parallel, self.as_published = config.sequence_parallel, config.mtp_as_published

    def __call__(self, x_RTD, embedded_RTD, read: Read, attend: Attend):
        """Returns (hidden of this depth, the layer's own terms)."""
        halves = [self.hidden_norm(x_RTD), self.token_norm(embedded_RTD)]
        both = jnp.concatenate(halves[::-1] if self.as_published else halves, axis=-1)
        joined = residual_stream(self.project(both), self.sequence_parallel)
        x_RTD, _, router = self.block.with_router(
            joined, read.positions, attend, read.keys, read.counted, segments_RT=read.segments
        )
        return x_RTD, router.terms


class MultiToken:
    """The heads of one model, whose layers are like its last."""

    def __init__(self, config: TransformerConfig):
        self.config, self._layer = config, stack_of(config).period[-1]
        self._depth_of = rebuilder(Depth, self._layer)

    def terms(
        self, outer: Outer, depths: dict, hidden: jax.Array, microbatch: Mapping, read: Read, axis: str | None
    ) -> LossOutput:
        """Returns the terms and accuracies of all depths.

        Args:
          outer: embedding and head, cut over `axis` by vocabulary where one is given.
          depths: arrays of every depth, {"1": ..., "2": ...}.
          hidden: float[R, T, D], output of the last layer, equal on all devices of `axis`.
        """
        num_rows = hidden.shape[0]
        split = _Whole() if axis is None else _Split(axis, num_rows)
        read, x = split.read(read), split.take(outer.norm(hidden) if self.config.mtp_as_published else hidden)
        out: dict[str, Any] = {"terms": {}, "metrics": {}}
        for depth in range(1, self.config.mtp_depth + 1):
            module = self._depth_of(depths[str(depth)])
            embedded = split.embed(outer, later(microbatch["tokens"], depth))
            given = read.of_layer(self.config.num_layers + depth - 1)
            if read.counted is not None:
                reaches = split.own(is_in_document(microbatch, depth))
                given = given._replace(counted=read.counted & reaches)
            x, terms = module(x, embedded, given, attend_to(self._layer, read.segments))
            normed = module.norm(x)
            result = self._loss(
                split.give(residual_stream(normed, False)),
                outer.head_kernel,
                shifted(microbatch, depth),
                axis,
            )
            x = normed if self.config.mtp_as_published else x
            name = f"{NAME}_{depth}"
            out["terms"] |= {name: result.terms["cross_entropy"]}
            out["terms"] |= {f"{name}_{kind}": split.total(term) for kind, term in terms.items()}
            out["metrics"] |= {f"{name}_accuracy": result.metrics["accuracy"]}
        return LossOutput(**out)

    def _loss(self, normed, kernel, microbatch, axis) -> LossOutput:
        config = self.config
        out = next_token_loss(
            normed, kernel, microbatch, chunk=config.loss_chunk, axis=axis, logit_softcap=config.logit_softcap
        )
        term = out.terms["cross_entropy"]
        scaled = Sum(config.mtp_weight / config.mtp_depth * term.total, term.weight)
        return LossOutput({"cross_entropy": scaled}, out.metrics)


def init_depths(config: TransformerConfig, key: jax.Array) -> dict:
    """Returns random arrays of every depth: {"1": ..., "2": ...}."""
    keys = jax.random.split(key, config.mtp_depth)
    return {str(depth): init_module(Depth, config)(key) for depth, key in enumerate(keys, 1)}


def shifted(microbatch: Mapping, depth: int) -> dict[str, jax.Array]:
    """Returns `targets` and `loss_mask` of the place `depth` further on; the mask is 0 where that is another
    document.
    """
    mask = jnp.where(is_in_document(microbatch, depth), later(microbatch["loss_mask"], depth), 0)
    return {"targets": later(microbatch["targets"], depth), "loss_mask": mask}


def is_in_document(microbatch: Mapping, depth: int) -> jax.Array:
    """Returns bool[R, T], whether the place `depth` further on is in the same document, or without segments in the
    row.
    """
    segments = microbatch.get("segments")
    if segments is None:
        return later(jnp.ones_like(microbatch["targets"]), depth) != 0
    return (segments == later(segments, depth)) & (segments != 0)


class _Whole:
    """Computes all rows on one device."""

    def read(self, read):
        return read

    def take(self, x):
        return x

    give = total = own = take

    def embed(self, outer: Outer, tokens):
        return outer.embed(tokens)


@dataclass(frozen=True)
class _Split:
    """Computes each device's own rows of `axis`, and scores all rows with each device's share of the vocabulary."""

    axis: str
    num_rows: int

    def own(self, x):
        return shared_rows.own(x, self.axis)

    def read(self, read: Read) -> Read:
        own = jax.tree.map(self.own, read)
        if own.counted is None:
            return own
        return own._replace(counted=own.counted & shared_rows.is_real(self.num_rows, self.axis)[:, None])

    def take(self, x):
        return shared_rows.take(x, self.axis)

    def give(self, x):
        return shared_rows.give(x, self.axis, self.num_rows)

    def embed(self, outer: Outer, tokens):
        return shared_rows.take_sum(outer.embed.part(tokens, self.axis), self.axis)

    def total(self, term: Sum) -> Sum:
        return jax.tree.map(lambda part: shared_rows.total(part, self.axis), term)
