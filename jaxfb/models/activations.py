"""The gated activations of an MLP: its two projections of a token to the numbers that the third one reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

_ALPHA, _LIMIT = 1.702, 7.0


def _clamped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes gpt-oss's, whose halves are bounded."""
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * _ALPHA))


_GATES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns act(gate) * up, elementwise, of an activation of `jaxfb.models.variant.ACTIVATIONS`."""
    return _clamped_silu(gate, up) if activation == "clamped_silu" else _GATES[activation](gate) * up
