"""Norm, clipping, unscaling, and naming the leaves that are not finite."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfb.gradients import clip_by_global_norm, global_norm, names_of, nonfinite_leaves, num_zeros, unscale


def test_norm_is_taken_in_at_least_float32():
    # 300^2 overflows float16, and 4096 ones + 1 is 4096 in bfloat16.
    assert global_norm({"a": jnp.full([4], 300.0, jnp.float16)}) == 600.0
    norm = global_norm([jnp.ones([4096], jnp.bfloat16), jnp.ones([1], jnp.bfloat16)])
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.sqrt(4097), rtol=1e-7)
    assert global_norm([jnp.ones(3, jnp.float32), jnp.ones(3, jnp.float64)]).dtype == jnp.float64


def test_clip_is_exact_or_torchs():
    grads = {"w": jnp.array([3.0, 4.0])}
    exact, coefficient = clip_by_global_norm(grads, global_norm(grads), 1.0)
    np.testing.assert_allclose(exact["w"], [0.6, 0.8], rtol=1e-15)
    np.testing.assert_allclose(coefficient, 0.2, rtol=1e-15)
    np.testing.assert_array_equal(exact["w"], optax.clip_by_global_norm(1.0).update(grads, ())[0]["w"])
    torch, _ = clip_by_global_norm(grads, global_norm(grads), 1.0, "torch")
    np.testing.assert_allclose(torch["w"], [0.599999880000024, 0.799999840000032], rtol=1e-12)


@pytest.mark.parametrize("max_norm", [None, 5.0, 6.0])
def test_what_is_within_the_norm_keeps_its_bits(max_norm):
    grads = {"w": jnp.array([3.0, 4.0], jnp.float32)}
    clipped, coefficient = clip_by_global_norm(grads, global_norm(grads), max_norm)
    assert coefficient == 1 and clipped["w"].dtype == jnp.float32
    np.testing.assert_array_equal(clipped["w"], grads["w"])


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), float("inf")])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match="use None to disable clipping"):
        clip_by_global_norm({}, jnp.float32(1), max_norm)


def test_an_unknown_clip_convention_is_refused():
    with pytest.raises(ValueError, match='must be "exact" or "torch", got "?\'?pytorch'):
        clip_by_global_norm({}, jnp.float32(1), 1.0, "pytorch")


def test_clipping_sees_the_unscaled_gradient():
    # The true norm is 5; clipping before unscaling would leave 0.000977.
    scaled = {"w": jnp.array([3.0, 4.0], jnp.float16) * 1024}
    grads = unscale(scaled, 1024.0)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_allclose(global_norm(grads), 5.0, rtol=1e-6)
    clipped, _ = clip_by_global_norm(grads, global_norm(grads), 1.0)
    np.testing.assert_allclose(global_norm(clipped), 1.0, rtol=1e-6)
    assert unscale(scaled, None) is scaled


def test_leaves_that_are_not_finite_are_named():
    grads = {"b": jnp.ones(2), "layers": {"w": jnp.array([1.0, jnp.nan]), "x": jnp.array([jnp.inf])}}
    flags = nonfinite_leaves(grads)
    assert names_of(flags, grads) == ["['layers']['w']", "['layers']['x']"]
    assert not jnp.isfinite(global_norm(grads))


def test_a_tree_without_leaves_is_finite_and_has_no_zeros():
    """As the gradients of a model that trains nothing are."""
    assert names_of(nonfinite_leaves({}), {}) == [] and num_zeros({}) == 0
    assert num_zeros({"a": jnp.eye(3), "b": jnp.float32(0), "c": -jnp.zeros(2, jnp.bfloat16)}) == 6 + 1 + 2
