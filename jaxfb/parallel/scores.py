"""Changes how attention's scores become probabilities: a soft cap, and sinks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scores(NamedTuple):
    """Changes the scores of attention before their softmax.

    softcap: they become softcap * tanh(scores / softcap) (Gemma 2).
    sinks: float[H], a further score of each head, beside those of the keys; its probability goes to nothing (gpt-oss).
    """

    softcap: float | None = None
    sinks: jax.Array | None = None

    @property
    def are_plain(self) -> bool:
        """Returns whether there is neither."""
        return self.softcap is None and self.sinks is None


PLAIN = Scores()


def soft_capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Returns softcap * tanh(scores / softcap); the scores themselves without one."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def slope(capped: jax.Array, softcap: float) -> jax.Array:
    """Returns the derivative of soft-capped scores by the scores, from the capped ones."""
    return 1 - (capped / softcap) ** 2
