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


@pytest.mark.parametrize("dtype, rtol", [(jnp.float64, 1e-14), (jnp.float32, 2e-6), (jnp.bfloat16, 3e-2)])
def test_silu_is_that_of_jax_with_its_gradient(dtype, rtol):
    gate, up = numbers(dtype)

    def value_and_grads(act, *inputs):
        return jax.value_and_grad(lambda gate, up: jnp.sum(act(gate) * up), (0, 1))(*inputs)

    ours = jax.value_and_grad(lambda *both: jnp.sum(gated("silu", *both)), (0, 1))(gate, up)
    wide = gate.astype(jnp.float64), up.astype(jnp.float64)
    chex.assert_trees_all_equal_dtypes(ours[1], (gate, up))
    chex.assert_tree_all_finite(ours)
    theirs = value_and_grads(jax.nn.silu, *wide)[1]
    for mine, its in zip(ours[1], theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), its, rtol=rtol, atol=rtol)
