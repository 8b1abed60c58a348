"""Attention as sums over blocks of keys: those of a softmax over all of them and the sinks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close

from jaxfb.models.attention_kernels.splash_sums import Queries, Sums, begun, merged, sinks_gradient

ROWS, HEADS, TOKENS, KEYS, SIZE = 2, 3, 4, 6, 5


def arrays():
    shapes = (ROWS, HEADS, TOKENS, KEYS), (ROWS, HEADS, KEYS, SIZE), (ROWS, HEADS, TOKENS, SIZE), (HEADS,)
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def attention(scores, value, sinks):
    """Out, and the logarithm of the sum of exponentials, over all keys and the sinks at once."""
    exps = jnp.exp(scores)
    total = exps.sum(-1) + (0 if sinks is None else jnp.exp(sinks)[:, None])
    return exps @ value / total[..., None], jnp.log(total)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_blocks_add_up_to_attention_to_all_keys(with_sinks):
    scores, value, _, sinks = arrays()
    sinks = sinks if with_sinks else None
    first, second = (
        attention(scores[..., part], value[..., part, :], None) for part in (slice(0, 2), slice(2, None))
    )
    close(merged(Sums(*second), begun(*first, sinks)), Sums(*attention(scores, value, sinks)), 1e-5)


def test_the_gradient_of_sinks_is_that_of_the_softmax():
    scores, value, d_out, sinks = arrays()
    wanted = jax.grad(lambda sinks: (attention(scores, value, sinks)[0] * d_out).sum())(sinks)
    queries = Queries(scores, None, *attention(scores, value, sinks), d_out)
    close(sinks_gradient(sinks, queries), wanted, 1e-5)
