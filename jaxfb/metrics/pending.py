"""Device numbers to the host, one step late: the host asks for step k when step k+1 is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxfb.types import Last, Max, Min, Sum

REDUCED = (Sum, Max, Min, Last)


class Pending:
    """Holds the newest step's device metrics and hands back those of the step before: no wait for the newest.

    for step, batch in ...:
        state, metrics = train_step(state, batch)       # dispatched, not finished
        if arrived := pending.push(step, metrics):       # (step - 1, its numbers)
            log(*arrived)
    log(*pending.flush())
    """

    def __init__(self):
        self._held: tuple[int, Any] | None = None

    def push(self, step: int, metrics: Any) -> tuple[int, Any] | None:
        """Takes the metrics of `step`, any pytree; returns those of the one before on the host, or None."""
        arrived = self.flush()
        self._held = (step, metrics)
        return arrived

    def flush(self) -> tuple[int, Any] | None:
        """Waits for what is held and returns it; None if nothing is."""
        held, self._held = self._held, None
        return held and (held[0], jax.device_get(held[1]))


def scalars(tree: Any) -> dict[str, float | int | bool]:
    """Returns every single number in a pytree by its path, such as {"loss": 3.2, "terms/balance": 0.1}.

    A Sum, Max, Min or Last becomes its value; leaves with more than one element are left out (`arrays` has them).
    """
    return {name: leaf.item() for name, leaf in _named(tree) if leaf.size == 1}


def arrays(tree: Any) -> dict[str, float | int | list]:
    """Returns every array of several numbers by its path, as nested lists, with its "/min", "/mean" and "/max"."""
    named: dict[str, float | int | list] = {}
    for name, leaf in _named(tree):
        if leaf.size > 1:
            named[name] = leaf.tolist()
            named |= {f"{name}/{part}": getattr(leaf, part)().item() for part in ("min", "mean", "max")}
    return named


def _named(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the path and the numbers of every leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, REDUCED)
    ):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf)
