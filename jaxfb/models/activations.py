"""The gated activations of an MLP: its two projections of a token to the numbers that the third one reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

_ALPHA, _LIMIT = 1.702, 7.0


def _clamped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes gpt-oss's, whose halves are bounded."""
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * _ALPHA))


def _with_derivative(
    function: Callable[[jax.Array], jax.Array], derivative: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """Returns the elementwise function with this derivative in place of the one that JAX derives.

    XLA computes a derivative of few operations inside each matrix product that reads the gradient of `gate`. The one
    that JAX derives has more, and XLA ran it between the products, as a pass through HBM. Measured with libtpu 0.0.48:
    8B on v5p:4x4x4 took 9.70 s and 6.71 GB with JAX's derivative of silu, and takes 9.61 s and 6.55 GB with this one;
    the backward of one MLP of that size moved 3.4 GB with JAX's derivative of gelu, and 2.8 GB with this one. For
    gelu's approximation by tanh there was no difference, so it keeps JAX's.
    """

    @jax.custom_jvp
    def activation(gate: jax.Array) -> jax.Array:
        return function(gate)

    activation.defjvps(lambda tangent, _, gate: tangent * derivative(gate))
    return activation


def _slope_of_silu(gate: jax.Array) -> jax.Array:
    sigmoid = jax.nn.sigmoid(gate)
    return sigmoid + gate * sigmoid * (1 - sigmoid)


def _slope_of_gelu(gate: jax.Array) -> jax.Array:
    density = jnp.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + jax.lax.erf(gate * math.sqrt(0.5))) + gate * density


_GATES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": _with_derivative(jax.nn.silu, _slope_of_silu),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": _with_derivative(partial(jax.nn.gelu, approximate=False), _slope_of_gelu),
}


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns act(gate) * up, elementwise, of an activation of `jaxfb.models.variant.ACTIVATIONS`."""
    return _clamped_silu(gate, up) if activation == "clamped_silu" else _GATES[activation](gate) * up
