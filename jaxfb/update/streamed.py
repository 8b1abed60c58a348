"""Makes an update whose optimizer state waits in the host's memory, and travels through the devices as it is used.

Of an optimizer that treats all layers alike, one layer's state is on the devices at a time: a loop over the layers
reads it to judge the update, a second loop reads it again and writes it back. Of any other optimizer all of it is there
while the update is computed, when the activations are gone.

A TPU's compiler (libtpu 0.0.48) makes every transfer of the loops asynchronous: a leaf is read while the ones before it
are computed and written. There is no conditional around them, as other updates have, so that no branch needs a copy of
the arrays in the host's memory; a skipped update writes what it read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb import gradients
from jaxfb.optim import Optimizer
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.host_memory import fetched, put_back
from jaxfb.parallel.layers.slices import Slices, slices_of, stacked_moments, stacked_params
from jaxfb.trainable import joined, like
from jaxfb.types import Pipelined, PyTree
from jaxfb.update.apply import Update
from jaxfb.update.attempt import Measured, Trial, of_dtype
from jaxfb.update.train_state import TrainState


def streamed(update: Update, model: Any) -> Update:
    """Returns the same update for an optimizer state in the host's memory."""
    optimizer, counted = update.optimizer, update.counted
    alike = isinstance(optimizer, Optimizer) and optimizer.layers_alike
    by_layer = alike and isinstance(model, Pipelined) and (counted is None or counted.after is None)
    return (LayerStream if by_layer else WholeStream)(**vars(update))


@dataclass(frozen=True)
class WholeStream(Update):
    """Moves the whole optimizer state to the devices for an update, and back."""

    def _measured(self, state: TrainState, out: ForwardBackwardOutput, norm: Any) -> Measured:
        return super()._measured(self._on_devices(state), out, norm)

    def _changed(self, state: TrainState, out: ForwardBackwardOutput, trial: Trial) -> tuple[PyTree, PyTree]:
        state = self._on_devices(state)
        attempt = self._attempt(state, out, self.change(state, out), trial.grad_norm)
        old = (self.trained(state.params), state.opt_state)
        new = _picked(trial.applied, (attempt.params, attempt.opt_state), old)
        return put_back(new, (like(old[0], self.places.params), self.places.opt_state))

    def _on_devices(self, state: TrainState) -> TrainState:
        return replace(state, opt_state=fetched(state.opt_state, self.places.opt_state))


@dataclass(frozen=True)
class LayerStream(Update):
    """Moves one slice of the layers' optimizer state to the devices at a time, and back."""

    def _measured(self, state: TrainState, out: ForwardBackwardOutput, norm: Any) -> Measured:
        layers = self._layers(state)
        stacked, grads = layers.opened(), self._grads(state, out, layers)
        rest = _with(state, layers.rest())
        measured = self._measure(rest, self._attempt(rest, out, grads(None), norm))
        is_stacked = jax.tree.leaves(layers.stacked[0])

        def judged(sums, step):
            part = _with(state, layers.part(stacked, step))
            found = self._measure(part, self._attempt(part, out, grads(step), norm))
            return jax.tree.map(jnp.add, sums, _chosen(is_stacked, found)), None

        zeros = jax.tree.map(jnp.zeros_like, _chosen(is_stacked, measured))
        sums = jax.lax.scan(judged, zeros, jnp.arange(layers.slices.steps))[0]
        squares, bad = (
            [next(of_stacked) if flag else one for flag, one in zip(is_stacked, of_all, strict=True)]
            for of_stacked, of_all in zip(map(iter, sums), (measured.squares, measured.bad), strict=True)
        )
        return measured._replace(squares=squares, bad=bad)

    def _changed(self, state: TrainState, out: ForwardBackwardOutput, trial: Trial) -> tuple[PyTree, PyTree]:
        layers = self._layers(state)
        grads = self._grads(state, out, layers)

        def new(part, step):
            attempt = self._attempt(_with(state, part), out, grads(step), trial.grad_norm)
            return _picked(trial.applied, (attempt.params, attempt.opt_state), part)

        def written(stacked, step):
            return layers.put(stacked, new(layers.part(stacked, step), step), step), None

        steps = jnp.arange(layers.slices.steps)
        stacked = jax.lax.scan(written, layers.opened(), steps)[0]
        return layers.closed(stacked, put_back(new(layers.rest(), None), layers.places))

    def _given_places(self, trained: PyTree) -> PyTree:
        """Returns None: what the optimizer is given is a slice of the layers, which may be cut in another way."""

    def _layers(self, state: TrainState) -> Layers:
        params, places = self.trained(state.params), self.places
        flags = (stacked_params(params), stacked_moments(state.opt_state, params))
        return Layers.of((params, state.opt_state), flags, (like(params, places.params), places.opt_state))

    def _grads(
        self, state: TrainState, out: ForwardBackwardOutput, layers: Layers
    ) -> Callable[[Any], PyTree]:
        """Returns a function from a step to the gradients of its slice, as `change` returns them; None: of the rest."""
        if self.change_gradients is None:
            whole, finished = out.grads, lambda grads: gradients.unscale(grads, out.origin.grad_scale)
        else:
            whole, finished = self.change(state, out), lambda grads: grads
        of = Layers.of(whole, layers.stacked[0], layers.places[0], layers.slices)
        opened = of.opened()
        return lambda step: finished(of.rest() if step is None else of.part(opened, step))


