"""Measures how far two trees of numbers are apart, leaf by leaf, and whether that is more than rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

PyTree = Any
SMALL = 1e-3  # of the largest leaf: what is smaller is judged by this, not by its own rounding


@dataclass(frozen=True)
class Difference:
    """Describes what differs: a quantity ("grads", "metrics", ...), the leaf of it, and by how much or how.

    size: relative difference, infinite where one alone is finite.  allowed: what rounding may make of it.
    problem: in words, where it is not a number: another structure, shape or dtype.
    """

    quantity: str
    leaf: str = ""
    size: float = 0.0
    allowed: float = 0.0
    problem: str = ""

    @property
    def found(self) -> bool:
        """Returns whether it is more than rounding; NaN is."""
        return bool(self.problem) or not self.size <= self.allowed

    def __str__(self) -> str:
        what = self.problem or f"off by {self.size:.1e}, {self.allowed:.0e} is allowed"
        return f"{self.quantity}{' ' if self.leaf else ''}{self.leaf}: {what}"


def compare(
    quantity: str,
    got: PyTree,
    want: PyTree,
    allowed: float,
    *,
    floor: float = SMALL,
    slack: PyTree = None,
    measured_by: PyTree = None,
) -> Difference:
    """Returns the largest difference of two trees, each leaf measured by the largest number in it.

    floor: the smallest measure of a leaf, as a share of the largest of all leaves.
    slack: tree like `want` of arrays, differences that do not count.
    measured_by: tree like `want`, whose numbers measure the differences in place of those of `want`.
    """
    if problem := _structural(got, want):
        return Difference(quantity, problem=problem)
    named, theirs = jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got)
    if not named:
        return Difference(quantity, allowed=allowed)
    free = jax.tree.leaves(slack) if slack is not None else [0.0] * len(named)
    measures = measures_of(jax.tree.leaves(want if measured_by is None else measured_by), floor)
    found = []
    for (path, leaf), other, slip, measure in zip(named, theirs, free, measures, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if problem := _of_kind(other, leaf):
            return Difference(quantity, name, problem=problem)
        found.append(Difference(quantity, name, apart(other, leaf, slip) / measure, allowed))
    return max(found, key=lambda one: one.size)


def measures_of(leaves: list, floor: float = SMALL) -> list[float]:
    """Returns each leaf's largest finite magnitude, at least `floor` of the largest of all; 1 where that is zero."""
    sizes = [_largest(leaf) for leaf in leaves]
    return [max(size, floor * max(sizes)) or 1.0 for size in sizes]


def apart(got: Any, want: Any, slack: Any = 0.0) -> float:
    """Returns the largest |got - want| beyond the slack; infinite where one alone is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        beyond = np.where(same, 0.0, np.maximum(np.abs(got - want) - np.asarray(slack, np.float64), 0.0))
    return float(np.max(np.where(np.isnan(beyond), np.inf, beyond), initial=0.0))


def _structural(got: PyTree, want: PyTree) -> str:
    ours, theirs = (str(jax.tree.structure(tree)) for tree in (got, want))
    return "" if ours == theirs else f"structure {ours}, not {theirs}"


def _of_kind(got: Any, want: Any) -> str:
    """Describes another shape or kind (float, int, bool); widths are compared where they are promised."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, not {list(want.shape)}"
    kinds = [_kind(array.dtype) for array in (got, want)]
    return "" if kinds[0] == kinds[1] else f"{kinds[0]} ({got.dtype}), not {kinds[1]}"


def _kind(dtype: np.dtype) -> str:
    return {"b": "bool", "i": "int", "u": "int"}.get(dtype.kind, "float")  # bfloat16's kind is "V"


def _largest(leaf: Any) -> float:
    leaf = np.abs(np.asarray(leaf, np.float64))
    return float(np.max(leaf, where=np.isfinite(leaf), initial=0.0))
