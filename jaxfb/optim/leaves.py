"""Reads from a parameter's path its names, and whether it has all layers stacked."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from jaxfb.types import PyTree


def path_names(path: tuple) -> list[str]:
    """Returns the names of a jax key path, of dicts, attributes and sequences alike."""
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]


def has_word(path: tuple, *words: str) -> bool:
    """Returns whether one of the words, regular expressions, occurs in a name of the path, in either case."""
    return any(re.search(word, name.lower()) for name in path_names(path) for word in words)


def is_stacked(path: tuple) -> bool:
    """Returns whether a leaf has the path of a stacked one: under "layers", unless these are numbered (a list)."""
    return _stack(path) is not None


def stacked(params: PyTree) -> PyTree:
    """Returns which leaves are [num_layers, ...], a tree of bool: by their paths, and by their first dims.

    Where those under one "layers" differ, it is not a stack, but a module of that name.
    """
    firsts: dict[tuple | None, set] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        firsts.setdefault(_stack(path), set()).add(jnp.shape(leaf)[:1])

    def one(path, leaf):
        return is_stacked(path) and jnp.ndim(leaf) > 0 and len(firsts[_stack(path)]) == 1

    return jax.tree_util.tree_map_with_path(one, params)


def layer_ndims(params: PyTree) -> PyTree:
    """Returns how many dimensions each leaf has in one layer: a stacked leaf's leading num_layers is not counted."""
    return jax.tree.map(lambda leaf, in_stack: jnp.ndim(leaf) - in_stack, params, stacked(params))


def _stack(path: tuple) -> tuple | None:
    """Returns the names down to the "layers" that a leaf is stacked under, None where it is not."""
    names = path_names(path)
    if "layers" not in names:
        return None
    end = names.index("layers") + 1
    numbered = names[end:] and names[end].isdigit()
    return None if numbered else tuple(names[:end])
