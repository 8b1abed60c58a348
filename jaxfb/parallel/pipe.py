"""The pipe axis: which layers each device holds, and how hidden states and layers travel along it.

All functions but `layout_of` run inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.parallel.collectives import psum
from jaxfb.refusal import Refused

PyTree = Any
SHIFT = {"next": 1, "prev": -1, "stay": 0}


@dataclass(frozen=True)
class Layout:
    """The layers of each chunk of each device.

    placement:        placement[device][chunk] is the stage.
    layers_per_stage: number of layers of each stage, in the order of stages.
    arranged:         whether the stacked layers come in the pipeline's order, each device's chunks one after the other,
                      and not in the model's. Stages of uneven length are then all stored as if they were as long as the
                      longest.
    """

    placement: tuple[tuple[int, ...], ...]
    layers_per_stage: tuple[int, ...]
    arranged: bool = False

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of the pipeline."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Returns how many stages each device holds."""
        return len(self.placement[0])

    @property
    def even(self) -> bool:
        """Returns whether every stage has as many layers; the stacked layer dim can then be cut over pipe."""
        return len(set(self.layers_per_stage)) == 1

    @property
    def exchanges(self) -> bool:
        """Returns whether the stages stand elsewhere than the contiguous cut of the model's order puts them."""
        in_place = list(range(self.num_devices * self.num_chunks))
        return self.even and [stage for row in self.placement for stage in row] != in_place

    @property
    def longest(self) -> int:
        """Returns the number of layers of the longest stage."""
        return max(self.layers_per_stage)

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the model."""
        return sum(self.layers_per_stage)

    @property
    def num_places(self) -> int:
        """Returns the length of stacked layers in the pipeline's order: that of the model, if stages are even."""
        return len(self.layers_per_stage) * self.longest

    @cached_property
    def index(self) -> list:
        """Returns [device][chunk][longest]: the layer in the model; places beyond a stage's last repeat a layer that
        exists.
        """

        def layers(stage):
            first, end = sum(self.layers_per_stage[:stage]), sum(self.layers_per_stage[: stage + 1])
            return [min(first + j, max(end - 1, 0)) for j in range(self.longest)]

        return [[layers(stage) for stage in row] for row in self.placement]

    @cached_property
    def real(self) -> list:
        """Returns [device][chunk][longest]: whether that place holds its own layer."""
        return [
            [[j < self.layers_per_stage[s] for j in range(self.longest)] for s in row]
            for row in self.placement
        ]

    @cached_property
    def rounds(self) -> list[tuple[list, list, list]]:
        """Plans how stages get from where contiguous cutting puts them to where the placement wants them.

        A list of (pairs (source, target), block each source sends, chunk each target fills); in every round a
        device sends at most one stage and receives at most one.
        """
        chunks = self.num_chunks
        moves = [
            (stage // chunks, device, stage % chunks, chunk)
            for device, row in enumerate(self.placement)
            for chunk, stage in enumerate(row)
        ]
        rounds = []
        while moves:
            chosen = _matching(moves, self.num_devices)
            moves = [move for move in moves if move not in chosen]
            sends, fills = [0] * self.num_devices, [0] * self.num_devices
            for source, target, block, chunk in chosen:
                sends[source], fills[target] = block, chunk
            rounds.append(([(move[0], move[1]) for move in chosen], sends, fills))
        return rounds


def layout_of(num_layers: int, placement: Sequence, layers_per_stage: Sequence[int] | None = None) -> Layout:
    """Cuts `num_layers` into the stages of a schedule's placement; a stage may have none and pass hidden on.

    Raises:
      ValueError: they do not divide and no explicit `layers_per_stage` is given, or it does not add up.
    """
    placement = tuple(map(tuple, placement))
    num_stages = sum(map(len, placement))
    if layers_per_stage is None:
        if num_layers % num_stages:
            raise Refused(_uneven(num_layers, num_stages, len(placement)))
        layers_per_stage = (num_layers // num_stages,) * num_stages
    layers_per_stage = tuple(layers_per_stage)
    if (
        len(layers_per_stage) != num_stages
        or sum(layers_per_stage) != num_layers
        or min(layers_per_stage) < 0
    ):
        balanced = _balanced(num_layers, num_stages)
        raise Refused(
            f"layers_per_stage={list(layers_per_stage)} must give each of {num_stages} stages its number of the "
            f"{num_layers} layers, 0 for a stage that passes hidden on; try {balanced}",
            [{"layers_per_stage": balanced}],
        )
    return Layout(placement, layers_per_stage)


def to_chunks(layers: PyTree, layout: Layout) -> PyTree:
    """Returns this device's layers as the placement wants them: leaves [num_chunks, longest, ...].

    From [num_layers / pipe, ...] (the cut of an even layout, in the order that it defines) or whole [num_layers, ...].
    """
    if layout.arranged:
        return jax.tree.map(lambda leaf: _blocks(leaf, layout), layers)
    if not layout.even:
        index = _mine(layout.index)
        return jax.tree.map(lambda leaf: leaf[index], layers)
    return jax.tree.map(lambda leaf: _exchange(_blocks(leaf, layout), layout, back=False), layers)


def from_chunks(grads: PyTree, layout: Layout, num_layers: int) -> PyTree:
    """Returns the inverse for gradients: back to the cut that they came in, or summed over pipe to whole
    [num_layers, ...].
    """
    if layout.arranged:
        return jax.tree.map(_joined, grads)
    if not layout.even:
        index = _mine(layout.index)
        zeros = lambda leaf: jnp.zeros((num_layers, *leaf.shape[2:]), leaf.dtype)  # noqa: E731
        return jax.tree.map(lambda leaf: psum(zeros(leaf).at[index].add(leaf), "pipe"), grads)
    return jax.tree.map(lambda leaf: _joined(_exchange(leaf, layout, back=True)), grads)


def rearranged(leaf: jax.Array, layout: Layout, back: bool) -> jax.Array:
    """Returns a device's share [num_layers / pipe, ...] of the pipeline's order from that of the model's, or `back`."""
    return _joined(_exchange(_blocks(leaf, layout), layout, back))


def padded(leaf: jax.Array, layout: Layout) -> jax.Array:
    """Returns whole stacked layers [num_layers, ...] in the pipeline's order, [num_places, ...]; zero where a stage is
    shorter than the longest.
    """
    index, real = (np.asarray(table).reshape(-1) for table in (layout.index, layout.real))
    return jnp.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf[index], 0)


def unpadded(leaf: jax.Array, layout: Layout) -> jax.Array:
    """Returns the inverse of `padded`."""
    index, real = (np.asarray(table).reshape(-1) for table in (layout.index, layout.real))
    places = np.flatnonzero(real)
    return leaf[places[np.argsort(index[places])]]


def shift(tree: PyTree, channel: str) -> PyTree:
    """Passes every device's value one place along the ring; "stay" leaves it on the device."""
    if channel == "stay":
        return tree
    size = lax.axis_size("pipe")
    pairs = [(device, (device + SHIFT[channel]) % size) for device in range(size)]
    with jax.named_scope(f"pipe_{channel}"):
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, "pipe", pairs), tree)


