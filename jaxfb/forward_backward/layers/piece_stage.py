"""A stage that runs a piece of a microbatch's sequences, with what its layers keep of earlier pieces (keys and values).

A cache has that of every layer for the whole sequences of a microbatch. A forward writes the part of its own piece. A
backward reads the gradient of its own part, to which the backwards of later pieces have added, and adds to those of
earlier pieces; so pieces come back in the opposite order, and together they are the backward of the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.forward_backward.layers.layer_passes import LayerPasses, Layers, StageInputs
from jaxfb.forward_backward.layers.slot import FROM_START, Slot, empty_slots, read, write
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.target import Target
from jaxfb.forward_backward.sequential import sum_of_layers
from jaxfb.trainable import joined
from jaxfb.types import LossOutput, Piece, PyTree


class PieceInputs(NamedTuple):
    """The inputs of a stage besides hidden: a piece of a microbatch, the row keys, the whole microbatch, the piece's
    number.
    """

    microbatch: PyTree
    keys: jax.Array | None
    whole: PyTree
    number: jax.Array

    def of_layer(self, past: PyTree) -> StageInputs:
        """Returns the inputs of one layer, which kept `past` of earlier pieces."""
        return StageInputs(Given(self.microbatch, Piece(self.number, self.whole, past)), self.keys)


class Given(NamedTuple):
    """Stands in for the microbatch where a layer runs a piece of it."""

    microbatch: PyTree
    piece: Piece


class Cache(NamedTuple):
    """Selects a cache among several, leaves [num_slots, l, rows, length, ...]; valid: what is written counts."""

    slot: Slot
    valid: jax.Array

    def of_layer(self, place: jax.Array) -> PyTree:
        """Returns that of all pieces, [rows, length, ...]."""
        return self.slot.get(place)

    def part(self, place: jax.Array, number: jax.Array, like: PyTree) -> PyTree:
        """Returns that of one piece, [rows, tokens, ...] as the leaves of `like`."""

        def part(leaf, own):
            at, sizes = self._at(leaf, place, number, own), (1, 1, *own.shape)
            return read(leaf, at, sizes).reshape(own.shape)

        return jax.tree.map(part, self.slot.buffers, like)

    def with_part(self, place: jax.Array, number: jax.Array, values: PyTree) -> Cache:
        """Writes that of one piece."""
        before = self.part(place, number, values)

        def put(leaf, old, own):
            new = jnp.where(self.valid, own.astype(leaf.dtype), old)
            return write(leaf, new[None, None], self._at(leaf, place, number, own))

        buffers = jax.tree.map(put, self.slot.buffers, before, values)
        return self._replace(slot=self.slot._replace(buffers=buffers))

    def added(self, place: jax.Array, values: PyTree, begins: jax.Array) -> Cache:
        """Adds to that of all pieces; begins: to zeros in place of what is there."""

        def add(so_far, more):
            so_far = jnp.where(begins & self.valid, jnp.zeros_like(so_far), so_far)
            return so_far + jnp.where(self.valid, more.astype(so_far.dtype), 0)

        return self._replace(slot=self.slot.put(jax.tree.map(add, self.of_layer(place), values), place))

    def _at(self, leaf: jax.Array, place: jax.Array, number: jax.Array, own: jax.Array) -> tuple:
        first = number.astype(jnp.int32) * own.shape[1]
        return self.slot.index, place, *FROM_START, first, *FROM_START * (leaf.ndim - 4)


class PieceSlot(NamedTuple):
    """Names what a stage keeps of a piece's forward, None without a backward, and the cache of its microbatch."""

    kept: Slot | None
    cache: Cache


class PiecePasses(LayerPasses):
    """A layer forward and backward on a piece, whose backward has a third result: the cotangent of earlier pieces."""

    def _vjp(self, at_hand, hidden):
        """Returns ((hidden and own, totals), VJP to (trained params, hidden, past), the rest) of one layer."""
        params, given, rng = at_hand

        def plain(trained, hidden, past):
            piece = Piece(given.piece.number, given.piece.whole, past)
            return self._plain(joined(trained, params), hidden, Given(given.microbatch, piece), rng)

        return jax.vjp(plain, self._trained(params), hidden, given.piece.past, has_aux=True)


