"""A product of tokens and a kernel, in the form that CPUs compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.models.products import product_of_tokens

draw = np.random.default_rng(0).normal
X, KERNEL, COTANGENT = draw(size=(3, 5, 4)), draw(size=(4, 6)), draw(size=(3, 5, 6))


def gradients(product):
    return jax.vjp(product, X, KERNEL)[1](COTANGENT)


def test_its_gradients_are_those_of_a_product():
    for ours, plain in zip(
        gradients(product_of_tokens), gradients(lambda x, kernel: x @ kernel), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-13)


def test_the_kernels_gradient_is_one_product_of_two_matrices():
    """The law holds without it: this is what the time on CPUs comes from."""
    dots = [
        eqn
        for eqn in jax.make_jaxpr(lambda: gradients(product_of_tokens))().eqns
        if "dot" in str(eqn.primitive)
    ]
    contracted = [eqn.params["dimension_numbers"][0][0] for eqn in dots]
    assert all(len(dims) == 1 for dims in contracted) and contracted


@pytest.mark.parametrize("argument, kept", [(0, [KERNEL.shape]), (1, [KERNEL.shape, X.shape])])
def test_its_input_is_not_kept_for_a_frozen_kernel(argument, kept):
    given = [X, KERNEL]
    _, vjp = jax.vjp(
        lambda one: product_of_tokens(*given[:argument], one, *given[argument + 1 :]), given[argument]
    )
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)] == kept


def test_an_output_that_nothing_reads_has_no_gradient():
    grads = jax.grad(lambda kernel: (product_of_tokens(X, kernel), jnp.sum(kernel))[1])(KERNEL)
    np.testing.assert_array_equal(grads, np.ones_like(KERNEL))
