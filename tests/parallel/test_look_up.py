"""An embedding's gradient: that of autodiff, but summed over a microbatch's tokens in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.look_up import look_up

VOCAB, WIDTH = 24, 8


def given(count, dtype):
    """Tokens of which one is nearly half, and another never there; cotangents that do not cancel."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(count) < 0.4, 3, rng.integers(0, VOCAB - 1, count)).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray(rng.normal(0.3, 1.0, (count, WIDTH)), dtype)


def gradient(tokens, cotangent, dtype):
    matrix = jnp.ones((VOCAB, WIDTH), dtype)
    _, vjp = jax.vjp(lambda matrix: look_up(matrix, tokens), matrix)
    (grad,) = vjp(cotangent)
    assert grad.dtype == dtype
    return np.asarray(grad, np.float64)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_wide_gradient_is_that_of_autodiff(dtype):
    tokens, cotangent = given(64, dtype)
    _, vjp = jax.vjp(lambda matrix: matrix[tokens], jnp.ones((VOCAB, WIDTH), dtype))
    np.testing.assert_array_equal(gradient(tokens, cotangent, dtype), vjp(cotangent)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(2048,), (4, 16), (1,), (0,)])
def test_a_narrow_gradient_is_the_sum_in_float32_rounded_once(dtype, shape):
    tokens, cotangent = given(int(np.prod(shape)), dtype)
    exact = np.zeros((VOCAB, WIDTH))
    np.add.at(exact, np.asarray(tokens), np.asarray(cotangent, np.float64))
    grad = gradient(tokens.reshape(shape), cotangent.reshape(*shape, WIDTH), dtype)
    np.testing.assert_allclose(grad, exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-5)


def test_autodiff_alone_is_less_exact():
    """The reason for the rule: should JAX sum these in float32 one day, it can go."""
    tokens, cotangent = given(2048, jnp.bfloat16)
    _, vjp = jax.vjp(lambda matrix: matrix[tokens], jnp.ones((VOCAB, WIDTH), jnp.bfloat16))
    exact = np.zeros((VOCAB, WIDTH))
    np.add.at(exact, np.asarray(tokens), np.asarray(cotangent, np.float64))
    of_autodiff = np.asarray(vjp(cotangent)[0], np.float64)
    assert np.abs(of_autodiff - exact)[3].max() > 0.01 * np.abs(exact)[3].max()


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
@pytest.mark.parametrize("ids", [np.int64, np.int8])
def test_tokens_outside_the_vocabulary_have_zeros_and_no_gradient(dtype, ids):
    """Negative ones too, which do not count from the end."""
    tokens, cotangent = jnp.asarray([1, VOCAB, -1, -100, 1, 99], ids), jnp.ones((6, WIDTH), dtype)
    rows = look_up(jnp.ones((VOCAB, WIDTH), dtype), tokens)
    assert rows.dtype == dtype and rows.sum(1).tolist() == [WIDTH, 0, 0, 0, WIDTH, 0]
    grad = gradient(tokens, cotangent, dtype)
    assert (grad[1] == 2).all() and grad.sum() == 2 * WIDTH


def test_ids_may_be_of_a_dtype_that_does_not_hold_the_size_of_the_vocabulary():
    matrix = jnp.arange(300.0)[:, None]
    np.testing.assert_array_equal(look_up(matrix, jnp.asarray([255, 3], jnp.uint8))[:, 0], [255, 3])


def of_mesh(mesh, **options):
    config = TransformerConfig(
        vocab_size=VOCAB, num_layers=2, hidden_size=16, num_heads=2, mlp_size=32, tied_embeddings=False
    )
    params = init_params(config, jax.random.key(0), jnp.float32)
    tokens = np.asarray(given(8 * 32, jnp.float32)[0]).reshape(8, 32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": np.ones((8, 32), np.float32)}
    plan = jaxfb.BatchPlan(
        rows=8, data_parallel=mesh.get("data", 1) * mesh.get("fsdp", 1), num_microbatches=2
    )
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    return np.asarray(fb(transformer(config), params, batch, plan).grads["embed"]["embedding"])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 1}, {}),
        ({"fsdp": 2, "tensor": 2}, {"fsdp_gather": "layer"}),
        ({"fsdp": 2}, {"fsdp_gather": "step"}),
        ({"pipe": 2, "tensor": 2}, {"head_placement": "vocabulary"}),
    ],
)
def test_a_model_in_bfloat16_is_as_near_to_float32_with_every_axis(mesh, options):
    wide = of_mesh({"data": 1})
    narrow = of_mesh(mesh, compute_dtype="bfloat16", **options)
    error = np.linalg.norm(narrow - wide, axis=1) / np.linalg.norm(wide, axis=1).max()
    assert error.max() < 0.03
