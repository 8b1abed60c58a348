"""The registries of what a config picks by name, and where the built-in parts are defined. No jax is imported.

A new built-in part is one file and its line here; the registry of schedules is `jaxfb.schedules.KINDS`. A part of one's
own registers itself with a decorator, `@SURROGATES.register("mine")`, in a module that `plugins:` of a config names, or
is written "package.module:attribute". docs/extending.md gives an example of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxfb.registry import Registry

_OPTIMIZERS, _RATES = "jaxfb.optim.optimizers", "jaxfb.optim.learning_rate"
_SURROGATES, _ESTIMATORS = "jaxfb.losses.surrogates", "jaxfb.losses.estimators"
_PREFERENCES, _HEADS = "jaxfb.losses.preference", "jaxfb.forward_backward.head_placement"
_WRITERS = "jaxfb.metrics.writers"


def _all_of(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


MODELS: Registry[Callable[..., Any]] = Registry(
    "model", {"transformer": "jaxfb.models.language_model:transformer_model"}
)
"""`(vocab_size, **options) -> jaxfb.models.language_model.LanguageModel`, for `jaxfb train` on text."""

OPTIMIZERS: Registry[Callable[..., Any]] = Registry(
    "optimizer",
    _all_of(_OPTIMIZERS, "adamw", "lion")
    | {"adafactor": "jaxfb.optim.adafactor:adafactor", "muon": "jaxfb.optim.muon:muon"}
    | _all_of(_OPTIMIZERS, "sgd"),
)
"""`(**hyperparameters) -> optax transformation` whose updates are the directions, as `optax.scale_by_adam` is.

`jaxfb.make_optimizer` adds weight decay and the learning rate."""

LEARNING_RATES: Registry[Callable[..., Any]] = Registry(
    "learning-rate schedule",
    _all_of(_RATES, "constant", "linear", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt", "wsd"),
)
"""`(span, **options) -> fall`, the rate after the warmup as a function of the count.

span: see `jaxfb.optim.learning_rate.Span`."""

SURROGATES: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    {
        "ppo": f"{_SURROGATES}:PPOClip",
        "gspo": f"{_SURROGATES}:GSPO",
        "geo_mean": f"{_SURROGATES}:GeometricMean",
        "cispo": f"{_SURROGATES}:CISPO",
        "sapo": f"{_SURROGATES}:SAPO",
        "reinforce": f"{_SURROGATES}:Reinforce",
        "gpg": f"{_SURROGATES}:Reinforce",
        "dppo": f"{_SURROGATES}:DPPO",
        "dro": f"{_SURROGATES}:DRO",
    },
)
"""A function `(tokens, sequences) -> (loss per token, metrics)`, or a dataclass of settings whose instances are one."""

ESTIMATORS: Registry[Any] = Registry(
    "advantage estimator",
    _all_of(
        _ESTIMATORS,
        *("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus"),
        *("reinforce_plus_plus_baseline", "remax", "gae"),
    ),
)
"""`(rewards [R], groups [R], mask [R, S]) -> advantages [R, S]` in numpy, or a `losses.estimators.Estimator`."""

PREFERENCES: Registry[Callable[..., Any]] = Registry(
    "preference loss", _all_of(_PREFERENCES, "sigmoid", "ipo", "hinge", "robust")
)
"""`(h, settings) -> loss` of each pair, in jax.numpy; settings: the `losses.preference.PreferenceLoss`."""

HEADS: Registry[Any] = Registry(
    "head placement",
    {
        "vocabulary": f"{_HEADS}:VocabularyPlacement",
        "rows": f"{_HEADS}:RowsPlacement",
        "last": f"{_HEADS}:LastPlacement",
    },
)
"""Subclasses of `forward_backward.head_placement.HeadPlacement`: how a pipeline's devices share embedding and head."""

WRITERS: Registry[Callable[..., Any]] = Registry(
    "writer", {"tensorboard": f"{_WRITERS}:tensorboard", "wandb": f"{_WRITERS}:WandbWriter"}
)
"""`(directory, config, resume) -> metrics.Writer`: where records go beside metrics.jsonl."""
