"""Language models by name, as `jaxfb train` uses them on rows of text; the built-in transformer is the first.

A microbatch holds `tokens`, `targets`, `segments` and `positions` i32[rows, seq] and `loss_mask` float[rows, seq]; a
row of zeros counts nothing. The loss of a model has the term "cross_entropy", whose weight is the sum of `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.models.adapted import draws, made
from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parts import MODELS
from jaxfb.refusal import instance
from jaxfb.types import LossFn, Pipelined, PyTree


@dataclass(frozen=True)
class LanguageModel:
    """A model of rows of tokens, and how its parameters begin.

    model:   a `Pipelined` or a loss function.
    init:    PRNG key -> parameters; their floats are cast to the dtype of the master copy.
    dropout: the model draws from the keys it is given.
    flops_per_token: row length -> operations of one token, forward and backward; None where they are not known.
    """

    model: Pipelined | LossFn
    init: Callable[[jax.Array], PyTree]
    dropout: bool = False
    flops_per_token: Callable[[int], float] | None = None

    def init_params(self, key: jax.Array, dtype: Any) -> PyTree:
        """Returns random parameters in a floating dtype."""

        def cast(leaf):
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(cast, self.init(key))


@dataclass(frozen=True)
class _Transformer(LanguageModel):
    """The built-in one draws its parameters in the dtype that is asked for."""

    sizes: TransformerConfig = field(kw_only=True)

    def init_params(self, key: jax.Array, dtype: Any) -> PyTree:
        return init_params(self.sizes, key, dtype)


def transformer_model(vocab_size: int, **sizes: Any) -> LanguageModel:
    """Makes the built-in transformer. sizes: the other fields of `TransformerConfig`, and `lora`."""
    config = made({"vocab_size": vocab_size, **sizes})
    init = partial(init_params, config)
    flops = partial(flops_per_token, config)
    return _Transformer(transformer(config), init, draws(config), flops, sizes=config)


def language_model(name: str, vocab_size: int, options: Mapping[str, Any]) -> LanguageModel:
    """Makes the model of a name in `jaxfb.parts.MODELS`, or of "module:function", for so many token ids.

    Raises:
      ValueError: there is no such model, or its function returns something else.
    """
    made = MODELS[name](vocab_size, **options)
    return instance(
        "the result",
        made,
        LanguageModel,
        "a jaxfb.models.language_model.LanguageModel",
        who=f"[model] {name!r}:",
    )
