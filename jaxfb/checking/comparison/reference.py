"""Computes all rows at once on one device, in float64, by plain `jax.value_and_grad`: no engine in it.

A `Pipelined` is embed, a Python loop over layers, head. Row r's key is `fold_in(key, r)`, layer i's that folded with i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.toy_models import arguments
from jaxfb.checking.toy_models.problem import Problem
from jaxfb.types import LossFn, LossOutput, Pipelined, Sum

PyTree = Any
Rows = tuple[PyTree, jax.Array | None]
"""A batch, and one key a row or None."""
Keys = Callable[[jax.Array], jax.Array | None]
"""Makes the keys of the rows for an attempt, one a row; None where the case draws nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Answer:
    """Collects the numbers of a whole global batch; numpy arrays once they have left the program.

    loss, grads, terms, metrics, outputs: as in `ForwardBackwardOutput`; a term under normalize="microbatch" is
      Sum(mean of means, 1). grads is None with forward_only.
    per_microbatch: name -> Sum of [num_microbatches], every term.
    metrics_of_microbatches: for each of them, name -> metric.
    counts: whether any row counts anything; if not, an update is skipped.
    """

    loss: np.ndarray | jax.Array
    terms: Mapping[str, Sum]
    grads: PyTree
    metrics: Mapping[str, Any]
    per_microbatch: dict[str, Sum]
    metrics_of_microbatches: list[dict[str, Any]]
    outputs: PyTree
    counts: bool


class OneDevice:
    """Computes a case on one device; all of it is one program, compiled once for any parameters, rows and attempt.

    wide: whether to compute in float64, with parameters rounded as the case has them, or in the case's own dtypes.
    """

    def __init__(self, case: Case, model: LossFn | Pipelined, keys: Keys, wide: bool = True):
        self._case, self._model, self._keys = case, model, keys
        self._widened = _wide if wide else jnp.asarray
        self._program = jax.jit(self._computed)

    def __call__(self, params: PyTree, batch: PyTree, attempt: int = 0) -> Answer:
        """Returns the answer for parameters and rows as the engine gets them; attempt: the one that keys are of."""
        rows = jax.tree.map(lambda leaf: np.asarray(leaf)[: self._case.real_rows], batch)
        with jax.enable_x64(True):
            answer, weights, metrics = jax.device_get(self._program(params, rows, np.int32(attempt)))
        counts = any(weight is None or bool(weight != 0) for weight in weights.values())
        number = len(jax.tree.leaves(answer.per_microbatch)[0])
        parts = [jax.tree.map(lambda leaf, part=part: leaf[part], metrics) for part in range(number)]
        return replace(answer, counts=counts, metrics_of_microbatches=parts)

    def _computed(self, params: PyTree, batch: PyTree, attempt: jax.Array) -> tuple[Answer, dict, dict]:
        """Traces the program: an answer without what the host fills in, terms' weights, metrics of microbatches."""
        case = self._case
        params = jax.tree.map(self._as_computed, params)
        keys = self._keys(attempt)
        rows = jax.tree.map(self._widened, batch), None if keys is None else keys[: case.real_rows]
        if case.normalize == "microbatch":
            out = whole(self._model, params, *rows)
            loss, terms, grads = self._mean_of_means(params, rows)
        else:
            out, loss, grads = self._differentiated(params, rows)
            terms = out.terms
        per_microbatch, metrics = self._microbatches(params, rows, out)
        weights = {name: term.weight for name, term in out.terms.items()}
        return (
            Answer(loss, terms, grads, out.metrics, per_microbatch, [], out.outputs, False),
            weights,
            metrics,
        )

    def _differentiated(self, params: PyTree, rows: Rows) -> tuple[LossOutput, jax.Array, PyTree]:
        """Returns (what the model answers, loss, gradient) of some rows."""
        if self._case.forward_only:
            loss, out = self._objective(params, *rows)
            return out, loss, None
        (loss, out), grads = jax.value_and_grad(self._objective, has_aux=True)(params, *rows)
        return out, loss, grads

    def _mean_of_means(self, params: PyTree, rows: Rows) -> tuple[jax.Array, dict[str, Sum], PyTree]:
        """Returns (loss, terms, gradient), each replica's microbatch divided by its own weights."""

        def of_part(part):
            out, loss, grads = self._differentiated(params, part)
            return loss, {name: self._value(term) for name, term in out.terms.items()}, grads

        parts = _over_parts(of_part, rows, self._case.rows_per_microbatch)
        loss, values, grads = jax.tree.map(lambda leaf: leaf.sum(0), parts)
        return loss, {name: Sum(value, jnp.ones(())) for name, value in values.items()}, grads

    def _microbatches(self, params: PyTree, rows: Rows, out: LossOutput) -> tuple[dict, dict]:
        """Returns the terms and metrics of the microbatches, [microbatches, ...] each."""

        def of_part(part):
            out = whole(self._model, params, *part)
            return out.terms, out.metrics

        if self._case.num_microbatches == 1:
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (out.terms, out.metrics))
        return _over_parts(of_part, rows, self._case.rows_per_global_microbatch)

    def _objective(self, params: PyTree, rows: PyTree, keys: Any) -> tuple[jax.Array, LossOutput]:
        """Returns what some rows add to the loss, and the model's answer."""
        out = whole(self._model, params, rows, keys)
        return sum((self._value(term) for term in out.terms.values()), jnp.zeros(())), out

    def _value(self, term: Sum) -> jax.Array:
        """Returns what a term adds to the loss."""
        if self._case.normalize == "none":
            return term.total
        averaged = self._case.normalize == "microbatch" and term.weight is not None
        return _divided(term) / (self._case.num_microbatches * self._case.data_parallel if averaged else 1)

    def _as_computed(self, leaf: Any) -> jax.Array:
        """Rounds a parameter to the dtype that the case computes in."""
        return self._widened(jnp.asarray(leaf).astype(self._case.compute_dtype or leaf.dtype))


