"""Sums gradients of whole layers into shards (FSDP) while the backward computes those of the layers before.

A backward's loop over layers takes each layer's gradients, and carries them on until the next turn, in which the
collectives that sum them run beside the products of another layer. Gradients of the second half of a layer need not
wait where they can be summed beside the backward of its first half (`Ahead.in_turn`). Those of the last microbatch go
a step further: with the sums of the others added they are reduced (`Ahead.reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.layers.ahead import Ahead
from jaxfb.forward_backward.layers.overwriting import Overwriting
from jaxfb.forward_backward.layers.target import OfLayer
from jaxfb.types import PyTree

Step = Callable[[OfLayer], OfLayer]
Waiting = tuple[OfLayer, ...]
"""Gradients that wait, one layer for each step of the scatter: the newest, on which none has run, first."""


@dataclass(frozen=True)
class LateScatter:
    """Runs each step of the scatter of a layer's gradients a turn after the step before it.

    ahead: with the steps.
    add: (sums, gradients of one layer's shards) -> sums with them added.
    of_all: (sums, gradients of one layer's shards) -> those that `ahead.reduce` sums over devices.
    """

    ahead: Ahead
    add: Callable[[PyTree, OfLayer], PyTree]
    of_all: Callable[[PyTree, OfLayer], OfLayer]

    def nothing_yet(self, sums: PyTree, shapes: OfLayer) -> Waiting:
        """Returns what waits before the first turn: zeros in the place of the layer that the turn is for.

        They are marked as those of no real layer, so that nothing is overwritten by them.

        shapes: with the shapes of its trained parameters in place of gradients.
        """
        waiting = [jax.eval_shape(lambda of: self._parts(sums, of)[0], shapes)]
        if self._overwriting is not None:
            waiting[0] = _of_grads(self._overwriting.buffers)(waiting[0])
        for step in self._late_steps(sums)[:-1]:
            waiting.append(jax.eval_shape(step, waiting[-1]))
        return tuple(shapes._replace(real=shapes.real & False, grads=_zeros(one.grads)) for one in waiting)

    def step_further(self, sums: PyTree, waiting: Waiting) -> tuple[PyTree, Waiting, PyTree]:
        """Runs the next step for all that wait, and adds to `sums` what the last step has completed.

        Returns (sums, what still waits, the buffers of the newest gradients, which may be overwritten; None: there are
        none). The oldest come first: `of_all` may read the sums only behind the write to them, or XLA copies them all.
        """
        free, still = None, ()
        for number, one in reversed([*enumerate(waiting)]):
            steps = self._late_steps(sums)  # which read the sums behind the last write
            further = steps[number](one)
            if number == 0 and self._overwriting is not None:
                free, grads = lax.optimization_barrier((one.grads, further.grads))
                further = further._replace(grads=grads)
            if number == len(steps) - 1:
                sums = self.add(sums, further)
            else:
                still = (further, *still)
        return sums, still, free

    def take(self, sums: PyTree, waiting: Waiting, made: OfLayer, free: PyTree) -> tuple[PyTree, Waiting]:
        """Returns (sums, what waits) with a layer's gradients in one or the other.

        free: buffers, of `step_further`; None: of a backward that is not a loop, the first layer, which gets new ones.
        """
        late, in_turn = self._parts(sums, made)
        if self._overwriting is not None:
            free = _zeros(self._overwriting.buffers(late.grads)) if free is None else free
            late = late._replace(grads=self._overwriting.write(free, late.grads))
        return self.add(sums, _run(self._steps(sums)[1:], in_turn)), (late, *waiting)

    def to_the_end(self, sums: PyTree, waiting: Waiting) -> PyTree:
        """Returns the sums with all that waits after the last turn."""
        for number, one in reversed([*enumerate(waiting)]):
            sums = self.add(sums, _run(self._late_steps(sums)[number:], one))
        return sums

    def _parts(self, sums: PyTree, made: OfLayer) -> tuple[OfLayer, OfLayer]:
        """Returns what waits of a layer's gradients, and what is summed in its turn, behind the first step."""
        made = self._steps(sums)[0](made)
        late, in_turn = self.ahead.parts(made.grads)
        return made._replace(grads=late), made._replace(grads=in_turn)

    def _steps(self, sums: PyTree) -> list[Step]:
        """Returns what makes of a layer's gradients those that are added; the first waits for nothing."""
        return self._steps_with(self.ahead.to_shards, sums)

    def _late_steps(self, sums: PyTree) -> list[Step]:
        """Returns the steps after the first, of gradients that wait."""
        to_shards = self.ahead.to_shards
        if self._overwriting is not None:
            *firsts, last = to_shards
            read = self._overwriting.read
            to_shards = (*firsts, lambda grads: read(last(grads)))
        return self._steps_with(to_shards, sums)[1:]

    def _steps_with(self, to_shards: Sequence[Callable[[PyTree], PyTree]], sums: PyTree) -> list[Step]:
        # cast there, the product that makes them writes them so; cast where they are added, it takes another pass
        *firsts, last = map(_of_grads, (self.ahead.before_scatter, *to_shards))
        return [*firsts, lambda of: self.of_all(sums, last(of)), *map(_of_grads, self.ahead.reduce)]

    @property
    def _overwriting(self) -> Overwriting | None:
        return self.ahead.overwriting


def _of_grads(step: Callable[[PyTree], PyTree]) -> Step:
    return lambda of: of._replace(grads=step(of.grads))


def _run(steps: Sequence[Step], of: OfLayer) -> OfLayer:
    for step in steps:
        of = step(of)
    return of


def _zeros(shapes: PyTree) -> PyTree:
    """Returns zeros that are not constants, for which XLA would pass over the gradients once more in every turn."""
    return lax.optimization_barrier(jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes))
