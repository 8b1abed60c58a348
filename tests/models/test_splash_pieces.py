"""Attention of pieces by splash's kernels, in Pallas' interpreter: the numbers of whole sequences in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.models.attention import packed_attention
from jaxfb.models.attention_kernels.splash_pieces import splash_piece_attention
from jaxfb.parallel.scores import Scores

PIECES, TOKENS, HEADS, KV_HEADS, SIZE = 3, 128, 2, 1, 8
LENGTH = PIECES * TOKENS


@pytest.fixture(autouse=True)
def integers_of_32_bits():
    """As outside tests, where only float64 asks for more; with 64 the kernel's grouped heads do not trace."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize(
    "window, packed, softcap",
    [
        (None, True, 2.0),
        (200, True, 2.0),
        (LENGTH - 10, False, None),
    ],
)
def test_kernels_on_pieces_are_attention_of_the_sequence(window, packed, softcap):
    """Results and all gradients in float32, to 5e-6 of the largest number: both sum 384 products, in another order."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *inputs, cotangent = (
        jax.random.normal(key, (1, LENGTH, n, SIZE), jnp.float32) for key, n in zip(keys, shapes, strict=True)
    )
    sinks = [] if softcap is None else [jnp.linspace(-1, 2, HEADS, dtype=jnp.float32)]
    segments = jnp.asarray(np.sort(np.arange(LENGTH)[None] % 4)[:, ::-1], jnp.int32) if packed else None

    def whole(query, key, value, *sinks):
        scores = Scores(softcap, *sinks)
        return packed_attention(query, key, value, scores, segments=segments, backend="xla", window=window)

    def pieces(query, key, value, *sinks):
        def one(number):
            own = lambda x: jax.lax.dynamic_slice_in_dim(x, number * TOKENS, TOKENS, 1)  # noqa: E731
            earlier = (jnp.arange(LENGTH) < number * TOKENS)[:, None, None]
            past = tuple(jnp.where(earlier, x, jnp.nan) for x in (key, value))  # the rest is not read
            how = dict(past=past, number=number, segments=segments, window=window, interpret=True)
            return splash_piece_attention(own(query), own(key), own(value), Scores(softcap, *sinks), **how)

        return jnp.concatenate([*jax.lax.map(one, jnp.arange(PIECES))], axis=1)

    def with_gradient(run):
        out, vjp = jax.vjp(run, *inputs, *sinks)
        return out, *vjp(cotangent)

    found, wanted = (jax.jit(lambda run=run: with_gradient(run))() for run in (pieces, whole))
    for kernel, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=0, atol=5e-6 * float(jnp.abs(plain).max()))
