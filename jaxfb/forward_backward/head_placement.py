"""The two ends of a pipeline: the embedding before the first stage, the head and loss after the last.

All devices run the same tick, so what one end does costs everybody. Three ways to place the head:
"last" lets every device run the whole head and uses the result of the one that holds the last stage;
"rows" gives each device its share of the microbatch's rows, exact as long as the terms are sums over rows or, such as
a penalty on the parameters, read none;
"vocabulary" gives each its share of the vocabulary, of the embedding too, for models that offer it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.accumulate import split_totals
from jaxfb.forward_backward.layers.layer_passes import StageInputs
from jaxfb.forward_backward.loss_function.loss import as_loss_output
from jaxfb.forward_backward.loss_function.traced import Traced, reads_none
from jaxfb.forward_backward.reduce import COLLECTIVES, across, masked
from jaxfb.parallel.collectives import psum_of_one, psum_scatter_of_one
from jaxfb.parts import HEADS
from jaxfb.refusal import Refused, choice
from jaxfb.types import Last, LossOutput, Max, Min, Pipelined, PyTree, Sum, VocabularyParallel


class HeadPlacement(ABC):
    """Embedding and head of a model inside a pipeline, on one device of it.

    Args:
      cut: tree of bool like the outer parameters, those of which a device holds its own share.
      embed_device, loss_device: who holds the first and the last stage.
    """

    cuts_rows: ClassVar[bool] = False
    """Whether each device computes the head for its share of a microbatch's rows, which pipe then has to divide."""
    cuts_vocabulary: ClassVar[bool] = False
    """Whether each device holds its share of the vocabulary, as `Pipelined.vocabulary` cuts it."""

    def __init__(self, model: Pipelined, cut: PyTree, embed_device: int, loss_device: int):
        self._model, self._cut = model, cut
        self._embed_device, self._loss_device = embed_device, loss_device

    @property
    def model(self) -> Pipelined:
        """Returns the model whose ends these are."""
        return self._model

    def loss(self, outer: PyTree, hidden: PyTree, inputs: StageInputs) -> LossOutput:
        """Returns this device's part of the result, neutral where it has none; `hidden` counts on loss_device."""
        return self._neutral_elsewhere(self._head(outer, *self._spread(hidden, inputs)))

    def loss_backward(
        self, outer: PyTree, hidden: PyTree, inputs: StageInputs, seeds: dict
    ) -> tuple[LossOutput, PyTree, PyTree]:
        """Returns (its part of the result, its part of the gradient of `outer`, cotangent of hidden on loss_device)."""
        hidden, inputs = self._spread(hidden, inputs)

        def totals(outer, hidden):
            return split_totals(self._head(outer, hidden, inputs))

        terms, vjp, out = jax.vjp(totals, outer, hidden, has_aux=True)
        grads, cotangent = vjp({name: seeds[name].astype(total.dtype) for name, total in terms.items()})
        return self._neutral_elsewhere(out), self._own(grads), self._collect(cotangent)

    def whole(self, out: LossOutput) -> LossOutput:
        """Returns every device's parts, [num_microbatches, ...] leaves, gathered over pipe."""
        terms, metrics = lax.psum((out.terms, _of(out.metrics, Sum)), "pipe")
        for kind in (Last, Max, Min):
            metrics |= across(COLLECTIVES[kind], _of(out.metrics, kind), ("pipe",))
        outputs = jax.tree.map(self._whole_output, out.outputs)
        return LossOutput(terms, {name: metrics[name] for name in out.metrics}, outputs)

    @abstractmethod
    def embed(self, outer: PyTree, inputs: StageInputs) -> PyTree:
        """Returns hidden, on embed_device at least."""

    @abstractmethod
    def embed_backward(
        self, outer: PyTree, inputs: StageInputs, cotangent: PyTree, mine: jax.Array
    ) -> PyTree:
        """Returns this device's part of the gradient of `outer`; the cotangent counts where it is `mine`."""

    @abstractmethod
    def _head(self, outer: PyTree, hidden: PyTree, inputs: StageInputs) -> LossOutput: ...

    @abstractmethod
    def _spread(self, hidden: PyTree, inputs: StageInputs) -> tuple[PyTree, StageInputs]:
        """Returns what this device's head reads, from what loss_device has."""

    def _collect(self, cotangent: PyTree) -> PyTree:
        """Returns the cotangent of hidden on loss_device, from those of what each device's head read."""
        return cotangent

    @abstractmethod
    def _own(self, grads: PyTree) -> PyTree:
        """Returns the part of the gradient of `outer` that is this device's to add."""

    def _counts(self) -> jax.Array:
        """Returns bool[]: whether this device's result counts."""
        return self._here(self._loss_device)

    def _counts_last(self) -> jax.Array:
        """Returns bool[]: whether the last rows are in this device's result."""
        return self._counts()

    def _whole_output(self, leaf: jax.Array) -> jax.Array:
        """Returns [num_microbatches, rows, ...] of all rows, from each device's; zero where its own do not count."""
        return across(lax.psum, leaf, ("pipe",))

    def _neutral_elsewhere(self, out: LossOutput) -> LossOutput:
        def neutral(metric):
            fill = {Max: _lowest, Min: _highest}.get(type(metric), lambda a: 0)
            mine = self._counts_last() if isinstance(metric, Last) else self._counts()
            return jax.tree.map(lambda a: jnp.where(mine, a, jnp.full_like(a, fill(a))), metric)

        metrics = {name: neutral(metric) for name, metric in out.metrics.items()}
        return LossOutput(masked(self._counts(), out.terms), metrics, masked(self._counts(), out.outputs))

    def _here(self, device: int) -> jax.Array:
        return lax.axis_index("pipe") == device


