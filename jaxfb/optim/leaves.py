"""Reads from a parameter's path its names, and whether it has all layers stacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def path_names(path: tuple) -> list[str]:
    """Returns the names of a jax key path, of dicts, attributes and sequences alike."""
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def has_word(path: tuple, *words: str) -> bool:
    """Returns whether one of the words occurs in a name of the path, in either case."""
    return any(word in name.lower() for name in path_names(path) for word in words)


def is_stacked(path: tuple) -> bool:
    """Returns whether the leaf is [num_layers, ...]: under "layers", unless the layers are numbered (a list)."""
    names = path_names(path)
    if "layers" not in names:
        return False
    below = names[names.index("layers") + 1 :]
    return not (below and below[0].isdigit())


def layer_ndim(path: tuple, leaf: jax.Array) -> int:
    """Returns the number of dimensions of a leaf in one layer, without the leading num_layers of a stacked one."""
    return jnp.ndim(leaf) - is_stacked(path)
