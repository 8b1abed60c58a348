"""Chooses the parameters that are trained; the others are frozen: constants of the step.

A pruned tree has the nodes of the parameters, and None in place of each frozen leaf. JAX sees no leaf there, so that
nothing is differentiated, summed, reduced or stored for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxfb.refusal import Refused, shown

PyTree = Any
Patterns = tuple[str, ...]


def checked_patterns(given: Any) -> Patterns | None:
    """Returns patterns as a tuple; None is not a choice, so that every leaf is trained.

    Raises:
      ValueError: they are not a list of strings, or none.
    """
    if given is None:
        return None
    strings = isinstance(given, Sequence) and all(isinstance(one, str) and one for one in given)
    if isinstance(given, str) or not strings or not given:
        choices = [{"trainable": [given]}] if isinstance(given, str) and given else []
        raise Refused(
            f"trainable must be a list of patterns such as ['layers.attention.*'], got {shown(given)}; with none of "
            "them everything would be frozen; use None to train every parameter",
            [*choices, {"trainable": None}],
        )
    return tuple(given)


def name_of(path: tuple) -> str:
    """Returns the dotted name of a leaf, such as "layers.attention.query.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern is of a dotted name, or of a part of the tree above it; `*` stands for dots too."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def pruned(patterns: Patterns | None, params: PyTree) -> PyTree:
    """Returns the parameters that one of the patterns matches, with None in place of every other leaf.

    Raises:
      ValueError: a pattern matches no leaf.
    """
    if patterns is None:
        return params
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise Refused(
                f"trainable: no parameter matches {pattern!r}; the nearest are {', '.join(near)}",
                [{"trainable": [name]} for name in near],
            )
    return _matching(patterns, params, True)


def parted(patterns: Patterns, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns a tree pruned to the leaves that no pattern matches, and pruned to the others."""
    return _matching(patterns, tree, False), _matching(patterns, tree, True)


def _matching(patterns: Patterns, tree: PyTree, matched: bool) -> PyTree:
    def one(path: tuple, leaf: Any) -> Any:
        return leaf if any(matches(pattern, name_of(path)) for pattern in patterns) == matched else None

    return jax.tree_util.tree_map_with_path(one, tree)


def stored(patterns: Patterns | None, params: PyTree, frozen_dtype: Any = None) -> PyTree:
    """Returns the parameters with the frozen ones in a dtype of their own; None leaves them.

    Raises:
      ValueError: a pattern matches no leaf.
    """
    kept = pruned(patterns, params)
    if frozen_dtype is None:
        return params
    return jax.tree.map(lambda leaf, own: leaf.astype(frozen_dtype) if own is None else leaf, params, kept)


def like(template: PyTree, tree: PyTree) -> PyTree:
    """Returns the leaves of `tree` that a pruned tree has, with None in place of the others."""
    return jax.tree.map(lambda leaf, kept: None if kept is None else leaf, tree, template, is_leaf=_is_spec)


def joined(trained: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree`, itself perhaps pruned, with the leaves that a pruned tree has in place of its own."""
    keeps = lambda leaf: leaf is None or _is_spec(leaf)  # noqa: E731
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, tree, trained, is_leaf=keeps)


def is_trained(template: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree of bool like `tree`: which of its leaves a pruned tree has."""
    return jax.tree.map(lambda _, kept: kept is not None, tree, template, is_leaf=_is_spec)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