class _WholeModel(HeadPlacement):
    """Ends that call the model's own embed and head, with whole outer parameters."""

    def embed(self, outer, inputs):
        with jax.named_scope("embed"):
            return self._model.embed(outer, inputs.microbatch, inputs.keys)

    def embed_backward(self, outer, inputs, cotangent, mine):
        with jax.named_scope("embed_backward"):
            _, vjp = jax.vjp(lambda o: self._model.embed(o, inputs.microbatch, inputs.keys), outer)
            return masked(mine, vjp(cotangent)[0])

    def _head(self, outer, hidden, inputs):
        with jax.named_scope("head"):
            return as_loss_output(self._model.head(outer, hidden, inputs.microbatch, inputs.keys))


class LastPlacement(_WholeModel):
    """Runs the whole head on every device; only the result of loss_device counts."""

    def _spread(self, hidden, inputs):
        return hidden, inputs

    def _own(self, grads):
        return masked(self._counts(), grads)


class RowsPlacement(_WholeModel):
    """Runs the head on each device's share of the rows, in their order along pipe."""

    cuts_rows = True

    def _head(self, outer, hidden, inputs):
        """Returns the result for this device's rows; what reads no row is that of all rows, and counts once."""
        out, here = super()._head(outer, hidden, inputs), self._here(self._loss_device)
        share, whole = (self._traced(outer, hidden, inputs, n) for n in (1, lax.axis_size("pipe")))

        def once(name, kind, leaf, place, of_whole):
            if _reads(share, place):
                _check_sum(name, kind, share, whole, place)
                return leaf
            value = jnp.asarray(whole.function(of_whole)(outer, None, None)[0], leaf.dtype)
            if value.shape != leaf.shape:  # of numbers for each row, not their sum
                return leaf
            return masked(here, value) if kind is Sum else value

        def of(field: str) -> dict:
            given, places, of_whole = (getattr(each, field) for each in (out, share.places, whole.places))
            return {
                name: jax.tree.map(partial(once, name, type(one)), one, places[name], of_whole[name])
                for name, one in given.items()
            }

        return LossOutput(of("terms"), of("metrics"), out.outputs)

    def _traced(self, outer: PyTree, hidden: PyTree, inputs: StageInputs, times: int) -> Traced:
        """Returns the head traced for so many times this device's rows."""

        def more(leaf):
            return jax.ShapeDtypeStruct((leaf.shape[0] * times, *leaf.shape[1:]), leaf.dtype)

        def head(outer, data, _):
            return as_loss_output(self._model.head(outer, *data))

        data = jax.tree.map(more, (hidden, inputs.microbatch, inputs.keys))
        return Traced(head, outer, data, None)

    def _spread(self, hidden, inputs):
        mine = masked(self._here(self._loss_device), hidden)
        scatter = lambda leaf: psum_scatter_of_one(leaf, "pipe", 0)  # noqa: E731
        return jax.tree.map(scatter, mine), jax.tree.map(_my_rows, inputs)

    def _collect(self, cotangent):
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, "pipe", axis=0, tiled=True), cotangent)

    def _own(self, grads):
        return grads

    def _counts(self):
        return jnp.asarray(True)

    def _counts_last(self):
        return self._here(lax.axis_size("pipe") - 1)

    def _whole_output(self, leaf):
        return lax.all_gather(leaf, "pipe", axis=1, tiled=True)


