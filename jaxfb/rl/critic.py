"""The critic: a second model that predicts, at each token, the return that is still to come.

It is updated on the same rows as the policy, through the same engine, by its own optimizer and with a plan of purpose
"critic"; its forward pass over a rollout has the plan of purpose "value".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax

from jaxfb.batch_plan import BatchPlan
from jaxfb.config.post_training import RLConfig
from jaxfb.losses.value import ValueLoss, critic_params, value_fn, value_loss_fn
from jaxfb.metrics import arrays, scalars
from jaxfb.models.adapted import adapted
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.optim import make_optimizer
from jaxfb.rl.rows import Rows, cut
from jaxfb.rl.start import Base, check_packing
from jaxfb.training.from_config.dtypes import param_dtype
from jaxfb.training.from_config.options import step_options
from jaxfb.training.guard import CriticAbort, SkipGuard
from jaxfb.types import Pipelined
from jaxfb.update.train_state import TrainState
from jaxfb.update.train_step import make_train_step

PyTree = Any
SEED = 1  # folded into the run's, so that a random critic is not the random policy


class Critic:
    """A value model, its state, and its update. `plan`: of purpose "critic", the rows of an update.

    It has no adapters, whatever the policy has: all of it is trained. say: receives a sentence for each of its updates
    that is skipped; the work sets it.
    """

    def __init__(self, base: Base[RLConfig], plan: BatchPlan):
        plan.require("critic", caller="Critic")
        config = base.config
        settings = config.critic
        assert settings is not None  # a config without one has no critic
        self._base, self._settings, self.plan = base, settings, plan
        check_packing(config, self._sizes, plan)
        options: dict[str, Any] = {**step_options(config), "trainable": None}
        self.step = make_train_step(
            value_loss_fn(self._model, ValueLoss(self._settings.clip)),
            make_optimizer("adamw", learning_rate=self._settings.learning_rate),
            base.mesh,
            plan,
            max_grad_norm=self._settings.max_grad_norm,
            dropout=base.sizes.dropout > 0,
            **options,
        )
        self.forward_model = value_fn(self._model)
        self.state: TrainState = None  # type: ignore[assignment]
        self.say: Callable[[str], None] = print

    def start(self, policy: PyTree, seed: int) -> None:
        """Makes a fresh state: the policy's layers, or random ones; the head is zero either way."""
        key = jax.random.fold_in(jax.random.key(seed), SEED)
        if self._settings.start == "policy":
            self.state = self.step.init(critic_params(self._base.whole(policy)), key)
        else:
            self.state = self.step.init(self._random, key)

    def update(self, number: int, rows: Rows) -> dict[str, Any]:
        """Runs one update on the rows of the policy's update `number` (from 0), cut by the critic's plan.

        Returns:
          Its numbers by name.
        Raises:
          CriticAbort: as many updates in a row as `run.max_nonfinite` were not finite.
        """
        batch, _ = cut(rows, self.plan)
        self.state, metrics = self.step(self.state, batch)
        metrics = jax.device_get(metrics)
        self._skips.check(number + 1, metrics)
        # of a model with experts some are arrays, such as the load of each expert of each layer
        named = scalars(metrics.metrics) | arrays(metrics.metrics)
        found = {f"critic/{name}": value for name, value in named.items()}
        norms = {"critic/loss": float(metrics.loss), "critic/grad_norm": float(metrics.grad_norm)}
        return {**found, **norms, "critic/skipped": bool(metrics.skipped)}

    def abstract_state(self) -> TrainState:
        """Returns the state as shapes, dtypes and shardings."""
        return self.step.abstract_state(self._random)

    def _random(self, key: jax.Array) -> PyTree:
        return critic_params(init_params(self._sizes, key, param_dtype(self._base.config)))

    @cached_property
    def _skips(self) -> SkipGuard:
        params = jax.eval_shape(self._random, jax.random.key(0))
        named = {"whose": "the critic", "error": CriticAbort}
        return SkipGuard.of(self._base.config, params, lambda text: self.say(text), **named)

    @cached_property
    def _sizes(self) -> TransformerConfig:
        # tied: there is no matrix of logits to carry along
        return replace(adapted(self._base.sizes, None), tied_embeddings=True)

    @cached_property
    def _model(self) -> Pipelined:
        return transformer(self._sizes)
