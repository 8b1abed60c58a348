"""The arrays that a device of a pipeline carries from tick to tick, and access to one of their slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.slot import Slot
from jaxfb.types import LossOutput, PyTree


class Weights(NamedTuple):
    """Parameters, or their gradients, as a device of the pipeline holds them: layers [num_chunks, l, ...]."""

    outer: PyTree
    layers: PyTree


class Buffers(NamedTuple):
    """The arrays that a device carries from tick to tick. Slots are the leading dim."""

    residual: PyTree
    activation: PyTree
    gradient: PyTree
    cotangent: PyTree
    arriving: dict[str, PyTree]
    leaving: PyTree
    grads: Any  # Weights; None in a program without a backward
    records: LossOutput
    layer_records: LossOutput


class Shapes(NamedTuple):
    """The shapes of a stage's inputs, and of its terms and metrics."""

    inputs: StageInputs
    layers: Layers
    hidden: PyTree
    out: LossOutput


def get(tree: PyTree, slot: jax.Array) -> PyTree:
    """Reads one slot of each leaf."""
    return Slot(tree, slot).get()


def put(tree: PyTree, slot: jax.Array, values: PyTree) -> PyTree:
    """Writes one slot of each leaf."""
    return Slot(tree, slot).put(values).buffers


def add(tree: PyTree, slot: jax.Array, values: PyTree) -> PyTree:
    """Adds values to one slot of each leaf, in the leaf's dtype."""
    return jax.tree.map(lambda leaf, value: leaf.at[slot].add(value.astype(leaf.dtype)), tree, values)
