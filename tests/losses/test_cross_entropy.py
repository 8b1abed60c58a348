"""Chunked cross entropy equals the plain formula, its gradient too, and never holds all the logits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.cross_entropy import chunked_cross_entropy
from jaxfb.losses.language_model import next_token_loss
from jaxfb.platforms.compat import equations

ROWS, SEQ, WIDTH, VOCAB = 3, 7, 8, 29


def _inputs(dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (ROWS, SEQ, WIDTH), dtype)
    kernel = jax.random.normal(keys[1], (WIDTH, VOCAB), dtype)
    targets = jax.random.randint(keys[2], (ROWS, SEQ), 0, VOCAB, jnp.int32)
    mask = jnp.round(2 * jax.random.uniform(keys[3], (ROWS, SEQ), jnp.float32), 1)
    return hidden, kernel, targets, mask.at[1].set(0)


def _plain(hidden, kernel, targets, mask):
    log_probs = jax.nn.log_softmax(hidden @ kernel)
    return -jnp.sum(mask * jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0])


def _chunked(hidden, kernel, targets, mask, chunk):
    return chunked_cross_entropy(hidden, kernel, targets, mask, chunk=chunk).loss_sum


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_loss_and_gradients_equal_the_plain_formula_for_every_chunk(chunk):
    inputs = _inputs()
    expected, expected_grads = jax.value_and_grad(lambda *a: 0.3 * _plain(*a), (0, 1))(*inputs)
    chunked = lambda *a: 0.3 * _chunked(*a, chunk)  # noqa: E731
    run = jax.jit(lambda *a: (chunked(*a), *jax.value_and_grad(chunked, (0, 1))(*a)))
    forward_only, loss, grads = run(*inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), grads, expected_grads)
    np.testing.assert_allclose(forward_only, expected, rtol=1e-13)


def test_masked_slots_are_inert_whatever_they_hold():
    hidden, kernel, targets, mask = _inputs()
    grad = jax.jit(jax.value_and_grad(lambda h, k, t: _chunked(h, k, t, mask, 4), (0, 1)))
    clean = grad(hidden, kernel, targets)
    dirty = grad(
        jnp.where(mask[..., None] == 0, jnp.nan, hidden), kernel, jnp.where(mask == 0, -100, targets)
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_scores_are_those_of_the_counted_tokens():
    hidden, kernel, targets, mask = _inputs()
    out = chunked_cross_entropy(hidden, kernel, targets, mask, chunk=6)
    logits = hidden @ kernel
    correct = jnp.argmax(logits, -1) == targets
    np.testing.assert_allclose(out.correct_sum, jnp.sum(mask * correct), rtol=1e-12)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.log_probs, jnp.where(mask != 0, expected, 0), atol=1e-13)
    ties = chunked_cross_entropy(jnp.zeros_like(hidden), kernel, targets, mask, chunk=6)
    np.testing.assert_allclose(ties.correct_sum, jnp.sum(mask * (targets == 0)), rtol=1e-12)


@pytest.mark.parametrize("dtype, close", [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)])
def test_half_precision_sums_in_float32(dtype, close):
    hidden, kernel, targets, mask = _inputs(dtype)
    wide = [hidden.astype(jnp.float32), kernel.astype(jnp.float32), targets, mask]
    expected, expected_grads = jax.value_and_grad(_plain, (0, 1))(*wide)
    loss, grads = jax.jit(jax.value_and_grad(lambda *a: _chunked(*a, 4), (0, 1)))(
        hidden, kernel, targets, mask
    )
    assert loss.dtype == jnp.float32 and grads[0].dtype == grads[1].dtype == dtype
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs, atol=close * float(jnp.abs(theirs).max())
        )


@pytest.mark.slow
def test_float16_keeps_the_tail_of_the_softmax():
    """Probabilities near float16's smallest number must survive before any loss scale could lift them."""
    kernel = jnp.concatenate([jnp.full((1, 1), 15.0), jnp.zeros((1, 31))], axis=1)
    hidden, targets, mask = jnp.ones((1, 4, 1)), jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4))

    def grad(dtype):
        scaled = lambda k: 1024 * _chunked(hidden.astype(dtype), k, targets, mask, 2)  # noqa: E731
        return jax.grad(scaled)(kernel.astype(dtype))

    np.testing.assert_allclose(grad(jnp.float16)[0, 1:], grad(jnp.float64)[0, 1:], rtol=1e-2)


def test_the_loss_is_a_sum_and_its_weight_the_mask():
    hidden, kernel, targets, mask = _inputs()
    microbatch = {"targets": targets, "loss_mask": mask}
    out = next_token_loss(hidden, kernel, microbatch, chunk=8, outputs="rows")
    term = out.terms["cross_entropy"]
    np.testing.assert_allclose(term.total, _plain(hidden, kernel, targets, mask), rtol=1e-12)
    np.testing.assert_allclose(term.weight, mask.astype(jnp.float64).sum(), rtol=1e-12)
    assert out.outputs["log_prob"].shape == out.outputs["weight"].shape == mask.shape[:1]
    np.testing.assert_allclose(out.outputs["log_prob"].sum(), -term.total, rtol=1e-12)
    np.testing.assert_allclose(out.outputs["weight"][1], 0)
    with pytest.raises(ValueError, match="'tokens', 'rows'"):
        next_token_loss(hidden, kernel, microbatch, outputs="all")


def test_memory_is_far_below_all_the_logits():
    rows, seq, width, vocab, chunk = 4, 2048, 64, 128 * 1024, 256
    shapes = [
        jax.ShapeDtypeStruct((rows, seq, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, seq), jnp.int32),
        jax.ShapeDtypeStruct((rows, seq), jnp.float32),
    ]

    def temp_bytes(loss):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = rows * seq * vocab * 4
    kernel_grad, chunk_logits = width * vocab * 4, chunk * vocab * 4
    chunked = temp_bytes(lambda *a: _chunked(*a, chunk))
    assert temp_bytes(lambda h, k, *a: _plain(h.astype(jnp.float32), k.astype(jnp.float32), *a)) > all_logits
    assert chunked < 4 * (kernel_grad + chunk_logits) < all_logits / 6
    print(f"{chunked=:,} {all_logits=:,}")


@pytest.mark.slow
def test_a_few_tokens_have_the_gradient_of_many_and_their_logits_gradient_is_kept_in_the_compute_dtype():
    """Kept, where it takes no more than the float32 sum of the kernel's gradients, it makes that sum unnecessary."""
    wide = jnp.concatenate([_inputs()[0]] * 4, axis=-1)
    hidden, kernel, targets, mask = wide, jnp.concatenate([_inputs()[1]] * 4), *_inputs()[2:]
    inputs = hidden[:1], kernel, targets[:1], mask[:1]
    expected = jax.grad(_plain, (0, 1))(*inputs)
    found = jax.grad(lambda *a: _chunked(*a, 3), (0, 1))(*inputs)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-13)

    def sums(tokens):
        """Arrays of the kernel's shape in float32 that a loop carries."""
        shape = jax.ShapeDtypeStruct((1, tokens, 32), jnp.bfloat16)
        kernel = jax.ShapeDtypeStruct((32, VOCAB), jnp.bfloat16)
        others = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1, tokens), jnp.float32)
        program = jax.make_jaxpr(jax.grad(lambda *a: _chunked(*a, 8), (0, 1)))(shape, kernel, *others)
        scans = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
        return [var for eqn in scans for var in eqn.outvars if var.aval.shape == (32, VOCAB)]

    assert not sums(64) and sums(65)
