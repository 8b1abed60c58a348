"""Work at the peaks: products once; what exists in memory, written once and read where it is used; loops by length."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.planner.program import region_of
from jaxfb.planner.roofline import work_seconds

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)


def chain(x, weights):
    """A product, its tanh fused with a scaling, a turn."""
    return lax.scan(lambda y, w: (2 * jnp.tanh(y @ w), None), x, weights)[0]


def seconds(rate, bandwidth):
    return work_seconds(region_of(jax.make_jaxpr(chain)(X, W)), rate, bandwidth)


def test_products_count_once_a_turn():
    assert seconds(1.0, math.inf) == 5 * 2 * 8 * 16 * 16


def test_what_is_fused_moves_nothing():
    rows, weight = 4 * 8 * 16, 4 * 16 * 16
    product, elementwise = 2 * rows + weight, 2 * rows
    assert seconds(math.inf, 1.0) == 5 * (product + elementwise)
