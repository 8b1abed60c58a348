"""Maps the tensors of a Hugging Face directory to the arrays of jaxfb's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.pretrained.architectures import OUTER_NAMES, Architecture
from jaxfb.refusal import Refused

TURNED = re.compile(r"(\.kernel|experts\.\w+)$")  # stored there as [out, in], here as [in, out]


class Part(NamedTuple):
    """A tensor of a directory. index: its place in the leading dims of our array: (), (layer,) or (layer, expert)."""

    name: str
    index: tuple[int, ...]


class Leaf(NamedTuple):
    """An array of our parameters. shape: of all of it. turned: its tensors are transposed. parts: in order."""

    path: str
    shape: tuple[int, ...]
    turned: bool
    parts: tuple[Part, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Returns the shape of each tensor as it is stored there."""
        own = self.shape[len(self.parts[0].index) :]
        return own[::-1] if self.turned else own


def leaves_of(architecture: Architecture, sizes: TransformerConfig) -> dict[str, Leaf]:
    """Returns our arrays by dotted path, each with the tensors that it is made of.

    Raises:
      ValueError: the transformer has an array for which the architecture has no tensor.
    """
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
    named = {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    return {
        path: Leaf(path, shape, bool(TURNED.search(path)), _parts(architecture, sizes, path))
        for path, shape in named.items()
    }


def path_name(path: Any) -> str:
    """Returns a path of a tree as "layers.attention.query.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def tensor_shapes(leaves: Mapping[str, Leaf]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the directory by name."""
    return {part.name: leaf.part_shape for leaf in leaves.values() for part in leaf.parts}


def _parts(architecture: Architecture, sizes: TransformerConfig, path: str) -> tuple[Part, ...]:
    if not path.startswith("layers."):
        return (Part(_known(OUTER_NAMES, path, architecture), ()),)
    name = "model.layers.{layer}." + _known(
        architecture.layer_names, path.removeprefix("layers."), architecture
    )
    return tuple(_of_layers(name, sizes))


def _of_layers(name: str, sizes: TransformerConfig) -> Iterator[Part]:
    for layer in range(sizes.num_layers):
        if "{expert}" not in name:
            yield Part(name.format(layer=layer), (layer,))
            continue
        for expert in range(sizes.num_experts):
            yield Part(name.format(layer=layer, expert=expert), (layer, expert))


def _known(names: Mapping[str, str], path: str, architecture: Architecture) -> str:
    if path not in names:
        raise Refused(
            f"[hf] {architecture.class_name} has no tensor for {path}; such a model cannot be exported"
        )
    return names[path]
