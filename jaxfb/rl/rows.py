"""Rows in memory, in a seeded order: what an update of fine-tuning consumes, and a pass over held-out rows.

A position in the endless stream of rows is a number, as in
`jaxfb.data.loader`, so resuming needs none of what came before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxfb.batch_plan import BatchPlan, Window, padding_over_context
from jaxfb.data.order import row_order
from jaxfb.forward_backward import ForwardBackward, Packed
from jaxfb.forward_backward.packed import row_lengths
from jaxfb.metrics import arrays, scalars

PyTree = Any
Rows = dict[str, np.ndarray]


def count(rows: Rows) -> int:
    """Counts the rows."""
    return len(next(iter(rows.values())))


def digest(rows: Rows) -> str:
    """Returns 16 hexadecimal digits of the values of every leaf."""
    state = hashlib.blake2b(digest_size=8)
    for name in sorted(rows):
        state.update(f"{name} {rows[name].dtype}{rows[name].shape}".encode())
        state.update(np.ascontiguousarray(rows[name]).tobytes())
    return state.hexdigest()


def fill(rows: Rows, number: int) -> Rows:
    """Returns these rows, then rows of zeros, which weigh nothing."""
    missing = number - count(rows)
    return {n: np.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) for n, leaf in rows.items()}


class Stream:
    """The rows of each window; reshuffled each epoch, by the seed alone."""

    def __init__(self, rows: Rows, seed: int):
        self.rows = rows
        self._order = row_order(count(rows), seed)

    def read(self, window: Window) -> Rows:
        """Returns the window's rows, filled up with rows of zeros to the plan's number."""
        index = [self._order(window.start + k) for k in range(window.rows)]
        return fill({name: leaf[index] for name, leaf in self.rows.items()}, window.plan.rows)


def cut(batch: Rows, plan: BatchPlan) -> tuple[Any, float]:
    """Returns (what a step takes, share of its computed tokens that are padding)."""
    if plan.max_context:
        return batch, padding_over_context(plan, row_lengths(batch, plan).tolist())
    if plan.by_tokens:
        packed = Packed(batch, plan)
        return packed, packed.padding_fraction
    real = batch["segments"] > 0
    return batch, 1 - real.sum() / (plan.padded_rows * real.shape[1])


def batches(rows: Rows, plan: BatchPlan) -> Iterator[Rows]:
    """Yields all rows once, in order, in batches of the plan's size; the last is filled with rows of zeros."""
    for start in range(0, count(rows), plan.rows):
        part = {name: leaf[start : start + plan.rows] for name, leaf in rows.items()}
        yield fill(part, plan.rows)


def held_out_means(
    forward: ForwardBackward, model: Any, params: PyTree, rows: Rows, plan: BatchPlan
) -> dict[str, float]:
    """Returns every term and metric over all rows; sums and weights are added up before the one division.

    Of an array, such as the load of each expert, the smallest, the mean and the largest of its numbers.
    """
    sums: dict[str, list[np.ndarray]] = {}
    for batch in batches(rows, plan):
        out = forward(model, params, batch, plan, forward_only=True)
        for name, term in {**out.terms, **out.metrics}.items():
            if hasattr(term, "total"):
                pair = [np.asarray(term.total, np.float64), np.asarray(term.weight, np.float64)]
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0, 0.0]), pair, strict=True)]
    means = {name: _mean(*pair) for name, pair in sums.items()}
    named = scalars(means) | arrays(means)
    return {f"eval/{name}": value for name, value in named.items() if not isinstance(value, list)}


def _mean(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns total / weight, and 0 where nothing counts."""
    return np.divide(total, weight, out=np.zeros(np.shape(total)), where=np.asarray(weight) != 0)
