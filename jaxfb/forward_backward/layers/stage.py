"""A stage: a run of layers forward, and backward either whole or as input gradients now, weight gradients later.

What a slot of the pipeline holds between a forward and its backward is a `Residual` of every layer, the input of
every layer, or the stage's input alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.layers.ahead import Ahead, Gathered, Late
from jaxfb.forward_backward.layers.handed import Handed
from jaxfb.forward_backward.layers.late_scatter import LateScatter, Waiting
from jaxfb.forward_backward.layers.layer_passes import LayerPasses, Layers, StageInputs
from jaxfb.forward_backward.layers.reads import Reads
from jaxfb.forward_backward.layers.slot import Slot, empty_slots
from jaxfb.forward_backward.layers.target import OfLayer, Target
from jaxfb.forward_backward.reduce import masked
from jaxfb.forward_backward.sequential import as_is, sum_of_layers
from jaxfb.mesh import axis_size, platform_here
from jaxfb.parallel.row_order import in_rows
from jaxfb.types import LossOutput, PyTree

Again = Callable[[jax.Array, Layers, PyTree], PyTree]
"""Runs a layer's forward once more: (place, layer, its input) -> hidden after it."""
WRITTEN_OUT = 4
"""In a pipeline, backwards of at most so many layers are not a loop. Sums that a loop inside the loop over ticks
carries are moved out of fast memory and back in every tick; measured ahead of time for TPU v5e, where all of them fit
into VMEM otherwise. More layers make the program larger for nothing: their sums do not fit."""


def layers_written_out() -> int:
    """Returns the `written_out` of a pipeline's stages on the mesh in context: 0 on TPUs with an expert axis.

    There each layer receives rows of tokens into arrays without initial values. The TPU compiler gives such an array
    memory from the beginning of the computation that contains it, so layers that are written out in one computation
    have theirs all at once; the body of a loop contains those of one layer. Two layers of 8 experts a device on
    v5p:2x2x4, pipe 2 x fsdp 4 x expert 2: 16.0 GB written out, 10.6 GB in a loop, the same time (libtpu 0.0.48).
    """
    experts = axis_size(jax.sharding.get_abstract_mesh(), "expert")
    return 0 if experts > 1 and platform_here() == "tpu" else WRITTEN_OUT