class VocabularyPlacement(HeadPlacement):
    """Embeds and scores each device's share of the vocabulary, for all rows."""

    cuts_vocabulary = True

    @property
    def _vocabulary(self) -> VocabularyParallel:
        # `choose_placement` takes it only where the model offers it
        assert self._model.vocabulary is not None
        return self._model.vocabulary

    def embed(self, outer, inputs):
        with jax.named_scope("embed"):
            return psum_of_one(self._part(outer, inputs), "pipe")

    def embed_backward(self, outer, inputs, cotangent, mine):
        with jax.named_scope("embed_backward"):
            _, vjp = jax.vjp(lambda o: self._part(o, inputs), outer)
            return self._own(vjp(psum_of_one(masked(mine, cotangent), "pipe"))[0])

    def _part(self, outer, inputs):
        return self._vocabulary.embed(outer, inputs.microbatch, inputs.keys, "pipe")

    def _head(self, outer, hidden, inputs):
        with jax.named_scope("head"):
            return as_loss_output(
                self._vocabulary.head(outer, hidden, inputs.microbatch, inputs.keys, "pipe")
            )

    def _spread(self, hidden, inputs):
        return psum_of_one(masked(self._here(self._loss_device), hidden), "pipe"), inputs

    def _own(self, grads):
        """Returns this device's gradient contribution: its shard of sharded leaves, its partial sum of row-shared
        leaves; replicated leaves count on loss_device only.
        """
        here, parts, shared = self._counts(), self._cut, self._vocabulary.shared
        if shared is not None:
            parts = jax.tree.map(max, parts, shared(grads))
        return jax.tree.map(lambda grad, part: grad if part else masked(here, grad), grads, parts)


def check_placement(name: Any) -> None:
    """Raises ValueError for a name that is not a head placement; "module:class" may name a `HeadPlacement`."""
    if not isinstance(name, str) or ":" not in name:
        choice("head_placement", name, tuple(HEADS))
    elif not (
        isinstance(found := HEADS[HEADS.check(name, "head_placement")], type)
        and issubclass(found, HeadPlacement)
    ):
        raise Refused(
            f"head_placement={name!r} must name a subclass of jaxfb.forward_backward.head_placement.HeadPlacement"
        )


def choose_placement(asked: str | None, model: Pipelined, outer: PyTree, pipe: int, tensor: int) -> str:
    """Returns the head placement for a model: what was asked, else "vocabulary" where it is offered and divides, else
    "last".

    Raises:
      ValueError: the name is unknown, or "vocabulary" is not possible.
    """
    if asked is not None:
        check_placement(asked)
        if not HEADS[asked].cuts_vocabulary:
            return asked
    obstacle = _obstacle_to_vocabulary(model, outer, pipe, tensor)
    if asked and obstacle:
        raise Refused(
            f'head_placement="{asked}" {obstacle}; use "last" or "rows"',
            [{"head_placement": one} for one in ("last", "rows")],
        )
    return asked or ("last" if obstacle else "vocabulary")


def check_rows(placement: str, rows: int, pipe: int) -> None:
    """Raises ValueError if a placement that cuts rows cannot share out a microbatch of so many."""
    if HEADS[placement].cuts_rows and rows % pipe:
        legal = max(pipe, rows - rows % pipe)
        raise Refused(
            f'head_placement="{placement}" cuts a microbatch of {rows} rows over pipe={pipe}, which does not divide; '
            f'use rows_per_microbatch={legal} or head_placement="last"',
            [{"rows_per_microbatch": legal}, {"head_placement": "last"}],
        )


def _obstacle_to_vocabulary(model: Pipelined, outer: PyTree, pipe: int, tensor: int) -> str | None:
    if model.vocabulary is None:
        return "needs a model that offers Pipelined.vocabulary, this one does not"
    dims = model.vocabulary.dims(outer)
    for size in jax.tree.leaves(
        jax.tree.map(lambda leaf, dim: leaf.shape[dim] if dim >= 0 else 0, outer, dims)
    ):
        if size % (pipe * tensor):
            return f"needs a vocabulary that pipe * tensor = {pipe * tensor} divides, got {size}"
    return None


def _my_rows(leaf: jax.Array) -> jax.Array:
    rows = leaf.shape[0] // lax.axis_size("pipe")
    return lax.dynamic_slice_in_dim(leaf, lax.axis_index("pipe") * rows, rows)


def _check_sum(name: str, kind: type, share: Traced, whole: Traced, place: int) -> None:
    """Raises ValueError for a sum over rows to which something is added that reads none."""
    if kind is Sum and reads_none(share, whole, place):
        raise Refused(
            f'head_placement="rows" needs sums over rows, but {name!r} adds something that reads no row, such as '
            'a penalty on parameters, which each stage would count; use head_placement="last", or make it another '
            "term or metric",
            [{"head_placement": "last"}],
        )


def _reads(traced: Traced, place: int) -> bool:
    """Returns whether a result depends on anything of the rows."""
    return any(traced.reads(place)[1])


def _of(metrics: Mapping, *kinds: type) -> dict:
    return {name: metric for name, metric in metrics.items() if isinstance(metric, kinds)}


def _lowest(a: jax.Array):
    if a.dtype == bool:
        return False
    return -jnp.inf if jnp.issubdtype(a.dtype, jnp.floating) else jnp.iinfo(a.dtype).min


def _highest(a: jax.Array):
    if a.dtype == bool:
        return True
    return jnp.inf if jnp.issubdtype(a.dtype, jnp.floating) else jnp.iinfo(a.dtype).max
