"""Gathers a layer's parameters while the layer before it computes (FSDP), and scatters gradients a layer late.

A loop over layers that gathers what it is about to use has to wait for it, and for the scatter of what it has just
computed. Here a turn of the loop starts with the gather for the next turn and the scatter for the one before, of which
the layer in between needs neither, so that the compiler can run both beside its products. Where a scatter is two
collectives (`steps_apart`), the second runs another layer later: were it right behind the first, every turn would wait
for both. The price is the memory of one more layer's parameters in the compute dtype, and in the backward of one
layer's gradients in the dtype of their sum (but see `overwriting.py`), and of what a first collective leaves of them.

Where only parameters of a layer's first half are gathered ahead, the second half's are gathered while the first half is
computed, and their gradients scattered while the backward computes those of the first half. What a loop carries has
its own memory through all of the loop, used or not (libtpu 0.0.48), so that this saves the second half's parameters and
gradients once:

| by libtpu 0.0.48, a layer -> half a layer ahead | HBM, GB | step, s |
| --- | --- | --- |
| 70B, v5p:8x8x8, fsdp 64 x tensor 8 | 4.72 -> 4.07 | 12.79 -> 12.55 |
| 8B at 32k tokens, v5p:4x4x4, fsdp 16 x context 4 | 8.62 -> 7.91 | 15.65 -> 15.58 |
| 8B at 128k tokens, v5p:4x4x4, fsdp 4 x context 16 | 10.19 -> 7.98 | 36.01 -> 35.93 |
| 8B, v5p:4x4x4, fsdp 64 | 5.86 -> 5.61 | 9.30 -> 10.07 |
| 8B, v6e:8x8, fsdp 64 | 5.86 -> 5.59 | 4.87 -> 5.70 |
| like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16 | 41.36 -> 37.87 | 14.27 -> 14.18 |
| Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8 | 28.11 -> 26.41 | 50.21 -> 53.05 |
| 70B, 512 H100, by XLA of jax 0.10.2 | 53.33 -> 48.03 | 5.05 -> 5.20 |

With a tensor axis it is faster as well, since that axis's reduce-scatters no longer wait behind those of FSDP: of 70B's
0.38 s were exposed, and 0.10 s are.

On v5e nothing is ahead unless it is asked for. Its compiler runs a gather beside the products in front of it by itself,
and a scatter beside nothing wherever it stands, so that half a layer ahead saves no time worth its memory:

| by libtpu 0.0.48, half a layer ahead -> not ahead | HBM, GB | step, s |
| --- | --- | --- |
| 8B, v5e:16x16, fsdp 256 | 3.77 -> 3.57 | 6.72 -> 6.71 |
| the same, remat=selective | 15.85 -> 14.44 | 6.34 -> 5.76 |
| the same, remat=selective, sums in bfloat16 | 15.97 -> 14.47 | 5.35 -> 5.13 |
| 8B, v5e:16x16, fsdp 128 x tensor 2 | 3.24 -> 3.28 | 7.73 -> 7.50 |
| 8B, v5e:4x4, fsdp 16 | 11.96 -> 11.75 | 106.6 -> 105.6 |
| the same, 4 rows, remat=offload | 12.82 -> 13.01 | 93.9 -> 94.1 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import get_abstract_mesh

from jaxfb.forward_backward.layers.overwriting import Overwriting
from jaxfb.forward_backward.layers.slot import read_layer
from jaxfb.parallel.row_order import in_rows
from jaxfb.parallel.stored_dtype import as_stored
from jaxfb.platforms.kinds import V5E
from jaxfb.recomputation import Half
from jaxfb.trainable import joined, parted
from jaxfb.types import PyTree


def gathers_ahead(
    asked: bool | Half | None, kind: str | None, gather: str | int, sharding: str | None
) -> bool:
    """Returns whether parameters in shards are gathered a layer ahead of their use, on devices of that kind.

    They must be gathered a layer at a time, and their gradients not be cut further in the loop (ZeRO-2). Unless it is
    asked for it is left to GPUs and TPUs but v5e: simulated devices on a CPU gain nothing by it.
    """
    wanted = kind not in (None, "cpu", V5E) if asked is None else bool(asked)
    return wanted and gather != "step" and sharding != "gradients"


def halves_pay(kind: str | None, tensor: int, context: int) -> bool:
    """Returns whether half a layer ahead was measured to take no more time than a layer ahead on such devices.

    With fsdp alone it was not.
    """
    return kind is not None and "TPU" in kind and (tensor > 1 or context > 1)


@dataclass(frozen=True)
class Ahead:
    """Functions between shards and whole arrays of one layer, or of some of its leaves.

    gather:     shards of parameters -> whole parameters.
    to_shards: steps, one after the other, from gradients of whole trained parameters to those of the shards.
    before_scatter: gradients of whole trained parameters -> in the dtype of their sum over fsdp, annotated as `tensor`
      cuts the parameters; where a loop carries them the partitioner would otherwise cut some along another dim, and
      exchange them in every turn.
    in_turn: patterns of names of the parameters that are gathered, and whose gradients are scattered, in the turn of
      their layer; all others a layer ahead, and a layer late.
    reduce: of the last microbatch, one step more (`last_microbatch.py`): gradients of the shards of all microbatches ->
      their sums over the devices that have the same shards.
    overwriting: of gradients that are scattered a layer late, where one layer's are written over those of another.
    hands_on: whether the loops over the layers hand on to each other what they have (`handed.py`).
    """

    gather: Callable[[PyTree], PyTree]
    to_shards: tuple[Callable[[PyTree], PyTree], ...]
    before_scatter: Callable[[PyTree], PyTree]
    in_turn: tuple[str, ...] = ()
    reduce: tuple[Callable[[PyTree], PyTree], ...] = ()
    overwriting: Overwriting | None = None
    hands_on: bool = False

    def parts(self, tree: PyTree) -> tuple[PyTree, PyTree]:
        """Returns a tree like parameters or gradients, pruned to what is ahead or late, and to what is in its turn."""
        return parted(self.in_turn, tree)

    def scan(
        self,
        one: Callable,
        carry: PyTree,
        shards: PyTree,
        others: PyTree,
        reverse: bool = False,
        first: int = 0,
        whole: PyTree = None,
        chunk: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Equals `lax.scan(lambda c, xs: one(c, gather(xs[0]), xs[1]), carry, (shards, others), reverse=reverse)`, with
        as many shards as there are others, from the place `first` on; returns the last layer's whole parameters too.

        whole: parameters of the first layer that runs, where they are gathered already (`gathered`).
        chunk: of shards of all chunks, [num_chunks, l, ...], the one whose layers run.

        Two layers are a turn of the loop, so that the parameters of one come to lie where those of the layer before
        it were; a loop that carried them from each layer to the next would copy them.
        """
        number = jax.tree.leaves(others)[0].shape[0]
        places = jnp.arange(number, dtype=jnp.int32)
        early, in_turn = self.parts(shards)

        def place_of(turn: jax.Array) -> jax.Array:
            return number - 1 - turn if reverse else turn

        def gathered(shards: PyTree, turn: jax.Array) -> PyTree:
            place = place_of(turn) + first if first else place_of(turn)
            return self.gather(_read(shards, place, chunk))

        def step(carried, turn):
            carry, whole = carried
            following = gathered(early, jnp.minimum(turn + 1, number - 1))
            now = gathered(in_turn, turn)
            carry, out = one(carry, joined(whole, now), read_layer(others, place_of(turn)))
            return (carry, following), out

        def pair(carried, turns):
            carried, first = step(carried, turns[0])
            # the second layer's turn too is behind the barrier: gathered earlier, the parameters of the next turn's
            # first layer could not lie where this turn's still are
            carried, second = step(*lax.optimization_barrier((carried, turns[1])))
            return carried, jax.tree.map(lambda *both: jnp.stack(both), first, second)

        carried = carry, self.gathered(shards, number - 1 + first if reverse else first, chunk, whole)
        even = number - number % 2
        carried, out = lax.scan(pair, carried, places[:even].reshape(-1, 2))
        out = jax.tree.map(lambda leaf: leaf.reshape(even, *leaf.shape[2:]), out)
        if number % 2:
            carried, last = step(carried, places[-1])
            out = jax.tree.map(lambda leaf, one: jnp.concatenate([leaf, one[None]]), out, last)
        if reverse:
            out = jax.tree.map(lambda leaf: leaf[::-1], out)
        # the last turn has gathered its own layer once more
        return carried[0], out, carried[1]

    def gathered(self, shards: PyTree, place: int, chunk: jax.Array | None, whole: PyTree = None) -> PyTree:
        """Returns the parameters that are gathered ahead of the layer at that place; whole: the same, if not None."""
        if whole is not None:
            return whole
        return self.gather(_read(self.parts(shards)[0], jnp.int32(place), chunk))


