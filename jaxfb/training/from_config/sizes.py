"""Makes the model of a config: its sizes, its name, its parameters as shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxfb.config import Config, load_config
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.models.adapted import adapted
from jaxfb.models.attention import check_backend
from jaxfb.models.config import TransformerConfig
from jaxfb.models.language_model import LanguageModel, language_model
from jaxfb.models.lora import all_layers, check_targets
from jaxfb.models.transformer import init_params
from jaxfb.refusal import Refused
from jaxfb.trainable import stored
from jaxfb.training.from_config.dtypes import AnyConfig, param_dtype
from jaxfb.training.run_dir import RunDirectory

PyTree = Any
POST_TRAINING = ("post-training", "train it with jaxfb.Trainer")
VOCAB_MULTIPLE = (
    128  # the vocabulary is rounded up, so that its size does not depend on the mesh that cuts it
)
Sizes = TypeVar("Sizes", bound=TransformerConfig)


def model_sizes(
    config: Config | PostTrainingConfig, vocab_size: int, fresh: bool = False
) -> TransformerConfig | OwnModelConfig:
    """Returns the transformer's sizes: the config's vocabulary, or the tokenizer's rounded up to a multiple of 128.

    A post-training config without a model has that of the run it starts from; fresh: as for `config_with_model`.

    Raises:
      ValueError: the config's vocabulary is smaller than the tokenizer's.
    """
    if isinstance(config, PostTrainingConfig) and config.model is None:
        sizes = model_sizes(config_with_model(config, fresh), vocab_size)
        return with_lora(config, adapted(built_in(sizes, *POST_TRAINING), None))
    assert config.model is not None  # a config of pretraining has one
    rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if config.model.vocab_size is not None and config.model.vocab_size < vocab_size:
        if (source := getattr(config.model, "from_", None)) is not None:
            raise Refused(
                f"[model] the model of {source} has {config.model.vocab_size} ids, fewer than the {vocab_size} of the "
                "tokenizer; put the model's own tokenizer.json into that directory"
            )
        raise Refused(
            f"[model] vocab_size={config.model.vocab_size} is below the {vocab_size} ids of the tokenizer; "
            f"use {rounded}, or leave it out",
            [{"model.vocab_size": rounded}, {"model.vocab_size": None}],
        )
    return with_lora(config, config.model.sized(rounded))


def config_with_model(config: Any, fresh: bool = False) -> Any:
    """Returns the config, or that of the run that it starts from, which may have started from one: the first one with a
    section `model`.

    A run keeps a copy of it, which counts once it is saved: by then another run may lie where it started from.

    fresh: a run begins, whatever is saved in its directory.

    Raises:
      ValueError: there is neither that run nor a copy.
    """
    while config.model is None:
        own, start = RunDirectory.of(config), config.start.run
        keeps = (
            not fresh and own.first_config.is_file() and (own.began_as(config) or not Path(start).is_dir())
        )
        config, fresh = load_config(own.first_config if keeps else start), False
    return config


def with_lora(
    config: Config | PostTrainingConfig, sizes: TransformerConfig | OwnModelConfig
) -> TransformerConfig | OwnModelConfig:
    """Returns the sizes with the adapters of the config.

    Raises:
      ValueError: a target of theirs is not a projection of the model.
    """
    lora = getattr(config, "lora", None)
    if lora is None:
        return sizes
    own = built_in(sizes, "lora", "leave it out")
    check_targets(lora, all_layers(jax.eval_shape(lambda: init_params(own, jax.random.key(0)))))
    return adapted(own, lora)


def built_in(sizes: Sizes | OwnModelConfig, what: str, instead: str) -> Sizes:
    """Returns the sizes of the built-in transformer; refuses what only it can do for a model of the user's own."""
    if isinstance(sizes, OwnModelConfig):
        raise Refused(
            f"[model] name={sizes.name!r}: {what} works for the built-in transformer alone; {instead}"
        )
    return sizes


def language_model_of(sizes: TransformerConfig | OwnModelConfig) -> LanguageModel:
    """Returns the model of these sizes, or the one of the user's own that they name."""
    if isinstance(sizes, OwnModelConfig):
        return language_model(sizes.name, sizes.vocab_size or 0, sizes.options)
    options = dict(vars(sizes))
    return language_model("transformer", options.pop("vocab_size"), options)


def abstract_params(config: AnyConfig, sizes: TransformerConfig | OwnModelConfig) -> PyTree:
    """Returns the parameters as shapes and dtypes, on no device in particular."""
    made, dtype = language_model_of(sizes), param_dtype(config)
    return jax.eval_shape(lambda: as_stored(config, made.init_params(jax.random.key(0), dtype)))


def as_stored(config: AnyConfig, params: PyTree) -> PyTree:
    """Returns the parameters in the dtypes of the config: frozen ones may have one of their own.

    Raises:
      ValueError: a pattern of `trainable` is the name of none.
    """
    return stored(trained_patterns(config), params, config.precision.frozen_dtype)


def check_attention(config: Config, sizes: TransformerConfig, mesh: Mesh) -> None:
    """Raises ValueError where `model.attention` cannot run on rows of this length, in this dtype, on this mesh."""
    dtype, packed = jnp.dtype(config.precision.compute_dtype), config.data.packing != "stream"
    check_backend(sizes, mesh, dtype, config.data.sequence_length, packed=packed)
