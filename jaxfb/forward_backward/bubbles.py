"""Decides what a pipeline's device computes in a tick in which it has nothing to do.

All devices walk the same ticks, so a device with nothing to do waits for the others whatever it does. On GPUs and TPUs
it computes what nobody reads: a branch would keep the compiler from hiding transfers behind the stage. Simulated
devices share the cores of one CPU, so there it leaves them to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfb.compat import primitives
from jaxfb.mesh import platform_here

PyTree = Any


@dataclass(frozen=True)
class Bubbles:
    """poison: what is computed in them is made of NaN, to show that nothing reads it.  skipped: nothing is computed."""

    poison: bool
    skipped: bool

    @classmethod
    def around(cls, stage: Any, poison: bool) -> Bubbles:
        """Returns the bubbles of a stage, given the jaxpr of its forward."""
        return cls(poison, skipped=not poison and platform_here() == "cpu" and not _meets_everybody(stage))

    def fill(self, valid: jax.Array, tree: PyTree) -> PyTree:
        """Returns the input of a stage."""
        if not self.poison:
            return tree
        return jax.tree.map(lambda leaf: jnp.where(valid == 1, leaf, jnp.full_like(leaf, jnp.nan)), tree)

    def unless_idle(self, valid: jax.Array, do: Callable[[], PyTree], idle: Callable[[], PyTree]) -> PyTree:
        """Returns do(); in a bubble, if computation is skipped, idle(), which must have the same shapes."""
        return lax.cond(valid == 1, do, idle) if self.skipped else do()


def _meets_everybody(stage: Any) -> bool:
    """Returns True if the stage contains a collective that spans stages, so no device may skip it.

    XLA's permutes on CPU wait for all devices of the mesh, other collectives for those of their group, which are of
    one stage. Which ones XLA adds for an automatic axis is not known yet.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = any(
        mesh.shape[axis] > 1
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    )
    return automatic or "ppermute" in primitives(stage)