class PieceStage(Stage):
    """A run of layers over one of `num_pieces` pieces.

    Its `layer` takes (params, hidden, Given, keys) and returns ((hidden, its own part of the cache), LossOutput).
    """

    passes = PiecePasses

    def __init__(self, *arguments: Any, num_pieces: int, **options: Any):
        super().__init__(*arguments, **options)
        self._num_pieces = num_pieces

    def forward_of_piece(
        self, layers: Layers, hidden: PyTree, inputs: PieceInputs, slot: PieceSlot
    ) -> tuple[PyTree, LossOutput, PieceSlot]:
        """Returns (hidden, terms and metrics of the layers, of which there are none, the slot)."""
        keeps_input = self._keep == "input"

        def one(carry, xs):
            (before, kept, cache), (place, layer) = carry, (xs[0], Layers(*xs[1]))
            given = inputs.of_layer(cache.of_layer(place))
            (after, own), out, values = self._passes.forward(layer, before, given)
            kept = kept if kept is None or keeps_input else kept.put(values, place)
            cache = cache.with_part(place, inputs.number, own)
            return (self._if_real(layer, after, before), kept, cache), self._masked(layer, out)

        (after, kept, cache), out, _ = self._scan(one, (hidden, *slot), layers)
        kept = slot.kept.put(hidden) if slot.kept is not None and keeps_input else kept
        return after, sum_of_layers(out), PieceSlot(kept, cache)

    def backward_of_piece(
        self,
        layers: Layers,
        slot: PieceSlot,
        cotangent: PyTree,
        seeds: dict,
        inputs: PieceInputs,
        gradients: Cache,
        target: Target,
    ) -> tuple[PyTree, PyTree, Cache]:
        """Returns (target.sums with the gradient of the parameters added, cotangent of the stage's input, the cache of
        gradients).
        """

        def again(place, layer, before):
            return self._passes.run(layer, before, inputs.of_layer(slot.cache.of_layer(place)))[0]

        assert slot.kept is not None  # a program with a backward keeps it
        reads = self._reads(layers, slot.kept, again)
        own = self._own(layers, cotangent, inputs)
        begins = inputs.number == self._num_pieces - 1

        def one(carry, place, layer):
            cotangent, gradients, carried = carry
            later = gradients.part(place, inputs.number, own)
            later = jax.tree.map(lambda g, o: jnp.where(begins, 0, g).astype(o.dtype), later, own)
            given = inputs.of_layer(slot.cache.of_layer(place))
            kept, carried = reads.turn(carried, place)
            grads, before, past = self._passes.backward(layer, kept, (cotangent, later), seeds, given)
            gradients = gradients.added(place, past, begins)
            return (self._if_real(layer, before, cotangent), gradients, carried), grads

        carry = cotangent, gradients, reads.first()
        (before, gradients, _), sums, _ = self._add_up(one, carry, layers, target)
        return sums, before, gradients

    def empty_slots(
        self, layers: Layers, hidden: PyTree, inputs: PieceInputs, kept: int, caches: int
    ) -> PyTree:
        """Returns buffers (what is kept, caches, gradients of caches) of so many slots; arguments: shapes."""
        whole = self._whole_shapes(layers, hidden, inputs)

        def one(layers, hidden, inputs, past):
            return self._passes.forward(self._first(layers), hidden, inputs.of_layer(past))[2]

        past = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), whole)
        shapes = hidden
        if self._keep != "input":
            shapes = self._stacked(jax.eval_shape(one, layers, hidden, inputs, past), layers)
        wide = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), whole
        )
        return (
            empty_slots(shapes, kept, self._on_host),
            empty_slots(whole, caches),
            empty_slots(wide, caches if kept else 0),
        )

    def _own(self, layers: Layers, hidden: PyTree, inputs: PieceInputs) -> PyTree:
        """Returns shapes of a layer's part of the cache, [rows, tokens of a piece, ...]."""

        def alone(layers, hidden, inputs):  # as if no piece came before
            return self._passes.run(self._first(layers), hidden, inputs.of_layer(None))[1]

        return jax.eval_shape(alone, layers, hidden, inputs)

    def _whole_shapes(self, layers: Layers, hidden: PyTree, inputs: PieceInputs) -> PyTree:
        """Returns shapes of a cache, [l, rows, length, ...]."""

        def whole(own):
            rows, tokens, *rest = own.shape
            shape = (layers.index.shape[0], rows, tokens * self._num_pieces, *rest)
            return jax.ShapeDtypeStruct(shape, own.dtype)

        return jax.tree.map(whole, self._own(layers, hidden, inputs))
