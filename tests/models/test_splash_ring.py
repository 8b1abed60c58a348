"""Attention over a context axis by splash kernels, in Pallas' interpreter: the numbers of a ring that makes scores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfb.models.attention_kernels.splash_gather import _tables_of_all, splash_gathered
from jaxfb.models.attention_kernels.splash_ring import splash_ring
from jaxfb.models.attention_kernels.splash_whole import splash_attention
from jaxfb.parallel import context
from jaxfb.parallel.scores import Scores

HEADS, KV_HEADS, SIZE = 4, 2, 8
SHARE = 256  # tokens of a device: two pieces of the kernel's smallest block


@pytest.fixture(autouse=True)
def integers_of_32_bits():
    """As outside tests, where only float64 asks for more; with 64 the kernel's grouped heads do not trace."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("window", [None, 129, 200, 300])
@pytest.mark.parametrize("size", [2, 3])
def test_tables_name_the_blocks_that_a_device_sees_and_no_others(size, window):
    block = SHARE // 2
    places = context.zigzag(SHARE * size, size)
    far = places[:, None] - places
    visible = (far >= 0) & (window is None or far < window)
    info = _tables_of_all(SHARE, size, window)
    for device in range(size):
        found = np.zeros((SHARE, SHARE * size), int)
        for query, turn in np.ndindex(info.block_mask.shape[1:]):
            place = device, query, turn
            kind, key, part = info.block_mask[place], info.data_next[place], info.mask_next[place]
            here = np.s_[query * block : (query + 1) * block, key * block : (key + 1) * block]
            found[here] += {0: 0, 1: info.partial_mask_blocks[part], 2: 1}[kind]
        np.testing.assert_array_equal(found, visible[device * SHARE : (device + 1) * SHARE])


def exchanged(query, key, value, scores, *, segments, **how):
    """Heads in place of tokens, and the kernel of one device on whole sequences."""
    attend = lambda q, k, v, scores, ids: splash_attention(q, k, v, ids, scores, **how)  # noqa: E731
    return context.exchanged(attend, query, key, value, scores, segments)


RING, GATHERED = splash_ring, splash_gathered


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels, size, packed, softcap, window",
    [
        (RING, 2, False, None, None),
        (RING, 3, True, 2.0, None),
        (GATHERED, 2, False, None, None),
        (GATHERED, 3, True, 2.0, None),
        (GATHERED, 4, True, None, 200),  # ends within a block
        (GATHERED, 2, False, None, 129),
        (exchanged, 2, False, None, None),
        (exchanged, 2, True, None, 200),
    ],
)
def test_kernels_have_the_numbers_of_the_ring_that_makes_scores(kernels, size, packed, softcap, window):
    """Results and all gradients in float32, to 5e-6 of the largest number: both sum 256 products, in another order."""
    length = SHARE * size
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *inputs, cotangent = (
        jax.random.normal(key, (1, length, n, SIZE), jnp.float32) for key, n in zip(keys, shapes, strict=True)
    )
    documents = jnp.asarray(np.repeat([[1, 2, 2, 0]], length // 4, 1).reshape(1, -1, order="F"), jnp.int32)
    documents = jnp.sort(documents, axis=1)[:, ::-1] if packed else None
    sinks = [] if softcap is None else [jnp.linspace(-1, 2, HEADS, dtype=jnp.float32)]

    def both(segments, cotangent, query, key, value, *sinks):
        segments = segments if packed else None

        def with_gradient(run):
            scored = lambda q, k, v, *s: run(q, k, v, Scores(softcap, *s), segments=segments)  # noqa: E731
            out, vjp = jax.vjp(scored, query, key, value, *sinks)
            return out, *vjp(cotangent)

        given = {} if window is None else {"window": window}
        plain = partial(context.context_attention, method="ring", **given)
        return with_gradient(partial(kernels, interpret=True, **given)), with_gradient(plain)

    mesh = jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    cut, order = P(None, "context"), context.zigzag(length, size)
    out = ((cut,) * 4 + (P("context"),) * len(sinks),) * 2
    whole = tuple(P() for _ in sinks)
    run = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(*(cut,) * 5, *whole), out_specs=out, check_vma=False)
    )
    segments = jnp.ones((1, length), jnp.int32) if documents is None else documents
    ours, theirs = run(*(x[:, order] for x in (segments, cotangent, *inputs)), *sinks)
    for kernel, plain in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=0, atol=5e-6 * float(jnp.abs(plain).max()))
