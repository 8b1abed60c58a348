"""Soft caps and sinks: every attention gives the softmax that is written out, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfb.models.attention import choose_backend, packed_attention
from jaxfb.parallel import context
from jaxfb.parallel.scores import Scores

ROWS, LENGTH, HEADS, KV_HEADS, SIZE, WINDOW = 2, 16, 8, 4, 4, 9
SEGMENTS = jnp.asarray(np.repeat([[1] * 5 + [2] * 7 + [0] * 4], ROWS, 0), jnp.int32)


def written_out(query, key, value, scores):
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    products = jnp.einsum("rthk,rshk->rhts", query, key) / SIZE**0.5
    if scores.softcap is not None:
        products = scores.softcap * jnp.tanh(products / scores.softcap)
    visible = jnp.triu(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), 1 - WINDOW)
    visible = visible & (SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :])
    products = jnp.where(visible, products, -jnp.inf)
    if scores.sinks is not None:
        sinks = jnp.broadcast_to(scores.sinks[None, :, None, None], (*products.shape[:3], 1))
        products = jnp.concatenate([products, sinks], axis=-1)
    return jnp.einsum("rhts,rshk->rthk", jax.nn.softmax(products)[..., :LENGTH], value)


@pytest.mark.parametrize(
    "softcap, has_sinks",
    [
        (0.7, True),
        pytest.param(0.7, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
    ],
)
def test_every_attention_equals_the_softmax_written_out(softcap, has_sinks):
    rng = np.random.default_rng(0)
    query, key, value, seen = (
        jnp.asarray(rng.normal(size=(ROWS, LENGTH, heads, SIZE)))
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    sinks = jnp.asarray(rng.normal(size=HEADS)) if has_sinks else None

    def graded(run):
        def loss(query, key, value, sinks, seen):
            return (run(query, key, value, Scores(softcap, sinks)) * seen).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))

    how = dict(segments=SEGMENTS, window=WINDOW)
    wanted = jax.jit(graded(written_out))(query, key, value, sinks, seen)
    blocked = jax.jit(graded(lambda *args: packed_attention(*args, **how, backend="xla")))
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12),
        blocked(query, key, value, sinks, seen), wanted,
    )  # fmt: skip

    order, cut = context.zigzag(LENGTH, 4), P(None, "context")

    def parts(query, key, value, sinks, segments, seen):
        here = dict(segments=segments, window=WINDOW)
        for method in context.METHODS:
            run = graded(lambda *args, m=method: context.context_attention(*args, **here, method=m))
            loss, (*grads, of_sinks) = run(query, key, value, sinks, seen)
            yield (
                jax.lax.psum(loss, "context"),
                (*grads, jax.tree.map(lambda x: jax.lax.psum(x, "context"), of_sinks)),
            )

    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    run = jax.jit(
        jax.shard_map(
            lambda *args: list(parts(*args)), mesh=mesh, in_specs=(cut, cut, cut, P(), cut, cut),
            out_specs=[(P(), (cut, cut, cut, P()))] * 3, check_vma=False,
        )
    )  # fmt: skip
    split = run(*(x[:, order] for x in (query, key, value)), sinks, SEGMENTS[:, order], seen[:, order])
    back = np.argsort(order)
    for loss, (*grads, of_sinks) in split:
        together = (loss, (*(x[:, back] for x in grads), of_sinks))
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12),
            together, wanted,
        )  # fmt: skip


def test_cudnn_is_passed_over_and_refused():
    query = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
    assert choose_backend("auto", query, query, packed=False, plain=False) == "xla"
    with pytest.raises(ValueError, match="has neither a soft cap nor sinks; use attention='xla'"):
        choose_backend("cudnn", query, query, packed=False, plain=False)
