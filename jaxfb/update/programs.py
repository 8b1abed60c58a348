"""Computes the two parts of an update, gradients and what is made of them, on states in any order of layers.

differentiate: batch -> forward_backward -> gradients of the global batch
apply:         gradients -> unscale -> finite? -> clip -> optax update (once) -> TrainState
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxfb.batch_plan import BatchPlan
from jaxfb.output import ForwardBackwardOutput
from jaxfb.types import PyTree
from jaxfb.update.apply import Update
from jaxfb.update.pipeline_state import closed, counted_in, opened
from jaxfb.update.states import StepStates
from jaxfb.update.train_state import StepMetrics, TrainState


class Programs:
    """Computes what a step traces, by pure functions of arrays.

    states: where they live, and the engine. dropout: whether the model is given PRNG keys. change: the update.
    """

    def __init__(self, states: StepStates, dropout: bool, change: Update):
        self._states, self._dropout, self.change = states, dropout, change

    def differentiate(
        self, state: TrainState, batch: PyTree, keys: Any, weights: Any, model: Any, plan: BatchPlan
    ) -> ForwardBackwardOutput:
        """Returns loss and gradients, whose layers are in the order in which the state stores them."""
        stored, order = opened(state)
        fb, params = self._states.forward_backward, stored.params
        in_place = order is not None and order == fb.order_of_layers(order.layout.num_layers, plan)
        if in_place:
            fb = replace(fb, options=replace(fb.options, layer_order="pipeline"))
        elif order is not None:
            params = order.to_model(params)
        rng = self.key_of(stored) if keys is None else keys
        scale = 1.0 if stored.loss_scale is None else stored.loss_scale.scale
        out = fb(model, params, batch, plan, rng, grad_scale=scale, weights=weights)
        return out if in_place or order is None else replace(out, grads=order.to_pipeline(out.grads))

    def apply(
        self, state: TrainState, out: ForwardBackwardOutput, rows: Any, limits: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies gradients whose layers are in the order in which the state stores them."""
        stored, order = opened(state)
        places = opened(self._states.state_shardings(state))[0]
        change = replace(self.change, counted=counted_in(order, self.change.counted), places=places)
        new, metrics = change.apply(stored, out, rows, limits)
        if order is not None and metrics.num_zeros is not None:
            empty = order.empty(self._states.forward_backward.trained(stored.params))
            metrics = replace(metrics, num_zeros=metrics.num_zeros - empty)
        return closed(new, order), metrics

    def differentiate_in_model_order(self, state: TrainState, *call: Any) -> ForwardBackwardOutput:
        """Returns what `differentiate` returns, with gradients in the model's order."""
        out, order = self.differentiate(state, *call), opened(state)[1]
        return out if order is None else replace(out, grads=order.to_model(out.grads))

    def apply_in_model_order(
        self, state: TrainState, out: ForwardBackwardOutput, rows: Any
    ) -> tuple[TrainState, StepMetrics]:
        """Applies gradients in the model's order."""
        order = opened(state)[1]
        out = out if order is None else replace(out, grads=order.to_pipeline(out.grads))
        return self.apply(state, out, rows)

    def key_of(self, state: TrainState) -> jax.Array | None:
        """Returns the PRNG key of the next update, None without dropout."""
        return jax.random.fold_in(state.rng, state.attempts) if self._dropout else None
