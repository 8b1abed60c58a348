"""Makes one optax update from the gradients of a global batch:

unscale -> change_gradients -> finite? -> clip -> optax update (once) -> TrainState
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxfb import gradients
from jaxfb.optim.loss_scale import DynamicLossScale, StaticLossScale
from jaxfb.optim.optimizers import Optimizer, known_learning_rate
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.host_memory import constrained
from jaxfb.trainable import joined, like
from jaxfb.types import Counted, PyTree
from jaxfb.update.attempt import (
    Attempt,
    Measured,
    Trial,
    count_bad,
    exceeds,
    find_nonfinite,
    of_dtype,
    rows_count,
)
from jaxfb.update.conditional import changed_if
from jaxfb.update.extra_arguments import updated
from jaxfb.update.train_state import StepMetrics, TrainState


@dataclass(frozen=True)
class Update:
    """Applies gradients to a state. It sees whole arrays, which XLA cuts as parameters and optimizer state are cut.

    trained: parameters -> those that are trained, with None in place of each frozen one.
    counted: leaves of the parameters that no optimizer changes, or None.
    places:  NamedShardings of the states that it is applied to, as a TrainState; None until they are known.
    The other fields are arguments of `make_train_step`.
    """

    optimizer: optax.GradientTransformation
    trained: Callable[[PyTree], PyTree]
    counted: Counted | None
    max_grad_norm: float | None
    clip_convention: str
    loss_scale: DynamicLossScale | StaticLossScale | None
    count_zeros: bool
    change_gradients: Callable[[PyTree, TrainState], PyTree] | None
    places: PyTree = None

    def apply(
        self, state: TrainState, out: ForwardBackwardOutput, rows: Any, limits: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after one update by `out.grads`, and the record of it, without an unknown learning rate.

        rows:   i32[], how many rows the gradients are of.
        limits: f32[2], the largest loss and gradient norm with which it is applied; None: any.
        """
        trial = self._try(state, out, limits)
        trained, opt_state = self._changed(state, out, trial)
        params = joined(trained, state.params)
        new = self._advance(replace(state, params=params, opt_state=opt_state), trial, rows)
        new = constrained(new, self.places)
        return new, self._metrics(state, new, out, trial)

    def change(self, state: TrainState, out: ForwardBackwardOutput) -> PyTree:
        """Returns the gradients as they are measured and clipped: unscaled, then changed by the user's function."""
        grads = gradients.unscale(out.grads, out.origin.grad_scale)
        return grads if self.change_gradients is None else self.change_gradients(grads, state)

    def _try(self, state: TrainState, out: ForwardBackwardOutput, limits: Any) -> Trial:
        """Returns the update for its flags and norms alone, so that nothing of its arrays is stored.

        What is kept is computed again, in the branch where the compiler may overwrite parameters and moments.
        """
        grads, params = self.change(state, out), self.trained(state.params)
        norm, param_norm = gradients.global_norm(grads), gradients.global_norm(params)
        measured = self._measured(state, out, norm)
        counted = rows_count(out, out.origin.normalize)
        nonfinite = find_nonfinite(out.loss, grads, state.params, measured, counted)
        # The norm is nan only where a parameter is. Waiting for it too, the branch comes after every reader of the old
        # parameters, else a compiler copies them.
        applied, spike = ~nonfinite.any & counted & ~jnp.isnan(param_norm), None
        if limits is not None:
            spike = applied & exceeds(limits, out.loss, norm)
            applied = applied & ~spike
        return Trial(measured, grads, norm, param_norm, nonfinite, spike, applied)

    def _measured(self, state: TrainState, out: ForwardBackwardOutput, norm: Any) -> Measured:
        """Returns what is measured of the update before it is made."""
        return self._measure(state, self._attempt(state, out, self.change(state, out), norm))

    def _changed(self, state: TrainState, out: ForwardBackwardOutput, trial: Trial) -> tuple[PyTree, PyTree]:
        """Returns the trained parameters and the optimizer's state after the update, or as before if it is skipped."""

        def change(before):
            trained, opt_state = before
            old = replace(state, params=joined(trained, state.params), opt_state=opt_state)
            attempt = self._attempt(old, out, self.change(old, out), trial.grad_norm)
            return self._kept(old, attempt)

        return changed_if(
            trial.applied,
            change,
            (self.trained(state.params), state.opt_state),
            jax.tree.leaves(self.places)[0].mesh,
        )

    def _measure(self, state: TrainState, attempt: Attempt) -> Measured:
        rate = known_learning_rate(self.optimizer, state.opt_state, state.samples, updated=attempt.opt_state)
        bad = count_bad(self.trained(state.params), attempt.updates, attempt.params)
        return Measured(gradients.squares(attempt.updates), bad, attempt.clip_coefficient, rate)

    def _attempt(self, state: TrainState, out: ForwardBackwardOutput, grads: PyTree, norm: Any) -> Attempt:
        """Returns the one optax update of the trained leaves, made where the gradients live (under ZeRO-1 cut over
        data).

        grads: what `change` returns. norm: of all of them.
        """
        before = self.trained(state.params)
        with jax.named_scope("optimizer"):
            grads, coefficient = gradients.clip_by_global_norm(
                grads, norm, self.max_grad_norm, self.clip_convention
            )
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, before)
            more = {"samples": state.samples, "value": out.loss}
            if isinstance(self.optimizer, Optimizer):
                more["places"] = self._given_places(before)
            updates, opt_state = updated(self.optimizer, grads, state.opt_state, before, **more)
            if self.counted is not None:
                leaves = like(before, self.counted.leaves(state.params))
                updates = jax.tree.map(lambda stays, u: jnp.zeros_like(u) if stays else u, leaves, updates)
            params = optax.apply_updates(before, updates)
        if self.counted is not None and self.counted.after is not None:
            params = like(before, self.counted.after(joined(params, state.params), out.metrics))
        return Attempt(params, opt_state, updates, coefficient)

    def _given_places(self, trained: PyTree) -> PyTree:
        """Returns NamedShardings of the trained parameters that the optimizer is given; None: unknown ones."""
        return like(trained, self.places.params)

    def _kept(self, state: TrainState, attempt: Attempt) -> tuple[PyTree, PyTree]:
        """Returns the parameters and the optimizer's state after an applied attempt, of the dtypes of before."""
        old = (self.trained(state.params), state.opt_state)
        new = jax.tree.map(of_dtype, (attempt.params, attempt.opt_state), old)
        return jax.lax.with_sharding_constraint(
            new, (like(old[0], self.places.params), self.places.opt_state)
        )

    def _advance(self, state: TrainState, trial: Trial, rows: Any) -> TrainState:
        """Returns the state with the counters and the loss scale after this attempt; a spike leaves them all alone."""
        applied, failed = trial.applied, trial.nonfinite.any
        empty = ~failed & ~applied
        scale = state.loss_scale
        if self.loss_scale is not None and scale is not None:
            scale = self.loss_scale.update(scale, jnp.isfinite(trial.grad_norm))
        if (spike := trial.spike) is not None:
            empty = empty & ~spike
            scale = jax.tree.map(lambda new, old: jnp.where(spike, old, new), scale, state.loss_scale)
        return replace(
            state,
            step=state.step + applied.astype(jnp.int32),
            samples=state.samples + jnp.where(applied, rows, 0),
            nonfinite_updates=state.nonfinite_updates + failed.astype(jnp.int32),
            zero_weight_updates=state.zero_weight_updates + empty.astype(jnp.int32),
            loss_scale=scale,
        )

    def _metrics(
        self, old: TrainState, new: TrainState, out: ForwardBackwardOutput, trial: Trial
    ) -> StepMetrics:
        measured, norm, scale = trial.measured, trial.grad_norm, out.origin.grad_scale
        return StepMetrics(
            step=old.step,
            loss=out.loss,
            terms={name: term.value for name, term in out.terms.items()},
            weights={name: term.weight for name, term in out.terms.items()},
            metrics={name: metric.value for name, metric in out.metrics.items()},
            grad_norm=norm,
            clipped_grad_norm=norm * measured.clip_coefficient,
            clip_coefficient=measured.clip_coefficient,
            param_norm=trial.param_norm,
            update_norm=jnp.where(trial.applied, gradients.norm_of(measured.squares), 0),
            learning_rate=cast(Any, measured.learning_rate),  # the step fills in one that is unknown
            loss_scale=jnp.float32(1) if scale is None else scale,
            skipped=~trial.applied,
            nonfinite=trial.nonfinite,
            nonfinite_updates=new.nonfinite_updates,
            zero_weight_updates=new.zero_weight_updates,
            num_zeros=gradients.num_zeros(trial.grads) if self.count_zeros else None,
            spike=trial.spike,
        )
