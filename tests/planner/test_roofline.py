"""Work at the peaks: products once; what exists in memory, written once and read where it is used; loops by length."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.planner.program import region_of, walk
from jaxfb.planner.roofline import flops, work_seconds

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


def test_a_conditional_runs_one_of_its_branches():
    def either(x):
        return lax.cond(x[0, 0] > 0, lambda: (x @ x.T) @ x, lambda: x)

    region = region_of(jax.make_jaxpr(either)(X))
    products = 2 * (8 * 8 * 16 + 8 * 16 * 8)
    assert work_seconds(region, 1.0, math.inf) == sum(n * flops(op) for op, n in walk(region)) == products

    def equal(x):
        return lax.cond(x[0, 0] > 0, lambda: x[:4] @ x[:4].T, lambda: x[4:] @ x[4:].T)

    region = region_of(jax.make_jaxpr(equal)(X))
    assert sum(n * flops(op) for op, n in walk(region)) == 2 * 4 * 4 * 16
