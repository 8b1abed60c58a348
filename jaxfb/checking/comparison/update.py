"""Compares optimizer updates: one, and a second that may have to leave everything alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxfb.checking.comparison import tolerance
from jaxfb.checking.comparison.difference import Difference, compare
from jaxfb.checking.comparison.optimizers import OneUpdate, Update, optimizer_of
from jaxfb.checking.comparison.reference import Answer, OneDevice, keys_of_rows, values_of
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.toy_models import arguments
from jaxfb.checking.toy_models.problem import Problem
from jaxfb.update.train_state import StepMetrics, TrainState
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any


def differences_of_updates(case: Case, problem: Problem) -> list[Difference]:
    """Compares parameters, optimizer state and `StepMetrics` after one update or two."""
    updates = _Updates(case, problem)
    with jax.enable_x64(case.x64):
        step, params = _step(case, problem), arguments.params_as_called(case, problem.params)
        state = step.init((lambda key: params) if case.call == "jit" else params, rng=case.data_seed)
    found = [_exactly("caller's parameters", jax.device_get(params), problem.params)]
    state, more = updates.compare(step, state, problem.batch)
    if case.second != "none":
        _, others = updates.compare(step, state, arguments.second_batch(case, problem.batch))
        more += [replace(one, quantity=f"second {one.quantity}") for one in others]
    return [*found, *more, _exactly("caller's parameters", jax.device_get(params), problem.params)]


class _Updates:
    def __init__(self, case: Case, problem: Problem):
        self._case = case
        self._one_device = OneDevice(case, problem.model, self._keys)
        self._update = OneUpdate(case, tolerance.of_gradients(case))

    def compare(
        self, step: TrainStep, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, list[Difference]]:
        """Returns the state after one more update, and how it differs from what one device makes of the same state."""
        case, before = self._case, jax.device_get(_plain(state))
        with jax.enable_x64(case.x64):
            state, metrics = step(state, arguments.batch_as_called(case, batch))
            after, metrics = jax.device_get((_plain(state), metrics))
        want = self._one_device(before.params, batch, before.attempts)
        if not want.counts or not _finite(want.grads):
            return state, [_skips(metrics, True), *_unchanged(before, after)]
        update = self._update(want.grads, before.opt_state, before.params)
        return state, [_skips(metrics, False), *self._applied(before, after, metrics, want, update)]

    def _keys(self, attempt: jax.Array) -> jax.Array | None:
        """Returns the keys of the rows, as documented: the run's key folded with the attempt, then with the row."""
        if self._case.rng == "none":
            return None
        key = jax.random.fold_in(jax.random.key(self._case.data_seed), attempt)
        return keys_of_rows(key, self._case.real_rows)

    def _applied(
        self, before: TrainState, after: TrainState, metrics: StepMetrics, want: Answer, update: Update
    ) -> list[Difference]:
        case, allowed = self._case, tolerance.of_gradients(self._case)
        found = [
            *self._reported(metrics, want),
            _near("parameters", after.params, update.params, update.slack[0], allowed, old=before.params),
            _near("optimizer state", after.opt_state, update.opt_state, update.slack[1], allowed),
            _exactly("counters", _counters(after), _counters(before, applied=1, rows=case.real_rows)),
        ]
        norms = ("grad_norm", "clipped_grad_norm")
        return found + [
            compare(name, getattr(metrics, name), getattr(update, name), 4 * allowed) for name in norms
        ]

    def _reported(self, metrics: StepMetrics, want: Answer) -> list[Difference]:
        """Compares what the step reports about the loss: its value, the terms', and the metrics'."""
        values = tolerance.of_values(self._case)
        ours = {"loss": metrics.loss, **metrics.terms}
        theirs = {"loss": want.loss, **values_of(want.terms)}
        measured = values_of(want.metrics)
        return [
            compare("loss of the step", ours, theirs, values, floor=0.1),
            compare("metrics of the step", metrics.metrics, measured, values, floor=1e-6),
        ]


def _step(case: Case, problem: Problem) -> TrainStep:
    return make_train_step(
        problem.model,
        optimizer_of(case.optimizer),
        arguments.mesh_of(case),
        arguments.plan_of(case),
        loss_scale=arguments.LOSS_SCALES[case.loss_scale],
        dropout=case.rng != "none",
        **case.step_options(),
        **arguments.engine_options(case),
    )


def _plain(state: TrainState) -> TrainState:
    """Returns the state without its key, of which numpy has no kind."""
    return replace(state, rng=None)


def _near(
    quantity: str, got: PyTree, want: PyTree, slack: PyTree, allowed: float, old: PyTree = None
) -> Difference:
    """Compares number by number; what is allowed is measured by how far a leaf moved from `old`, if that is given.

    Beyond it, each number may be off by its own rounding and by `slack`.
    """
    moved = None if old is None else jax.tree.map(_minus, want, old)
    rounding = jax.tree.map(lambda slip, leaf: np.asarray(slip, np.float64) + _rounding(leaf), slack, want)
    return compare(quantity, got, want, allowed, slack=rounding, measured_by=moved)


def _minus(new: Any, old: Any) -> np.ndarray:
    return np.asarray(new, np.float64) - np.asarray(old, np.float64)


def _rounding(leaf: Any) -> np.ndarray:
    """Returns four units in the last place of each number; nothing for integers."""
    leaf = np.asarray(leaf)
    epsilon = tolerance.EPSILON.get(str(leaf.dtype), 0.0)
    return 4 * epsilon * np.abs(np.asarray(leaf, np.float64))


def _skips(metrics: StepMetrics, expected: bool) -> Difference:
    return _exactly("skipped", np.asarray(metrics.skipped), np.asarray(expected))


def _unchanged(before: TrainState, after: TrainState) -> list[Difference]:
    """Checks that a skipped update leaves parameters and optimizer state alone, bit for bit, and is counted."""
    return [
        _exactly("parameters after a skipped update", after.params, before.params),
        _exactly("optimizer state after a skipped update", after.opt_state, before.opt_state),
        _exactly("counters after a skipped update", _counters(after), _counters(before, skipped=1)),
    ]


def _exactly(quantity: str, got: PyTree, want: PyTree) -> Difference:
    return compare(quantity, got, want, 0.0)


def _counters(state: TrainState, applied: int = 0, rows: int = 0, skipped: int = 0) -> dict[str, np.ndarray]:
    """Returns the counts of updates, rows and skipped updates, so many more than in the state."""
    skips = state.nonfinite_updates + state.zero_weight_updates
    counts = {"step": state.step + applied, "samples": state.samples + rows, "skipped": skips + skipped}
    return {name: np.asarray(count) for name, count in counts.items()}


def _finite(tree: PyTree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