def _exchange(blocks: jax.Array, layout: Layout, back: bool) -> jax.Array:
    if not layout.exchanges:
        return blocks
    out = blocks
    for number, (pairs, sends, fills) in enumerate(layout.rounds):
        if back:
            pairs, sends, fills = [(target, source) for source, target in pairs], fills, sends
        moved = lax.ppermute(blocks[_mine(sends)], "pipe", pairs)
        # every block is filled; zeros to begin with, which wait for nothing, would be made before they are needed
        out = out.at[_mine(fills)].set(moved) if number else jnp.broadcast_to(moved, blocks.shape)
    return out


def _blocks(leaf: jax.Array, layout: Layout) -> jax.Array:
    return leaf.reshape(layout.num_chunks, layout.longest, *leaf.shape[1:])


def _joined(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _mine(table: Sequence) -> jax.Array:
    return lax.dynamic_index_in_dim(
        np.asarray(table), lax.axis_index("pipe"), keepdims=False, allow_negative_indices=False
    )


def _matching(moves: list, num_devices: int) -> list:
    """Returns a choice of moves with every source and every target once; there is one as long as all have equally
    many.
    """
    taken: dict[int, tuple] = {}

    def place(source: int, seen: set) -> bool:
        for move in moves:
            if move[0] != source or move[1] in seen:
                continue
            seen.add(move[1])
            if move[1] not in taken or place(taken[move[1]][0], seen):
                taken[move[1]] = move
                return True
        return False

    for source in range(num_devices):
        place(source, set())
    return list(taken.values())


def _balanced(num_layers: int, num_stages: int) -> list[int]:
    """Gives middle stages the odd layers, since the first and last also have embedding and head."""
    base, extra = divmod(num_layers, num_stages)
    first = (num_stages - extra) // 2
    return [base + (first <= stage < first + extra) for stage in range(num_stages)]


def _uneven(num_layers: int, num_stages: int, num_devices: int) -> str:
    chunks = num_stages // num_devices
    legal = [v for v in range(1, num_layers // num_devices + 1) if num_layers % (v * num_devices) == 0]
    advice = [f"chunks={min(legal, key=lambda v: abs(v - chunks))}"] if legal else []
    advice.append(f"{max(1, round(num_layers / num_stages)) * num_stages} layers")
    advice.append(f"layers_per_stage={_balanced(num_layers, num_stages)}")
    return (
        f"{num_layers} layers do not divide into {num_stages} stages "
        f"(pipe {num_devices} x chunks {chunks}); use {' or '.join(advice)}"
    )
