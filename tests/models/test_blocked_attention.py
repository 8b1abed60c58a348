"""Attention in blocks of queries equals attention over whole [T, S] scores, and does not make what nobody sees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.models.attention_kernels.blocked_attention import blocked_attention
from jaxfb.platforms.compat import inlined

ROWS, SIZE = 2, 8


def attention_over_whole_scores(query, key, value, mask, is_causal, window=None):
    repeat = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeat, axis=2) for x in (key, value))
    scores = jnp.einsum("rthk,rshk->rhts", query, key) / SIZE**0.5
    visible = jnp.ones(scores.shape[2:], bool) if mask is None else mask
    visible = jnp.tril(visible) if is_causal else visible
    visible = visible if window is None else jnp.triu(visible, 1 - window)
    probs = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("rhts,rshk->rthk", probs, value)


def arrays(num_queries, num_keys, heads, kv_heads, dtype=np.float64):
    draw = np.random.default_rng(0).standard_normal
    shapes = (num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads)
    return tuple(jnp.asarray(draw((ROWS, *shape, SIZE)), dtype) for shape in shapes)


def documents(length):
    """bool[R, 1, T, T]: tokens see those of their own document; one boundary inside a block, one on its edge."""
    segments = np.searchsorted([64, 100], np.arange(length), side="right") + np.zeros((ROWS, 1), int)
    return jnp.asarray(segments[:, None, :, None] == segments[:, None, None, :])


@pytest.mark.parametrize(
    "num_queries, num_keys, how, masked, kv_heads",
    [
        (200, 200, dict(is_causal=True), True, 4),
        (200, 200, dict(is_causal=True), True, 2),
        (200, 200, dict(is_causal=True), True, 1),
        (64, 64, dict(is_causal=True), False, 4),
        (600, 600, dict(is_causal=True), False, 2),
        (3, 70, dict(is_causal=False), False, 1),
        (200, 200, dict(is_causal=True, window=1), False, 2),
        (200, 200, dict(is_causal=True, window=30), True, 1),
        (600, 600, dict(is_causal=True, window=100), False, 2),
        (64, 64, dict(is_causal=True, window=90), False, 4),
    ],
)
def test_equals_attention_over_whole_scores(num_queries, num_keys, how, masked, kv_heads):
    query, key, value, cotangent = arrays(num_queries, num_keys, 4, kv_heads)
    mask = documents(num_queries) if masked else None

    @partial(jax.jit, static_argnums=0)
    def with_gradients(attention, *qkv):
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, mask=mask, **how), *qkv)
        return out, *vjp(cotangent)

    implementations = blocked_attention, attention_over_whole_scores
    for ours, theirs in zip(
        *(with_gradients(one, query, key, value) for one in implementations), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, apart", [(jnp.float32, 2e-6), (jnp.bfloat16, 0.03), (jnp.float16, 4e-3)])
def test_keeps_the_dtype_and_sums_in_float32(dtype, apart):
    query, key, value, _ = arrays(130, 130, 4, 2, dtype)
    out = jax.jit(lambda *qkv: blocked_attention(*qkv, is_causal=True))(query, key, value)
    assert out.dtype == dtype
    wide = (x.astype(jnp.float64) for x in (query, key, value))
    expected = attention_over_whole_scores(*wide, None, True)
    np.testing.assert_allclose(out.astype(jnp.float64), expected, rtol=0, atol=apart)


def test_a_query_that_may_look_nowhere_is_finite_with_finite_gradients():
    query, key, value, cotangent = arrays(4, 4, 2, 2)
    mask = jnp.zeros((ROWS, 1, 4, 4), bool)
    out, vjp = jax.vjp(lambda *qkv: blocked_attention(*qkv, mask=mask), query, key, value)
    assert all(np.isfinite(leaf).all() for leaf in (out, *vjp(cotangent)))


@pytest.mark.parametrize(
    "length, window, pairs",
    [(512, None, 512**2 * 5 // 8), (2048, None, 2048**2 * 5 // 8), (2048, 128, 2048 * 255 - 127 * 128)],
)
def test_causal_queries_do_not_meet_the_keys_behind_their_block_or_before_the_window(length, window, pairs):
    """Products over 5/8 of the scores, forward and backward, and no array of all of them."""
    shape = jax.ShapeDtypeStruct((1, length, 1, SIZE), jnp.float32)

    attend = partial(blocked_attention, is_causal=True, window=window)

    def gradients(query, key, value):
        return jax.grad(lambda *qkv: attend(*qkv).sum(), argnums=(0, 1, 2))(query, key, value)

    eqns = inlined(jax.make_jaxpr(gradients)(shape, shape, shape)).eqns
    largest = max(var.aval.size for eqn in eqns for var in eqn.outvars)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    scores = sum(_scores(eqn, length) for eqn in products)
    assert largest <= length**2 // 4
    assert scores == 6 * pairs


def _scores(eqn, length):
    """How many pairs of query and key a product runs over: its multiplications over K."""
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    contracted = np.prod([lhs.shape[dim] for dim in eqn.params["dimension_numbers"][0][0]])
    return int(out.size * contracted) // SIZE
