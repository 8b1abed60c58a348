"""Runs one layer of a stage forward and backward, by what is kept for the backward: its residuals or its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxfb.forward_backward.layers.residual import Residual
from jaxfb.forward_backward.layers.slot import read_layer
from jaxfb.forward_backward.layers.split_backward import SplitBackward
from jaxfb.forward_backward.layers.unrounded import unrounded
from jaxfb.forward_backward.sequential import layer_keys
from jaxfb.trainable import joined
from jaxfb.types import LossOutput, PyTree, Sum


class Layers(NamedTuple):
    """The layers of one chunk: parameters [l, ...], their indices in the model i32[l], which are real bool[l].

    whole: of FSDP, parameters of the first layers [k, ...] that stay gathered; `MixedStage` has them run with these.
    chunk: i32[], this chunk's number where `params` and `whole` are those of all chunks, [num_chunks, l, ...]; each
      layer is then read from these, since a loop over the layers of a chunk that was cut out would need a copy of it in
      every tick. None: they are of this chunk alone.
    """

    params: PyTree
    index: jax.Array
    real: jax.Array
    whole: PyTree = None
    chunk: jax.Array | None = None

    def at(self, place: jax.Array) -> Layers:
        """Returns one layer, as a pass takes it."""
        params = read_layer(self.params, place, self.chunk)
        return Layers(params, *read_layer((self.index, self.real), place))


class StageInputs(NamedTuple):
    """The inputs of a stage besides hidden: the microbatch and its row keys."""

    microbatch: PyTree
    keys: jax.Array | None


class LayerPasses:
    """Runs a layer's forward, and its backward whole or in two halves.

    layer, keep, trained: as of `Stage`; with keep="input" a layer is handed its input as with "inputs".
    """

    def __init__(self, layer: Callable, keep: str, trained: Callable[[PyTree], PyTree]):
        self._layer, self._keeps_residuals, self._trained = layer, keep == "residuals", trained
        self._residual: Residual | None = None
        self._split: SplitBackward | None = None

    def run(self, layer: Layers, hidden: PyTree, inputs: StageInputs) -> PyTree:
        """Returns hidden after the layer, with nothing kept."""
        return self._plain(layer.params, hidden, *context_of(layer, inputs))[0][0]

    def forward(
        self, layer: Layers, before: PyTree, inputs: StageInputs
    ) -> tuple[PyTree, LossOutput, PyTree]:
        """Returns (hidden, terms and metrics, what is kept by layer)."""
        if self._keeps_residuals:
            (after, totals), (weights, metrics), kept = self._keeping_vjp(layer, before, inputs)
        else:
            (after, totals), (weights, metrics) = self._plain(
                layer.params, before, *context_of(layer, inputs)
            )
            kept = before
        out = LossOutput({name: Sum(total, weights[name]) for name, total in totals.items()}, metrics)
        return after, out, kept

    def backward(self, layer: Layers, kept: PyTree, cotangent: PyTree, seeds: dict, inputs: StageInputs):
        """Returns (gradient of the trained parameters, cotangent of the layer's input)."""
        at_hand = (layer.params, *context_of(layer, inputs))
        if self._keeps_residuals:
            assert self._residual is not None  # the forward made it
            vjp = self._residual.rebuilt(kept, at_hand)
        else:
            _, vjp, _ = self._vjp(at_hand, kept)
        return unrounded(vjp, self._trained(layer.params), (cotangent, seeds))

    def backward_input(self, layer: Layers, kept, cotangent, seeds: dict, inputs: StageInputs):
        """Returns (what the weight gradient needs, cotangent of the layer's input)."""
        only_now, always = self._arguments(layer, kept, cotangent, seeds, inputs)
        number = len(jax.tree.leaves(cotangent))
        self._split = self._split or SplitBackward(self._split_form, only_now, always, number)
        return self._split.now(only_now, always)

    def backward_weight(
        self, layer: Layers, kept: PyTree, saved: PyTree, seeds: dict, inputs: StageInputs
    ) -> PyTree:
        """Returns the gradient of the trained parameters; saved: what `backward_input` returned for it."""
        assert self._split is not None  # `backward_input` made it
        return self._split.later(saved, self._arguments(layer, kept, None, seeds, inputs)[1])

    def _plain(self, params, hidden, microbatch, rng):
        """Returns one layer as (hidden and totals, what is not differentiated: weights and metrics)."""
        after, out = self._layer(params, hidden, microbatch, rng)
        totals, weights = (
            {name: getattr(term, part) for name, term in out.terms.items()} for part in ("total", "weight")
        )
        return (after, totals), (weights, out.metrics)

    def _vjp(self, at_hand: PyTree, hidden: PyTree):
        """Returns ((hidden, totals), VJP to (trained params, hidden), the rest) of one layer; at_hand: (params,
        microbatch, rng).
        """
        params, microbatch, rng = at_hand

        def plain(trained, hidden):
            return self._plain(joined(trained, params), hidden, microbatch, rng)

        return jax.vjp(plain, self._trained(params), hidden, has_aux=True)

    def _keeping_vjp(self, layer: Layers, hidden: PyTree, inputs: StageInputs):
        at_hand = (layer.params, *context_of(layer, inputs))
        out, vjp, rest = self._vjp(at_hand, hidden)
        self._residual = self._residual or Residual(lambda *a: self._vjp(*a)[1], at_hand, hidden)
        return out, rest, self._residual.kept(vjp)

    def _arguments(self, layer, kept, cotangent, seeds, inputs) -> tuple[PyTree, PyTree]:
        """Returns a layer's backward's arguments: those that are gone when W runs, and those that are still there."""
        gone, there = (None, kept) if self._keeps_residuals else (kept, None)
        return (cotangent, gone), (layer, seeds, inputs, there)

    def _split_form(self, only_now, always):
        (cotangent, gone), (layer, seeds, inputs, there) = only_now, always
        kept = there if self._keeps_residuals else gone
        return self.backward(layer, kept, cotangent, seeds, inputs)


def context_of(layer: Layers, inputs: StageInputs) -> tuple[PyTree, jax.Array | None]:
    """Returns what a layer is given besides parameters and hidden."""
    return inputs.microbatch, layer_keys(inputs.keys, layer.index)