@dataclass(frozen=True)
class Layers:
    """Cuts a tree into slices of its stacked leaves and the rest.

    A part has all leaves of the tree: where only some of them matter the others are zeros, which no program computes.

    stacked: tree of bool. places: NamedShardings.
    """

    arrays: PyTree
    stacked: PyTree
    places: PyTree
    slices: Slices

    @classmethod
    def of(cls, arrays: PyTree, stacked: PyTree, places: PyTree, slices: Slices | None = None) -> Layers:
        """Returns the tree's layers; slices: None takes as many as its places allow."""
        if slices is None:
            leaves = zip(*map(jax.tree.leaves, (stacked, arrays, places)), strict=True)
            cut = [(leaf, place) for flag, leaf, place in leaves if flag]
            slices = slices_of([leaf for leaf, _ in cut], [place for _, place in cut])
        return cls(arrays, stacked, places, slices)

    def opened(self) -> PyTree:
        """Returns the stacked leaves as `Slices.opened` returns them, with None in place of the others."""
        return jax.tree.map(
            lambda leaf, flag: self.slices.opened(leaf) if flag else None, self.arrays, self.stacked
        )

    def closed(self, opened: PyTree, rest: PyTree) -> PyTree:
        """Returns the whole tree of stacked leaves that are opened, and of the others."""
        return joined(jax.tree.map(self.slices.closed, opened), rest)

    def part(self, opened: PyTree, step: Any) -> PyTree:
        """Returns a slice of the opened leaves, on the devices."""
        places = like(opened, self.places)
        return joined(
            jax.tree.map(lambda leaf, place: self.slices.take(leaf, step, place), opened, places),
            jax.tree.map(self._blank, self.arrays, self.stacked),
        )

    def rest(self) -> PyTree:
        """Returns the leaves that are not stacked, on the devices."""
        return jax.tree.map(
            lambda leaf, flag, place: self._blank(leaf, flag) if flag else fetched(leaf, place),
            *(self.arrays, self.stacked, self.places),
        )

    def put(self, opened: PyTree, part: PyTree, step: Any) -> PyTree:
        """Returns the opened leaves with one slice replaced."""
        places, part = like(opened, self.places), like(opened, part)
        return jax.tree.map(
            lambda leaf, new, place: self.slices.put(leaf, new, step, place), opened, part, places
        )

    def _blank(self, leaf: jax.Array, flag: bool) -> jax.Array:
        if leaf.ndim < 2 and not flag:  # counters, and numbers that belong to no parameter
            return leaf
        return jnp.zeros(self.slices.shape(leaf) if flag else leaf.shape, leaf.dtype)


def _with(state: TrainState, part: PyTree) -> TrainState:
    params, opt_state = part
    return replace(state, params=joined(params, state.params), opt_state=opt_state)


def _chosen(flags: list[bool], measured: Measured) -> tuple[list, list]:
    """Returns squares and bad of the leaves with a flag."""
    both = (measured.squares, measured.bad)
    squares, bad = ([one for flag, one in zip(flags, some, strict=True) if flag] for some in both)
    return squares, bad


def _picked(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new arrays, of the dtypes of before, or the old ones where the update is skipped."""
    return jax.tree.map(lambda a, b: jnp.where(applied, of_dtype(a, b), b), new, old)