@dataclass(frozen=True)
class Late(Ahead):
    """The same for layers whose parameters need no gather: gradients alone are scattered, or reduced, a layer late."""

    def scan(
        self,
        one: Callable,
        carry: PyTree,
        shards: PyTree,
        others: PyTree,
        reverse: bool = False,
        first: int = 0,
        whole: PyTree = None,
        chunk: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns as `Ahead.scan`, with None for whole parameters; shards: parameters as `one` takes them."""
        number = jax.tree.leaves(others)[0].shape[0]

        def turn(carry: PyTree, xs: tuple) -> tuple[PyTree, PyTree]:
            place, other = xs
            return one(carry, read_layer(shards, place, chunk), other)

        places = jnp.arange(first, first + number, dtype=jnp.int32)
        return *lax.scan(turn, carry, (places, others), reverse=reverse), None


@dataclass(frozen=True)
class Gathered(Late):
    """The same for layers whose parameters stay gathered for the whole call."""


def _read(shards: PyTree, place: jax.Array, chunk: jax.Array | None) -> PyTree:
    return as_stored(jax.tree.map(_in_rows, read_layer(shards, place, chunk)))


def _in_rows(leaf: jax.Array) -> jax.Array:
    """Returns the same array, on TPUs in the order of its rows if it has three dims or more, as experts' matrices have.

    Only without a tensor axis; with one it was not measured. Products with transposed matrices ask for the other order.
    For the one layer that is gathered before the loop XLA carried that wish through the gather to the shards of all
    layers, and copied them to it and, in every microbatch, back: Mixtral 8x22B on v5p:4x4x8 took 33.1 GB and 53.4 s in
    place of 30.2 GB and 52.8 s (libtpu 0.0.48).
    """
    if leaf.ndim < 3 or get_abstract_mesh().shape.get("tensor", 1) > 1:
        return leaf
    return in_rows(leaf)
