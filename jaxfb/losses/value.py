"""The critic: a value per token, its loss, and a model with a value head in place of logits.

Used in forward_backward like a policy, with its own plan and optimizer. Leaves of a microbatch, f32[rows, seq]:
loss_mask, returns; old_values where values are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.losses.aggregation import aggregate, check_aggregation
from jaxfb.losses.coupling import check_rows_uncoupled
from jaxfb.losses.heads import unembed_of, with_head_of
from jaxfb.losses.policy import mean_metric, microbatch_leaf
from jaxfb.losses.sequences import Sequences
from jaxfb.losses.settings import check_not_negative, check_number
from jaxfb.losses.surrogates import fraction
from jaxfb.losses.vocabulary.logits import sum_dtype
from jaxfb.refusal import function
from jaxfb.types import LossOutput, Pipelined, Sum

HEAD = "value_head"


@dataclass(frozen=True)
class ValueLoss:
    """Computes a critic's clipped loss, aggregated over tokens (PPO2's value loss).

    At each token coef / 2 * max((v - return)^2, (v_old + clip(v - v_old, +-clip) - return)^2).

    clip: None is the plain squared error; `old_values` is then not read.
    Returns LossOutput with the term "value" and the metrics value, return, value_error (mean squared), and with a
    clip value_clip_fraction.
    """

    clip: float | None = 0.5
    coef: float = 1.0
    aggregation: str = "token-mean"
    scale: float | None = None

    def __post_init__(self):
        check_aggregation(self.aggregation, self.scale)
        check_not_negative("loss", 1.0, coef=self.coef)
        if self.clip is not None:
            check_number("loss", "clip", self.clip, lambda x: x > 0, "positive", "0.5, or None for no clip")

    def __call__(self, values: jax.Array, microbatch: Mapping[str, jax.Array]) -> LossOutput:
        sequences = Sequences.of(microbatch)
        values = sequences.where_counted(values)
        returns = sequences.where_counted(microbatch_leaf(microbatch, "returns"))
        error, metrics = (values - returns) ** 2, {}
        loss = error
        if self.clip is not None:
            old = sequences.where_counted(microbatch_leaf(microbatch, "old_values"))
            clipped = (jnp.clip(values, old - self.clip, old + self.clip) - returns) ** 2
            metrics["value_clip_fraction"] = fraction(clipped > error, sequences)
            loss = jnp.maximum(error, clipped)
        term = aggregate(self.coef / 2 * loss, sequences, self.aggregation, scale=self.scale)
        for name, per_token in (("value", values), ("return", returns), ("value_error", error)):
            metrics[name] = mean_metric(per_token, sequences)
        return LossOutput({"value": term}, metrics)


def value_loss_fn(model: Pipelined, loss: Callable[[jax.Array, Mapping], LossOutput | Sum]) -> Pipelined:
    """Returns `model` with a value head: `loss(values float[rows, seq], microbatch)`, values 0 where `loss_mask` is 0.

    Its parameters are those of `critic_params`. Give it a model with tied embeddings, which has no matrix of logits
    to carry along: `transformer(dataclasses.replace(config, tied_embeddings=True))`.

    Raises:
      ValueError: the model offers no `unembed`.
    """
    unembed = unembed_of(model)
    function("loss", loss, "(values, microbatch)", who="[loss]")

    def head_loss(outer, hidden, microbatch, axis) -> LossOutput | Sum:
        head, counted = outer[HEAD], microbatch["loss_mask"] != 0
        hidden = jnp.where(counted[..., None], unembed(_without_head(outer), hidden).hidden, 0)
        values = jnp.matmul(hidden, head["kernel"], preferred_element_type=sum_dtype(hidden)) + head["bias"]
        return loss(jnp.where(counted, values, 0), microbatch)

    return replace(
        with_head_of(_beside_a_head(model), head_loss), check=partial(check_rows_uncoupled, loss, 1)
    )


def _beside_a_head(model: Pipelined) -> Pipelined:
    """Returns `model` for params that hold a value head as well, which its own functions do not know."""

    def embed(outer, microbatch, *rest):
        return model.embed(_without_head(outer), microbatch, *rest)

    vocabulary = model.vocabulary
    if vocabulary is None:
        return replace(model, embed=embed)

    def embed_part(outer, microbatch, *rest):
        return vocabulary.embed(_without_head(outer), microbatch, *rest)

    def dims(outer):
        return vocabulary.dims(_without_head(outer)) | {HEAD: jax.tree.map(lambda _: -1, outer[HEAD])}

    return replace(model, embed=embed, vocabulary=replace(vocabulary, embed=embed_part, dims=dims))


def _without_head(outer: dict) -> dict:
    return {name: leaf for name, leaf in outer.items() if name != HEAD}


def value_fn(model: Pipelined) -> Pipelined:
    """Returns the model for `forward_only` passes: its outputs are {"values"}, float[rows, seq] in row order."""
    return value_loss_fn(model, _values_out)


def _values_out(values: jax.Array, microbatch: Mapping) -> LossOutput:
    mean = mean_metric(values, Sequences.of(microbatch))
    return LossOutput({"value": mean}, {}, {"values": values})


def critic_params(params: dict, dtype: Any = None) -> dict:
    """Returns parameters of a critic that starts as the model of `params`, with a value head of zeros in place of its
    logits' matrix.

    The head is {"kernel": [width], "bias": []} under "value_head"; zero is the usual first guess, since the values of a
    random one would be noise to the first advantages.
    """
    scale = params["norm"]["scale"]
    dtype = dtype or scale.dtype
    head = {"kernel": jnp.zeros(scale.shape[-1:], dtype), "bias": jnp.zeros((), dtype)}
    return {name: leaf for name, leaf in params.items() if name != "head"} | {HEAD: head}
