"""Maps the tensors of a Hugging Face directory to the arrays of jaxfb's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import jax

from jaxfb.models import mtp
from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LEADING, place_of, stack_of
from jaxfb.models.transformer import init_params
from jaxfb.pretrained.family import Architecture
from jaxfb.pretrained.tensors import Place, Shape
from jaxfb.refusal import Refused
from jaxfb.trainable import name_of

Dim = TypeVar("Dim")
_TURNED = re.compile(r"(\.kernel|experts\.\w+)$")  # stored there as [out, in], here as [in, out]


class Part(NamedTuple):
    """A tensor of a directory, or what of it is ours.

    index: its place in the leading dims of our array: (), (layer,) or (layer, expert).
    shape: of the whole tensor.  cut: the part of it, one slice for each of its first dims; () is all of it.
    """

    name: str
    index: tuple[int, ...]
    shape: Shape
    cut: tuple[slice, ...] = ()

    def within(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns which part of the whole tensor a part of this part is."""
        filled = [*index, *[slice(None)] * (len(self.shape) - len(index))]
        cut = [*self.cut, *[slice(None)] * (len(self.shape) - len(self.cut))]
        ranges = [range(n)[of][part] for n, of, part in zip(self.shape, cut, filled, strict=True)]
        # the stop of every other one may be beyond the end
        return tuple(slice(r.start, min(r.stop, n), r.step) for r, n in zip(ranges, self.shape, strict=True))


class Leaf(NamedTuple):
    """An array of our parameters. shape: of all of it. turned: its tensors are transposed. parts: in order."""

    shape: Shape
    turned: bool
    parts: tuple[Part, ...]

    @property
    def part_shape(self) -> Shape:
        """Returns the shape of each part as it is stored there."""
        return turn(self.shape[len(self.parts[0].index) :], self.turned)


def turn(dims: tuple[Dim, ...], turned: bool) -> tuple[Dim, ...]:
    """Returns sizes, or slices, of dims with the last two exchanged if `turned`."""
    return (*dims[:-2], dims[-1], dims[-2]) if turned else dims


def leaves_of(architecture: Architecture, sizes: TransformerConfig) -> dict[str, Leaf]:
    """Returns our arrays by dotted path, each with the tensors that it is made of.

    Raises:
      ValueError: the transformer has an array for which the architecture has no tensor.
    """
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
    named = {name_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    return {path: _leaf(architecture, sizes, path, shape) for path, shape in named.items()}


def tensor_shapes(leaves: Mapping[str, Leaf]) -> dict[str, Shape]:
    """Returns the shape of every tensor of the directory by name."""
    return {part.name: part.shape for leaf in leaves.values() for part in leaf.parts}


def _leaf(architecture: Architecture, sizes: TransformerConfig, path: str, shape: Shape) -> Leaf:
    below, layers = _layers_at(path, sizes)
    found = (architecture.layer_names if layers else architecture.outer_names).get(below)
    if found is None:
        raise Refused(
            f"[hf] {architecture.class_name} has no tensor for {path}; such a model cannot be exported"
        )
    place = Place(found) if isinstance(found, str) else found
    turned = bool(_TURNED.search(path)) if place.turned is None else place.turned
    numbered = list(_of_layers(place.name, layers, sizes) if layers else [(place.name, ())])
    own = turn(shape[len(numbered[0][1]) :], turned)
    parts = tuple(Part(name, index, *place.within(own, sizes)) for name, index in numbered)
    return Leaf(shape, turned, parts)


def _layers_at(path: str, sizes: TransformerConfig) -> tuple[str, list[tuple[int, tuple[int, ...]]]]:
    """Returns the path below one layer, and the number of each layer that the array has with its place in it; a path of
    no layer, and an empty list, otherwise.
    """
    part, _, below = path.partition(".")
    stack, first = stack_of(sizes), 0
    if part == LEADING:
        name, _, below = below.partition(".")
        return below, [(place_of(name), ())]
    if part == mtp.NAME:
        depth, _, below = below.partition(".")
        own = below.removeprefix("block.")
        return (own if own != below else f"{mtp.NAME}.{below}"), [(sizes.num_layers + int(depth) - 1, ())]
    if part != "layers":
        return path, []
    if len(stack.period) > 1:
        name, _, below = below.partition(".")
        first = place_of(name)
    periods = range(stack.num_periods)
    return below, [(len(stack.leading) + len(stack.period) * k + first, (k,)) for k in periods]


def _of_layers(
    name: str, layers: list[tuple[int, tuple[int, ...]]], sizes: TransformerConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name of each layer's tensor, or of each expert's, with its place in our array."""
    name = "model.layers.{layer}." + name
    for layer, index in layers:
        if "{expert}" not in name:
            yield name.format(layer=layer), index
            continue
        for expert in range(sizes.num_experts):
            yield name.format(layer=layer, expert=expert), (*index, expert)
