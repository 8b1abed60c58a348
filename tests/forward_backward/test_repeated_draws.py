"""A loss function that draws from a constant key draws the same in every microbatch: it is warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb

KEY = jax.random.key(7)
BATCH = {"x": np.random.default_rng(0).normal(size=(4, 3))}
PLAN = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2)


def loss_fn(draw):
    """A loss function that multiplies hidden numbers [rows, 2] by draw(hidden, rng)."""

    def call(params, microbatch, rng):
        hidden = microbatch["x"] @ params["w"]
        return jaxfb.Sum(jnp.square(hidden * draw(hidden, rng)).sum(), hidden.shape[0])

    return call


def run(draw, **options):
    forward_backward = jaxfb.get_forward_backward_func()
    return forward_backward(loss_fn(draw), {"w": jnp.ones((3, 2))}, BATCH, PLAN, rng=0, **options)


def in_a_loop(hidden, rng):
    """Draws in each turn from the same key folded with the number of the turn."""

    def turn(carried, number):
        return carried * jax.random.uniform(jax.random.fold_in(KEY, number), hidden.shape), None

    return jax.lax.scan(turn, hidden, jnp.arange(2))[0]


def in_a_branch(hidden, rng):
    draw = lambda shape: jax.random.uniform(KEY, shape)  # noqa: E731
    return jax.lax.cond(hidden.sum() > 0, lambda: draw(hidden.shape), lambda: jnp.ones_like(hidden))


REPEATED = {
    "a key that it holds": lambda hidden, rng: jax.random.bernoulli(KEY, 0.5, hidden.shape),
    "a seed": lambda hidden, rng: jax.random.bernoulli(jax.random.key(0), 0.5, hidden.shape),
    "a call": lambda hidden, rng: jax.checkpoint(lambda h: h * jax.random.uniform(KEY, h.shape))(hidden),
    "a loop": in_a_loop,
    "a branch": in_a_branch,
}


@pytest.mark.parametrize("draw", REPEATED.values(), ids=REPEATED)
def test_numbers_drawn_from_a_constant_key_are_warned_of(draw):
    with pytest.warns(UserWarning, match="from a key that is a constant, .* the same in every microbatch"):
        run(draw)


def by_row(hidden, rng):
    return jax.vmap(lambda key: jax.random.uniform(key, hidden.shape[1:]))(rng)


def by_carried_keys(hidden, rng):
    """Carries keys through a loop, the first of which varies."""
    constant = jnp.broadcast_to(KEY, rng.shape)

    def turn(carried, _):
        keys, total = carried
        drawn = jax.vmap(lambda key: jax.random.uniform(key, hidden.shape[1:]))(keys)
        return (rng, total + drawn), None

    return jax.lax.scan(turn, (constant, hidden), None, length=2)[0][1]


def by_content(hidden, rng):
    """A key for each row that is made of the row's numbers."""
    number = hidden[:, 0].astype(jnp.int32)
    return jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(KEY, n), hidden.shape[1:]))(number)


@pytest.mark.parametrize("draw", [by_row, by_carried_keys, by_content])
def test_numbers_that_vary_are_not(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(draw)


def test_an_evaluation_may_draw_the_same_each_time():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(REPEATED["a key that it holds"], forward_only=True)
