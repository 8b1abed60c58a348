"""Sums gradients of whole layers into shards (FSDP) while the backward computes those of the layers before.

A backward's loop over layers takes each layer's gradients, and carries them on until the next turn, in which the
collectives that sum them run beside the products of another layer. Gradients of the second half of a layer need not
wait where they can be summed beside the backward of its first half (`Ahead.in_turn`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.ahead import Ahead

PyTree = Any


class OfLayer(NamedTuple):
    """The gradients of one layer, or of some of its leaves: its place i32[], whether it is a real layer bool[]."""

    place: jax.Array
    real: jax.Array
    grads: PyTree


Waiting = tuple[OfLayer, ...]
"""Gradients that wait, one layer for each step of the scatter: the newest, on which none has run, first."""


@dataclass(frozen=True)
class LateScatter:
    """Runs each step of the scatter of a layer's gradients a turn after the step before it.

    ahead: with the steps.
    add: (sums, gradients of one layer's shards) -> sums with them added.
    """

    ahead: Ahead
    add: Callable[[PyTree, OfLayer], PyTree]

    def nothing_yet(self, shapes: OfLayer) -> Waiting:
        """Returns what waits before the first turn: zero gradients of the layer that the turn is for.

        shapes: with the shapes of its trained parameters in place of gradients.
        """
        late, _ = self.ahead.parts(jax.eval_shape(self.ahead.before_scatter, shapes.grads))
        zeros = [_zeros(late)]
        for step in self.ahead.to_shards[:-1]:
            zeros.append(_zeros(jax.eval_shape(step, zeros[-1])))
        return tuple(shapes._replace(grads=grads) for grads in zeros)

    def step_further(self, sums: PyTree, waiting: Waiting) -> tuple[PyTree, Waiting]:
        """Runs the next step for all that wait, and adds to `sums` what the last step has completed.

        Returns (sums, what still waits).
        """
        *firsts, last = waiting
        sums = self.add(sums, _run(self.ahead.to_shards[-1:], last))
        return sums, tuple(
            _run((step,), one) for one, step in zip(firsts, self.ahead.to_shards, strict=False)
        )

    def take(self, sums: PyTree, waiting: Waiting, made: OfLayer) -> tuple[PyTree, Waiting]:
        """Returns (sums, what waits) with a layer's gradients in one or the other."""
        # cast here, the product that makes them writes them so; cast where they are added, it takes another pass
        late, in_turn = self.ahead.parts(self.ahead.before_scatter(made.grads))
        sums = self.add(sums, _run(self.ahead.to_shards, made._replace(grads=in_turn)))
        return sums, (made._replace(grads=late), *waiting)

    def to_the_end(self, sums: PyTree, waiting: Waiting) -> PyTree:
        """Returns the sums with all that waits after the last turn."""
        for number, one in reversed([*enumerate(waiting)]):
            sums = self.add(sums, _run(self.ahead.to_shards[number:], one))
        return sums


def _run(steps: tuple[Callable[[PyTree], PyTree], ...], of: OfLayer) -> OfLayer:
    grads = of.grads
    for step in steps:
        grads = step(grads)
    return of._replace(grads=grads)


def _zeros(shapes: PyTree) -> PyTree:
    """Returns zeros that are no constants, for which XLA would pass over the gradients once more in every turn."""
    return lax.optimization_barrier(jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes))