def answer_of(case: Case, problem: Problem, wide: bool = True) -> Answer:
    """Returns the answer to one call for the gradients of a case."""
    keys = lambda attempt: keys_of_rows(arguments.rng_of(case), case.real_rows)  # noqa: E731
    return OneDevice(case, problem.model, keys, wide)(problem.params, problem.batch)


def _over_parts(function: Callable, rows: Rows, size: int) -> PyTree:
    """Returns `function` of each part of so many rows, stacked; the last may be shorter, and none is empty."""
    number, rest = divmod(len(jax.tree.leaves(rows)[0]), size)
    parts = []
    if number:
        cut = jax.tree.map(lambda x: x[: number * size].reshape(number, size, *x.shape[1:]), rows)
        parts.append(lax.map(function, cut))
    if rest:
        last = function(jax.tree.map(lambda x: x[number * size :], rows))
        parts.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], last))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def whole(model: LossFn | Pipelined, params: PyTree, rows: PyTree, keys: jax.Array | None) -> LossOutput:
    """Returns the model's answer for all rows; the terms of a `Pipelined`'s layers are added, their metrics stacked."""
    if not isinstance(model, Pipelined):
        return _as_output(model(params, rows, keys))
    outer = {name: value for name, value in params.items() if name != "layers"}
    hidden, answers = model.embed(outer, rows, keys), []
    for index in range(len(jax.tree.leaves(params["layers"])[0])):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        layer_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        hidden, answer = _of_layer(model.layer(weights, hidden, rows, layer_keys))
        answers.append(answer)
    out = _as_output(model.head(outer, hidden, rows, keys))
    terms = {name: reduce(add, [a.terms[name] for a in answers]) for name in answers[0].terms}
    metrics = {name: _stacked([a.metrics[name] for a in answers]) for name in answers[0].metrics}
    return LossOutput({**out.terms, **terms}, {**out.metrics, **metrics}, out.outputs)


def keys_of_rows(rng: jax.Array | None, rows: int) -> jax.Array | None:
    """Returns one key a row, keys[rows], as documented: `fold_in(rng, row)`, or rng itself if it is one a row."""
    if rng is None:
        return None
    new_style = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    key: jax.Array = rng if new_style else jax.random.wrap_key_data(rng)
    return key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


def value_of(metric: Any) -> np.ndarray:
    """Returns what is reported of a Sum, Max, Min or Last."""
    if not isinstance(metric, Sum):
        return np.asarray(metric.array)
    if metric.weight is None:
        return np.asarray(metric.total)
    total, weight = np.broadcast_arrays(np.asarray(metric.total), np.asarray(metric.weight))
    return np.where(weight != 0, total / np.where(weight != 0, weight, 1), 0.0)


def values_of(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns what is reported of each."""
    return {name: value_of(metric) for name, metric in metrics.items()}


def _as_output(out: Any) -> LossOutput:
    return LossOutput({"loss": out}) if isinstance(out, Sum) else out


def _of_layer(out: Any) -> tuple[PyTree, LossOutput]:
    answer = out[1] if isinstance(out, tuple) and len(out) == 2 else None
    if isinstance(answer, LossOutput):
        return out
    if isinstance(answer, dict) and all(isinstance(term, Sum) for term in answer.values()):
        return out[0], LossOutput(answer)
    return out, LossOutput({})


def _divided(term: Sum) -> jax.Array:
    if term.weight is None:
        return term.total
    counts = jnp.asarray(term.weight) != 0
    return jnp.where(counts, term.total / jnp.where(counts, term.weight, 1), 0)


def _stacked(sums: list[Sum]) -> Sum:
    """Stacks sums of equal shapes along a further first dim."""
    totals = jnp.stack([jnp.asarray(one.total) for one in sums])
    if sums[0].weight is None:
        return Sum(totals, None)
    return Sum(
        totals, jnp.stack([jnp.broadcast_to(jnp.asarray(one.weight), totals.shape[1:]) for one in sums])
    )


def _wide(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
