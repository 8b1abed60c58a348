"""Runs a layer as two halves, of which each keeps its input and is computed again by itself in the backward.

The second half's backward begins with its own input: it need not wait until the first half is computed again, which
can run beside what the second half exchanges. What only the second half's input needs, such as attention's last
product, is not computed again at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.forward_backward.layers.layer_passes import LayerPasses, Layers, StageInputs, context_of
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.unrounded import unrounded
from jaxfb.forward_backward.sequential import layer_output, two_results
from jaxfb.trainable import joined
from jaxfb.types import LossOutput, PyTree


class LayerInHalves(NamedTuple):
    """A layer as `Stage` takes it, in two halves; both as of `jaxfb.types.Halves`, with shards or whole parameters."""

    first: Callable
    second: Callable

    def __call__(self, params, hidden, microbatch, rng) -> tuple[PyTree, LossOutput]:
        """Returns (hidden, its terms and metrics)."""
        between = self.first(params, hidden, microbatch, rng)
        return self.finish((), params, between, microbatch, rng)[0]

    def finish(
        self, beside: PyTree, params, between, microbatch, rng
    ) -> tuple[tuple[PyTree, LossOutput], PyTree]:
        """Returns ((hidden, its terms and metrics), beside)."""
        returned = self.second(params, between, microbatch, rng, beside)
        out, beside = two_results("Pipelined.halves.second", returned, "(what layer returns, beside)")
        return layer_output(out), beside


class HalfPasses(LayerPasses):
    """Keeps a layer's input and what is between its halves.

    layer: `LayerInHalves`. keep, trained: as of `Stage`.
    """

    def __init__(self, layer: LayerInHalves, keep: str, trained: Callable[[PyTree], PyTree]):
        super().__init__(layer, keep, trained)
        self._halves = layer

    def forward(
        self, layer: Layers, before: PyTree, inputs: StageInputs
    ) -> tuple[PyTree, LossOutput, PyTree]:
        """Returns (hidden, terms and metrics, what is kept by layer)."""
        context = context_of(layer, inputs)
        between = self._halves.first(layer.params, before, *context)
        (after, out), _ = self._halves.finish((), layer.params, between, *context)
        return after, out, (before, between)

    def backward(self, layer: Layers, kept: PyTree, cotangent: PyTree, seeds: dict, inputs: StageInputs):
        """Returns (gradient of the trained parameters, cotangent of the layer's input)."""
        trained, (before, between) = self._trained(layer.params), kept
        context = context_of(layer, inputs)
        _, of_first = jax.vjp(self._of_trained(self._halves.first, layer, context), trained, before)
        made = _Made(of_first, (layer, kept, inputs))
        second = self._of_trained(partial(self._second, made.leaves), layer, context)
        (_, totals), of_second, beside = jax.vjp(second, trained, between, has_aux=True)
        seeds = {name: seeds[name] for name in totals}
        grads, cotangent = unrounded(of_second, trained, (cotangent, seeds))
        more, cotangent = unrounded(made.with_leaves(beside), trained, cotangent)
        return jax.tree.map(jnp.add, more, grads), cotangent

    def _second(self, beside: PyTree, params: PyTree, between: PyTree, *context: Any):
        """Returns ((hidden, totals of its terms), beside)."""
        (after, out), beside = self._halves.finish(beside, params, between, *context)
        return (after, {name: term.total for name, term in out.terms.items()}), beside

    def _of_trained(self, half: Callable, layer: Layers, context: tuple) -> Callable:
        """Returns a half as a function of the trained parameters and hidden."""
        return lambda trained, hidden: half(joined(trained, layer.params), hidden, *context)


class StageOfHalves(Stage):
    """A stage whose layers run in halves."""

    passes = HalfPasses


class _Made:
    """Knows the arrays of numbers in a VJP that were computed for it, and are none of those `given`."""

    def __init__(self, vjp: Callable, given: PyTree):
        self._all, self._tree = jax.tree.flatten(vjp)
        known = {id(leaf) for leaf in jax.tree.leaves(given)}
        self._places = [
            place
            for place, leaf in enumerate(self._all)
            if id(leaf) not in known and jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        self.leaves = [self._all[place] for place in self._places]

    def with_leaves(self, leaves: list) -> Callable:
        """Returns the VJP with these in place of `leaves`."""
        changed = dict(zip(self._places, leaves, strict=True))
        return jax.tree.unflatten(
            self._tree, [changed.get(place, leaf) for place, leaf in enumerate(self._all)]
        )
