"""Gradients that a layer's backward sums in float32 reach the engine's sums without being rounded to the parameters'
16 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close

import jaxfb
from jaxfb.forward_backward.layers.unrounded import unrounded
from jaxfb.hlo import SELDOM
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

SIZES = {
    "vocab_size": 32,
    "num_layers": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "mlp_size": 32,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_mlp_size": 8,
}
EXPERTS = "tensor<4x16x8xf32>) -> tensor<4x16x8x{}>"


def wide_sum(params, x):
    """A product whose matrix is read in float32, as a sum of outer products in float32 needs it."""
    return x.astype(jnp.float32) @ params["w"].astype(jnp.float32) + params["b"]


def squared(params, x):
    return jnp.sum(wide_sum(params, x * params["gain"].astype(x.dtype)) ** 2), jnp.sum(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_gradients_are_those_before_the_last_rounding(dtype, wrap):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(6, 5)), dtype), "b": jnp.asarray(rng.normal(size=5), dtype)}
    params["gain"] = jnp.ones((), jnp.float32)  # its gradient is made wider at the end
    x = jnp.asarray(rng.normal(size=(7, 6)), dtype)
    _, vjp = jax.vjp(wrap(squared), params, x)
    cotangents = jnp.float32(1).astype(jax.eval_shape(squared, params, x)[0].dtype), jnp.ones((), dtype)
    rounded, of_x = vjp(cotangents)
    found, same = jax.jit(lambda c: unrounded(vjp, params, c))(cotangents)
    wide = "float32" if jnp.finfo(dtype).bits == 16 else dtype
    assert found["w"].dtype == wide and rounded["w"].dtype == same.dtype == dtype
    assert found["gain"].dtype == "float32"
    assert bool(jnp.all(found["w"].astype(dtype) == rounded["w"])) and bool(jnp.all(same == of_x))
    if dtype == "bfloat16":
        assert not bool(jnp.all(found["w"] == rounded["w"]))


def program(gather_ahead=True, **options):
    model, mesh = transformer(TransformerConfig(**SIZES)), jaxfb.make_mesh(fsdp=2)
    params = init_params(TransformerConfig(**SIZES), jax.random.key(1), jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 32, (8, 8), dtype=np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": np.ones((8, 8))}
    fb = jaxfb.get_forward_backward_func(mesh, gather_ahead=gather_ahead, **options)
    plan = jaxfb.BatchPlan(rows=8, data_parallel=2, num_microbatches=2)
    return jax.jit(lambda p, b: fb(model, p, b, plan).grads), params, batch


@pytest.mark.parametrize("remat", ["full", "halves", "selective"])
def test_no_gradient_of_experts_is_rounded_in_the_engine(remat):
    step, params, batch = program(compute_dtype="bfloat16", remat=remat)
    text = step.lower(params, batch).as_text()
    assert EXPERTS.format("bf16") not in text
    rounding, *_ = program(gather_ahead=False, compute_dtype="bfloat16", remat=remat)
    grads, wanted = step(params, batch), rounding(params, batch)
    for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert grad.dtype == "float32"
        assert np.abs(grad - other).max() < 2**-6 * np.abs(other).max()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_what_is_written_out_keeps_its_named_scopes(wrap):
    def scoped(params, x):
        with jax.named_scope("outside"):
            inside = wrap(jax.named_scope("inside")(wide_sum))
            return jnp.sum(inside(params, x) ** 2)

    params = {"w": jnp.ones((6, 5), jnp.bfloat16), "b": jnp.ones(5, jnp.bfloat16)}

    def grads(x):
        _, vjp = jax.vjp(scoped, params, x)
        return unrounded(lambda c: vjp(c), params, jnp.float32(1))

    text = jax.jit(grads).lower(jnp.ones((7, 6), jnp.bfloat16)).as_text(debug_info=True)
    products = [line for line in text.splitlines() if "loc(" in line and "dot_general" in line]
    assert any("outside" in line and "inside" in line for line in products)


@pytest.mark.slow
def test_a_split_backward_keeps_the_name_of_the_loop_that_seldom_turns():
    """By it the planner knows that the loop usually costs nothing."""
    sizes = TransformerConfig(**SIZES | {"num_layers": 4, "expert_buffer": 1.25})
    model, mesh = transformer(sizes), jaxfb.make_mesh(pipe=2, expert=2)
    params = jax.eval_shape(lambda: init_params(sizes, jax.random.key(1)))
    tokens = jax.ShapeDtypeStruct((8, 512), np.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": jax.ShapeDtypeStruct((8, 512), np.float32)}
    fb = jaxfb.get_forward_backward_func(mesh, "zero_bubble", remat="selective")
    plan = jaxfb.BatchPlan(rows=8, data_parallel=2, num_microbatches=4)
    step = jax.jit(lambda p, b: fb(model, p, b, plan).grads)
    text = step.lower(params, batch).as_text(debug_info=True)
    assert re.search(rf'"B/[^"]*transpose[^"]*{SELDOM}', text)


def test_sums_in_16_bits_take_gradients_in_16_bits():
    step, params, batch = program(compute_dtype="bfloat16", accum_dtype="bfloat16", remat="full")
    grads = step(params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"bfloat16"}


def test_in_float32_the_program_is_the_same():
    step, params, batch = program(remat="full")
    of_one, *_ = program(gather_ahead=False)
    close(jax.tree.map(np.float64, step(params, batch)), of_one(params, batch), 2e-6)