class Stage:
    """Forward, backward and split backward of a run of layers.

    layer: (params, hidden, microbatch, rng) -> (hidden, LossOutput of its terms and metrics).
    keep: "residuals" keeps what each layer's backward reads; "inputs" keeps each layer's input and computes the
      layer again in its backward; "input" keeps the stage's input alone, and computes its forward once more
      in the backward for the inputs of the layers.
    padded: some of the layers may not be real; those leave hidden as it is.
    on_host: slots are in the host's memory.
    written_out: backwards of at most so many layers are written out, of more they are a loop.
    trained: a layer's parameters -> those that have a gradient, with None in place of the others.
    ahead: where layers are gathered a layer ahead of their use, or gradients are scattered or reduced a layer late;
      `layer` is then given what `ahead.scan` makes of the parameters.
    first, end: it runs the layers from first to before end (None: to the last) of those that it is given. Places are
      those among all that it is given; buffers and metrics are of its own layers.
    """

    passes = LayerPasses

    def __init__(
        self,
        layer: Callable,
        keep: str = "residuals",
        padded: bool = False,
        written_out: int = 0,
        on_host: bool = False,
        trained: Callable[[PyTree], PyTree] = lambda params: params,
        ahead: Ahead | None = None,
        first: int = 0,
        end: int | None = None,
    ):
        self._passes = self.passes(layer, keep, trained)
        self._keep, self._padded, self._written_out = keep, padded, written_out
        self._begin, self._end = first, end
        self._trained, self._ahead, self._on_host = trained, ahead, on_host

    @property
    def gathers_ahead(self) -> bool:
        """Returns whether layers are gathered before their use."""
        return self._ahead is not None

    @property
    def takes_whole(self) -> bool:
        """Returns whether it runs layers that stay gathered."""
        return isinstance(self._ahead, Gathered)

    def reducing(self, reduce: Callable[[PyTree], PyTree], before: Callable[[PyTree], PyTree]) -> Stage:
        """Returns a stage whose backward reads what this one's forward has kept, and reduces gradients a layer late.

        reduce: as of `Ahead`. before: casts a layer's gradients, where they are not scattered as well.
        """
        other, late = copy(self), Late(as_is, (), before)
        other._ahead = replace(late if self._ahead is None else self._ahead, reduce=(reduce,))
        return other

    def forward(
        self,
        layers: Layers,
        hidden: PyTree,
        inputs: StageInputs,
        slot: Slot | None = None,
        handed: Handed | None = None,
    ) -> tuple[PyTree, LossOutput, Slot | None, Handed | None]:
        """Returns (hidden, terms summed over the layers and metrics [l, ...], the slot with what the backward reads,
        what is handed to the backward).

        slot: None keeps nothing. handed: by the backward of the microbatch before, or by `hand_to_first`; None: nothing
          is handed on.
        """
        by_layer = None if self._keep == "input" else slot

        def one(carry, xs):
            (before, slot), (place, layer) = carry, (xs[0], Layers(*xs[1]))
            after, out, kept = self._passes.forward(layer, self._in_order(before), inputs)
            slot = None if slot is None else slot.put(kept, self._here(place))
            return (self._if_real(layer, self._in_order(after), before), slot), self._masked(layer, out)

        first = None if handed is None else handed.whole
        (after, by_layer), out, whole = self._scan(one, (hidden, by_layer), layers, whole=first)
        kept = slot.put(hidden) if slot is not None and self._keep == "input" else by_layer
        return after, sum_of_layers(out), kept, None if handed is None else handed._replace(whole=whole)

    def backward(
        self,
        layers: Layers,
        slot: Slot,
        cotangent: PyTree,
        seeds: dict,
        inputs: StageInputs,
        target: Target,
        handed: Handed | None = None,
    ) -> tuple[PyTree, PyTree, Handed | None]:
        """Returns (target.sums with the gradient of the parameters added, cotangent of the stage's input, what is
        handed to the next microbatch's forward).

        seeds: name -> cotangent of the total of each of the layers' terms. handed: by the forward. Where something is
          handed on, it has the gradients of the first layer, which are not yet in the sums.
        """
        reads = self._reads(layers, slot, self._again(inputs))

        def one(carry, place, layer):
            cotangent, carried = carry
            kept, carried = reads.turn(carried, place)
            grads, before = self._passes.backward(layer, kept, cotangent, seeds, inputs)
            return (self._if_real(layer, before, cotangent), carried), grads

        (before, _), sums, handed = self._add_up(one, (cotangent, reads.first()), layers, target, handed)
        return sums, before, handed

    def _in_order(self, hidden: PyTree) -> PyTree:
        """Returns hidden, in the order of its rows where residuals are kept, since it is one of them.

        The TPU's compiler otherwise keeps it in another order than that in which the backward reads it, and copies that
        of all layers between the two (libtpu 0.0.48, `remat=selective`: 8B on v5p:4x4x4 takes 7.64 s and 18.1 GB in
        place of 7.66 s and 20.0 GB, on v6e:8x8 4.10 s and 18.2 GB in place of 4.12 s and 20.0 GB). Where only inputs
        are kept, an order costs memory: with full recomputation 6.9 GB in place of 5.9 GB there.
        """
        return jax.tree.map(in_rows, hidden) if self._keep == "residuals" else hidden

    def hand_to_first(self, layers: Layers, target: Target) -> Handed | None:
        """Returns what is handed to the forward of the first microbatch; None: nothing is handed on."""
        if self._ahead is None or not self._ahead.hands_on:
            return None
        whole = self._ahead.gathered(layers.params, self._places(layers)[0], layers.chunk)
        return Handed(whole, self._scatter(target).nothing_yet(target.sums, self._of_last(layers)))

    def add_handed(self, target: Target, handed: Handed | None) -> PyTree:
        """Returns target.sums with the gradients added that the backward of the last microbatch has handed on."""
        if handed is None:
            return target.sums
        return self._scatter(target).to_the_end(target.sums, handed.waiting)

    def backward_input(
        self, layers: Layers, slot: Slot, cotangent: PyTree, seeds: dict, inputs: StageInputs, saved: Slot
    ) -> tuple[Slot, PyTree]:
        """Returns (saved with what `backward_weight` needs, cotangent of the stage's input)."""
        reads = self._reads(layers, slot, self._again(inputs))

        def one(carry, xs):
            (cotangent, saved, carried), (place, layer) = carry, (xs[0], Layers(*xs[1]))
            kept, carried = reads.turn(carried, place)
            now, before = self._passes.backward_input(layer, kept, cotangent, seeds, inputs)
            saved = saved.put(now, self._here(place))
            return (self._if_real(layer, before, cotangent), saved, carried), None

        (before, saved, _), _ = self._backwards(one, (cotangent, saved, reads.first()), layers)
        return saved, before

    def backward_weight(
        self, layers: Layers, slot: Slot, saved: Slot, seeds: dict, inputs: StageInputs, target: Target
    ) -> PyTree:
        """Returns target.sums with the gradient of the parameters added; call `backward_input` of the microbatch
        first.
        """

        def one(_, place, layer):
            kept = slot.get(self._here(place)) if self._keep == "residuals" else None
            waiting = saved.get(self._here(place))
            return None, self._passes.backward_weight(layer, kept, waiting, seeds, inputs)

        return self._add_up(one, None, layers, target)[1]

    def empty(self, layers: Layers, hidden: PyTree, inputs: StageInputs, number: int) -> PyTree:
        """Returns buffers of so many slots for what is kept of a forward, [number, l, ...] or, of the stage's input,
        [number, ...]; arguments: shapes.
        """

        def one(layers, hidden, inputs):
            return self._passes.forward(self._first(layers), hidden, inputs)[2]

        kept = hidden
        if self._keep != "input":
            kept = self._stacked(jax.eval_shape(one, layers, hidden, inputs), layers)
        return empty_slots(kept, number, self._on_host)

    def saved(self, layers: Layers, hidden: PyTree, seeds: dict, inputs: StageInputs) -> PyTree:
        """Returns shapes of what waits for `backward_weight`, [l, ...]."""

        def one(layers, before, seeds, inputs):
            layer = self._first(layers)
            kept = before if self._keep == "input" else self._passes.forward(layer, before, inputs)[2]
            return self._passes.backward_input(layer, kept, before, seeds, inputs)[0]

        return self._stacked(jax.eval_shape(one, layers, hidden, seeds, inputs), layers)

    def _reads(self, layers: Layers, slot: Slot, again: Again) -> Reads:
        """Returns the backwards' way to what they read."""
        return Reads(self._kept(layers, slot, again), self._places(layers), ahead=self._on_host)

    def _again(self, inputs: StageInputs) -> Again:
        return lambda _, layer, before: self._passes.run(layer, before, inputs)

    def _kept(self, layers: Layers, slot: Slot, again: Again) -> Callable[[jax.Array], PyTree]:
        """Returns place -> what the backward of that layer reads."""
        if self._keep != "input":
            return lambda place: slot.get(self._here(place))

        def one(before, xs):
            place, layer = xs[0], Layers(*xs[1])
            return self._if_real(layer, again(place, layer, before), before), before

        if len(places := self._places(layers)) == 1:
            return lambda place: slot.get()
        last, befores, _ = self._scan(one, slot.get(), layers, places[:-1])
        befores = jax.tree.map(lambda head, tail: jnp.concatenate([head, tail[None]]), befores, last)
        return lambda place: jax.tree.map(lambda leaf: leaf[self._here(place)], befores)

    def _backwards(
        self, one: Callable, carry: PyTree, layers: Layers, whole: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Runs `one` through (place, layer) from the last to the first; nothing is stacked.

        Returns (what it carries, whole parameters as of `_scan`).

        Written out by hand: what `lax.scan` unrolls becomes a function that is called, and the TPU's compiler ends the
        process where there is a `shard_map` over `tensor` in one (libtpu 0.0.42), as there is in splash attention's
        layers.
        """
        places = self._places(layers)
        if not self._is_written_out(layers):
            carry, _, whole = self._scan(one, carry, layers, reverse=True, whole=whole)
            return carry, whole
        for place in reversed(places):
            carry, here = self._in_turn(carry, jnp.int32(place))
            carry, _ = one(carry, (here, tuple(self._layer(layers, place))))
        return carry, None

    def _in_turn(self, carry: PyTree, place: jax.Array) -> tuple[PyTree, jax.Array]:
        """Returns the same; a layer that reads its slot at that place waits for the layers behind it, as in a loop.

        A compiler would otherwise compute all layers again before the first backward, or leave the products of weight
        gradients for the end: 8B at 131,072 tokens on 8 stages took 99.0 GB in place of 70.2 GB (v5p, libtpu 0.0.48).
        Not where gradients of whole layers are scattered late: that has work to hide in what it may do later (8B on
        pipe 8 x fsdp 8, 3.50 s in place of 3.63 s, for 9.0 GB in place of 7.7 GB). Half a layer has less (70B on pipe 8
        x fsdp 8 x tensor 8, five chunks of two layers, 16 microbatches: 1.91 s and 4.51 GB with the barrier, 1.95 s and
        4.90 GB without).
        """
        of_whole_layers = self._ahead is not None and not self._ahead.in_turn
        return (carry, place) if of_whole_layers else lax.optimization_barrier((carry, place))

    def _scan(
        self,
        one: Callable,
        carry: PyTree,
        layers: Layers,
        places: range | None = None,
        reverse: bool = False,
        whole: PyTree = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Equals `lax.scan` of `one` over (place, layer), where shards are gathered a layer ahead with whole layers.

        Returns (what it carries, what is stacked, whole parameters of the layer that ran last; None without `ahead`).

        whole: those of the layer that runs first, where they are gathered already.
        places: of the layers that are run; None: all of this stage. Where others are given too, a turn reads its layer
          from all of them: a part of the stack would be a copy of it.
        """
        places = self._places(layers) if places is None else places
        numbers = jnp.arange(places.start, places.stop, dtype=jnp.int32)
        if self._ahead is not None:

            def with_whole(carry, params, rest):
                place, index, real = rest
                return one(carry, (place, (params, index, real)))

            part = slice(places.start, places.stop)
            rest = numbers, layers.index[part], layers.real[part]
            first = places.start
            return self._ahead.scan(
                with_whole, carry, layers.params, rest, reverse, first, whole, layers.chunk
            )
        if layers.chunk is None and len(places) == layers.index.shape[0]:
            return *lax.scan(one, carry, (numbers, tuple(layers)), reverse=reverse), None

        def turn(carry, place):
            return one(carry, (place, tuple(layers.at(place))))

        return *lax.scan(turn, carry, numbers, reverse=reverse), None

    def _add_up(
        self, one: Callable, carry: PyTree, layers: Layers, target: Target, handed: Handed | None = None
    ) -> tuple[PyTree, PyTree, Handed | None]:
        """Runs `one(carry, place, layer) -> (carry, gradients)` from the last layer to the first.

        Returns (what it carries, target.sums with all gradients added but what is handed on, that). With `ahead` they
        are summed over devices, and added, a layer late (`LateScatter`).
        """
        if self._ahead is None:
            return *self._add_at_once(one, carry, layers, target), None
        return self._add_late(one, carry, layers, target, handed)

    def _add_at_once(
        self, one: Callable, carry: PyTree, layers: Layers, target: Target
    ) -> tuple[PyTree, PyTree]:
        def turn(carried, xs):
            (carry, sums), (place, layer) = carried, (xs[0], Layers(*xs[1]))
            carry, grads = one(carry, place, layer)
            return (carry, target.add(sums, OfLayer(place, layer.real, grads), self._padded)), None

        return self._backwards(turn, (carry, target.sums), layers)[0]

    def _add_late(
        self, one: Callable, carry: PyTree, layers: Layers, target: Target, handed: Handed | None
    ) -> tuple[PyTree, PyTree, Handed | None]:
        scatter = self._scatter(target)

        def turn(carried, xs):
            (carry, sums, waiting), (place, layer) = carried, (xs[0], Layers(*xs[1]))
            # no barrier with the cotangent: were the scatters over before this layer's gradients are made, a step of
            # 8B on v5p:4x4x4 would take 11.6 s in place of 9.9 s
            sums, waiting, free = scatter.step_further(sums, waiting)
            carry, grads = one(carry, place, layer)
            return (carry, *scatter.take(sums, waiting, OfLayer(place, layer.real, grads), free)), None

        whole, waiting = handed or (None, self._nothing_yet(layers, target))
        (carry, sums, waiting), whole = self._backwards(turn, (carry, target.sums, waiting), layers, whole)
        if handed is None:
            return carry, scatter.to_the_end(sums, waiting), None
        return carry, sums, Handed(whole, waiting)

    def _nothing_yet(self, layers: Layers, target: Target) -> Waiting:
        """Returns what waits before the last layer's backward; a loop carries as much as waits later, of zeros."""
        if self._is_written_out(layers):
            return ()
        return self._scatter(target).nothing_yet(target.sums, self._of_last(layers))

    def _is_written_out(self, layers: Layers) -> bool:
        """Returns whether the backwards of the layers are written out, and are not a loop."""
        return len(self._places(layers)) <= self._written_out

    def _scatter(self, target: Target) -> LateScatter:
        assert self._ahead is not None
        if self._ahead.reduce:
            return LateScatter(self._ahead, target.put, target.of_all)
        return LateScatter(self._ahead, partial(target.add, padded=self._padded), lambda _, of: of)

    def _of_last(self, layers: Layers) -> OfLayer:
        """Returns the last layer, with the shapes of its trained parameters in place of gradients."""
        last, shapes = self._places(layers)[-1], jax.eval_shape(self._first, layers).params
        return OfLayer(jnp.int32(last), layers.real[last], self._trained(shapes))

    def _first(self, layers: Layers) -> Layers:
        return self._layer(layers, self._begin)

    def _places(self, layers: Layers) -> range:
        """Returns the places of this stage's layers among those that it is given."""
        return range(layers.index.shape[0])[self._begin : self._end]

    def _here(self, place: jax.Array) -> jax.Array:
        """Returns the place among this stage's own layers."""
        return place - self._begin if self._begin else place

    def _stacked(self, one: PyTree, layers: Layers) -> PyTree:
        """Returns the shapes of all layers from the shapes of one."""
        number = len(self._places(layers))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), one)

    def _layer(self, layers: Layers, place: int) -> Layers:
        """Returns one layer as `layer` takes it."""
        layer = layers.at(jnp.int32(place))
        return layer if self._ahead is None else layer._replace(params=self._ahead.gather(layer.params))

    def _if_real(self, layer: Layers, yes: PyTree, no: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(layer.real, a, b), yes, no) if self._padded else yes

    def _masked(self, layer: Layers, tree: PyTree) -> PyTree:
        return masked(layer.real, tree) if self._padded else tree
