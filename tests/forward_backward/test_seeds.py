"""What the backward is seeded with: the loss scale in every normalisation, and weights of either sign."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb import BatchPlan, LossOutput, Sum, get_forward_backward_func
from jaxfb.shared_options import NORMALIZATIONS

ROWS = 8
PLAN = BatchPlan(rows=ROWS, num_microbatches=4)
PARAMS = {"w": np.arange(1.0, 4.0)}
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, 3)), "count": np.arange(1.0, ROWS + 1)}


def loss(params, microbatch, rng):
    return Sum(((microbatch["x"] @ params["w"]) ** 2).sum(), microbatch["count"].sum())


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_gradients_carry_the_scale_and_the_loss_does_not(normalize):
    run = get_forward_backward_func(normalize=normalize)
    plain = run(loss, PARAMS, BATCH, PLAN)
    scaled = run(loss, PARAMS, BATCH, PLAN, grad_scale=8.0)
    chex.assert_trees_all_equal(scaled.grads, {"w": 8 * plain.grads["w"]})
    assert scaled.loss == plain.loss != 0


@pytest.mark.parametrize("normalize", ["global", "microbatch"])
def test_a_negative_weight_divides_like_any_other(normalize):
    """A term whose weight is -count is minus the term whose weight is count."""

    def negative(params, microbatch, rng):
        term = loss(params, microbatch, rng)
        return LossOutput({"a": term, "b": Sum(2 * term.total, -term.weight)})

    run = get_forward_backward_func(normalize=normalize)
    plain, other = (run(one, PARAMS, BATCH, PLAN) for one in (loss, negative))
    chex.assert_trees_all_close(other.grads, {"w": -plain.grads["w"]}, rtol=1e-12)
    np.testing.assert_allclose(other.loss, -plain.loss, rtol=1e-12)
    assert jnp.abs(plain.grads["w"]).min() > 0
