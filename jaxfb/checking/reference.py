"""Computes all rows at once on one device, in float64, by plain `jax.value_and_grad`: no engine in it.

A `Pipelined` is embed, a Python loop over layers, head. Row r's key is `fold_in(key, r)`, layer i's that folded with i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.checking.case import Case
from jaxfb.types import LossFn, LossOutput, Pipelined, Sum

PyTree = Any


@dataclass(frozen=True)
class Answer:
    """Collects the numbers of a whole global batch; numpy arrays.

    loss, grads, terms, metrics, outputs: as in `ForwardBackwardOutput`; a term under normalize="microbatch" is
      Sum(mean of means, 1).
    per_microbatch: name -> Sum of [num_microbatches], every term.
    metrics_of_microbatches: for each of them, name -> metric.
    counts: whether any row counts anything; if not, an update is skipped.
    """

    loss: np.ndarray
    terms: dict[str, Sum]
    grads: PyTree
    metrics: dict[str, Any]
    per_microbatch: dict[str, Sum]
    metrics_of_microbatches: list[dict[str, Any]]
    outputs: PyTree
    counts: bool


class OneDevice:
    """Computes a case on one device; called again with other parameters or rows, it compiles nothing."""

    def __init__(self, case: Case, model: LossFn | Pipelined):
        self._case = case
        self._forward = jax.jit(lambda params, rows, keys: whole(model, params, rows, keys))
        self._gradient = jax.jit(jax.value_and_grad(self._objective(model), has_aux=True))

    def __call__(self, params: PyTree, batch: PyTree, keys: jax.Array | None) -> Answer:
        """Returns the answer for parameters and rows as the engine gets them; keys: one a row, or None."""
        case = self._case
        with jax.enable_x64(True):
            params = jax.tree.map(self._as_computed, params)
            batch = jax.tree.map(_wide, batch)
            out = self._forward(params, *_rows(batch, keys, 0, case.real_rows))
            loss, grads, terms = self._differentiated(params, batch, keys)
            rows = self._parts(batch, keys, case.rows_per_global_microbatch, case.num_microbatches)
            parts = [self._forward(params, *part) for part in rows]
            per_microbatch = {name: _stacked([part.terms[name] for part in parts]) for name in out.terms}
            metrics = [part.metrics for part in parts]
            out, per_microbatch, metrics = jax.device_get((out, per_microbatch, metrics))
        counts = any(term.weight is None or bool(term.weight != 0) for term in out.terms.values())
        return Answer(
            loss, terms or out.terms, grads, out.metrics, per_microbatch, metrics, out.outputs, counts
        )

    def _differentiated(self, params: PyTree, batch: PyTree, keys: Any) -> tuple[Any, PyTree, dict]:
        """Returns (loss, gradient, terms if they are means of means)."""
        case = self._case
        if case.normalize != "microbatch":
            (loss, _), grads = self._gradient(params, *_rows(batch, keys, 0, case.real_rows))
            return *jax.device_get((loss, grads)), {}
        number = case.num_microbatches * case.data_parallel
        parts = self._parts(batch, keys, case.rows_per_microbatch, number)
        found = [jax.device_get(self._gradient(params, *part)) for part in parts]
        added = jax.tree.map(lambda *leaves: sum(leaves), *found)
        (loss, values), grads = added
        return loss, grads, {name: Sum(value, np.ones(())) for name, value in values.items()}

    def _objective(self, model: LossFn | Pipelined) -> Callable:
        """Makes a function of some rows: what they add to the loss, and what each term adds."""
        number = self._case.num_microbatches * self._case.data_parallel

        def objective(params, rows, keys):
            values = {}
            for name, term in whole(model, params, rows, keys).terms.items():
                value = term.total if self._case.normalize == "none" else _divided(term)
                averaged = self._case.normalize == "microbatch" and term.weight is not None
                values[name] = value / number if averaged else value
            return sum(values.values()), values

        return objective

    def _parts(self, batch: PyTree, keys: Any, rows: int, number: int) -> Iterator[tuple]:
        """Yields the real rows in parts of so many; a part that is all padding adds nothing and is left out."""
        for start in range(0, min(rows * number, self._case.real_rows), rows):
            yield _rows(batch, keys, start, min(start + rows, self._case.real_rows))

    def _as_computed(self, leaf: Any) -> jax.Array:
        """Rounds a parameter to the dtype that the case computes in."""
        return _wide(jnp.asarray(leaf).astype(self._case.compute_dtype or leaf.dtype))


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
    terms = {name: sum((a.terms[name] for a in answers[1:]), term) for name, term in answers[0].terms.items()}
    metrics = {name: _stacked([a.metrics[name] for a in answers]) for name in answers[0].metrics}
    return LossOutput({**out.terms, **terms}, {**out.metrics, **metrics}, out.outputs)


def keys_of_rows(rng: jax.Array | None, rows: int) -> jax.Array | None:
    """Returns one key a row, keys[rows], as documented: `fold_in(rng, row)`, or rng itself if it is one a row."""
    if rng is None:
        return None
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    return rng if rng.ndim else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(rows))


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


def _rows(batch: PyTree, keys: Any, start: int, stop: int) -> tuple:
    return jax.tree.map(lambda leaf: leaf[start:stop], batch), None if keys is None else keys[start:stop]


def _wide(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
