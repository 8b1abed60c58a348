"""The two ends of a pipeline: the embedding before the first stage, the head and loss after the last.

All devices run the same tick, so what one end does costs everybody. "last" lets every device run the whole
head and uses the answer of the one that holds the last stage; "rows" gives each device its share of the
microbatch's rows, exact as long as the terms are sums over rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.loss import as_loss_output
from jaxfb.forward_backward.stage import Given
from jaxfb.types import Last, LossOutput, Max, Min, Pipelined, Sum

PyTree = Any
PLACEMENTS = ("rows", "last")


class Ends:
    """Embedding and head of a model inside a pipeline. `loss_device` holds the last stage."""

    def __init__(self, model: Pipelined, placement: str, loss_device: int):
        self._model, self._placement, self._loss_device = model, placement, loss_device

    def embed(self, outer: PyTree, given: Given) -> PyTree:
        with jax.named_scope("embed"):
            return self._model.embed(outer, given.microbatch, given.keys)

    def embed_backward(self, outer: PyTree, given: Given, cotangent: PyTree, mine: jax.Array) -> PyTree:
        """Gradient of `outer` through the embedding; zero where the cotangent is not `mine`."""
        with jax.named_scope("embed_backward"):
            _, vjp = jax.vjp(lambda o: self._model.embed(o, given.microbatch, given.keys), outer)
            return _masked(mine, vjp(cotangent)[0])

    def loss(self, outer: PyTree, hidden: PyTree, given: Given) -> LossOutput:
        """This device's part of the answer, neutral where it has none."""
        hidden, given = self._spread(hidden, given)
        return self._neutral_elsewhere(self._head(outer, hidden, given))

    def loss_backward(
        self, outer: PyTree, hidden: PyTree, given: Given, seeds: dict
    ) -> tuple[LossOutput, PyTree, PyTree]:
        """(this device's part of the answer, of the gradient of `outer`; the cotangent of hidden on loss_device)."""
        hidden, given = self._spread(hidden, given)

        def totals(outer, hidden):
            out = self._head(outer, hidden, given)
            return {name: term.total for name, term in out.terms.items()}, out

        terms, vjp, out = jax.vjp(totals, outer, hidden, has_aux=True)
        grads, cotangent = vjp({name: seeds[name].astype(total.dtype) for name, total in terms.items()})
        return self._neutral_elsewhere(out), _masked(self._owner(), grads), self._collect(cotangent)

    def whole(self, out: LossOutput) -> LossOutput:
        """Every device's parts, [num_microbatches, ...] leaves, brought together over pipe."""
        summed = jax.tree.map(lambda leaf: lax.psum(leaf, "pipe"), (out.terms, _of(out.metrics, Sum, Last)))
        largest = jax.tree.map(lambda leaf: lax.pmax(leaf, "pipe"), _of(out.metrics, Max))
        smallest = jax.tree.map(lambda leaf: lax.pmin(leaf, "pipe"), _of(out.metrics, Min))
        metrics = summed[1] | largest | smallest
        return LossOutput(
            summed[0], {name: metrics[name] for name in out.metrics}, self._whole_outputs(out.outputs)
        )

    def _head(self, outer, hidden, given) -> LossOutput:
        with jax.named_scope("head"):
            return as_loss_output(self._model.head(outer, hidden, given.microbatch, given.keys))

    def _owner(self) -> jax.Array:
        """Whether this device's head saw rows that count."""
        return jnp.asarray(self._placement == "rows") | (lax.axis_index("pipe") == self._loss_device)

    def _spread(self, hidden: PyTree, given: Given) -> tuple[PyTree, Given]:
        if self._placement == "last":
            return hidden, given
        here = lax.axis_index("pipe") == self._loss_device

        def scatter(leaf):
            return lax.psum_scatter(_masked(here, leaf), "pipe", scatter_dimension=0, tiled=True)

        return jax.tree.map(scatter, hidden), jax.tree.map(_my_rows, given)

    def _collect(self, cotangent: PyTree) -> PyTree:
        if self._placement == "last":
            return cotangent
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, "pipe", axis=0, tiled=True), cotangent)

    def _neutral_elsewhere(self, out: LossOutput) -> LossOutput:
        owner = self._owner()
        holds_last = lax.axis_index("pipe") == (
            lax.axis_size("pipe") - 1 if self._placement == "rows" else self._loss_device
        )

        def neutral(metric):
            if isinstance(metric, Sum):
                metric = Sum(metric.total, jnp.broadcast_to(metric.weight, metric.total.shape))
            fill = {Sum: lambda a: 0, Last: lambda a: 0, Max: _lowest, Min: _highest}[type(metric)]
            mine = holds_last if isinstance(metric, Last) else owner
            return jax.tree.map(lambda a: jnp.where(mine, a, jnp.full_like(a, fill(a))), metric)

        metrics = {name: neutral(metric) for name, metric in out.metrics.items()}
        return LossOutput(_masked(owner, out.terms), metrics, _masked(owner, out.outputs))

    def _whole_outputs(self, outputs: PyTree) -> PyTree:
        if self._placement == "rows":
            return jax.tree.map(lambda leaf: lax.all_gather(leaf, "pipe", axis=1, tiled=True), outputs)
        summed = lambda leaf: lax.psum(leaf.astype(jnp.int8) if leaf.dtype == bool else leaf, "pipe")  # noqa: E731
        return jax.tree.map(lambda leaf: summed(leaf).astype(leaf.dtype), outputs)


def check_placement(placement: str | None, rows: int, pipe: int) -> str:
    """The head placement to use.

    Raises:
      ValueError: the name is unknown, or "rows" with rows that pipe does not divide.
    """
    if placement is None:
        return "last"
    if placement not in PLACEMENTS:
        raise ValueError(
            f"head_placement must be one of {', '.join(map(repr, PLACEMENTS))}, got {placement!r}"
        )
    if placement == "rows" and rows % pipe:
        raise ValueError(
            f'head_placement="rows" cuts a microbatch of {rows} rows over pipe={pipe}, which does not divide; '
            f'use rows_per_microbatch={max(pipe, rows - rows % pipe)} or head_placement="last"'
        )
    return placement


def _my_rows(leaf: jax.Array) -> jax.Array:
    rows = leaf.shape[0] // lax.axis_size("pipe")
    return lax.dynamic_slice_in_dim(leaf, lax.axis_index("pipe") * rows, rows)


def _masked(mine: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(mine, leaf, jnp.zeros_like(leaf)), tree)


def _of(metrics: dict, *kinds: type) -> dict:
    return {name: metric for name, metric in metrics.items() if isinstance(metric, kinds)}


def _lowest(a: jax.Array):
    return -jnp.inf if jnp.issubdtype(a.dtype, jnp.floating) else jnp.iinfo(a.dtype).min


def _highest(a: jax.Array):
    return jnp.inf if jnp.issubdtype(a.dtype, jnp.floating) else jnp.iinfo(a.dtype).max
