"""Derivatives of gated activations that are written by hand equal those that JAX derives."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxfb.models.activations import gated
from jaxfb.models.variant import ACTIVATIONS


def numbers(dtype):
    rng = np.random.default_rng(0)
    gate = np.concatenate([rng.normal(size=60) * 4, [0.0, -0.0, 1e4, -1e4]])
    return jnp.asarray(gate, dtype), jnp.asarray(rng.normal(size=64), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_and_second_derivatives_are_those_of_the_function(activation):
    gate, up = numbers(jnp.float64)
    check_grads(partial(gated, activation), (gate[:60], up[:60]), order=2, rtol=1e-5, atol=1e-5)


OF_JAX = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


@pytest.mark.parametrize("activation", OF_JAX)
@pytest.mark.parametrize("dtype, rtol", [(jnp.float64, 1e-13), (jnp.float32, 2e-5), (jnp.bfloat16, 5e-2)])
def test_gradients_are_those_that_jax_derives(activation, dtype, rtol):
    gate, up = numbers(dtype)
    value, grads = jax.value_and_grad(lambda *both: jnp.sum(gated(activation, *both)), (0, 1))(gate, up)
    chex.assert_trees_all_equal_dtypes(grads, (gate, up))
    chex.assert_tree_all_finite((value, grads))
    wide = gate.astype(jnp.float64), up.astype(jnp.float64)
    derived = jax.grad(lambda gate, up: jnp.sum(OF_JAX[activation](gate) * up), (0, 1))(*wide)
    for ours, theirs in zip(grads, derived, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=rtol, atol=rtol)
