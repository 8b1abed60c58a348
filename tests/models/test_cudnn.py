"""Blocks of queries, by a stand-in for cuDNN's kernel, equal attention at once; no bias of theirs is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.models import attend
from jaxfb.models.attention import packed_attention
from jaxfb.models.attention_kernels import cudnn
from jaxfb.models.attention_kernels.blocked_attention import blocked_attention
from jaxfb.models.attention_kernels.cudnn_gather import cudnn_gathered
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import context

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 52, 4, 2, 4
SEGMENTS = jnp.asarray([[1] * 9 + [2] * 33 + [3] * 6 + [0] * 4, [1] * 52], jnp.int32)


@pytest.fixture
def kernel(monkeypatch):
    """Stands in for cuDNN's, in any dtype; returns the shapes [T, S] of its calls."""
    calls = []

    def call(query, key, value, bias=None, *, is_causal=False, window=None):
        assert query.shape[1] % 2 == key.shape[1] % 2 == 0
        calls.append((query.shape[1], key.shape[1]))
        seen = None if bias is None else bias == 0
        return blocked_attention(query, key, value, mask=seen, is_causal=is_causal, window=window)

    monkeypatch.setattr(cudnn, "_call", call)
    return calls


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 queries at most, where a bias has more than 2 kB."""
    monkeypatch.setattr(cudnn, "LARGEST_WHOLE", 2048)
    monkeypatch.setattr(cudnn, "block_size", lambda query, keys: min(4, query.shape[1]))


def arrays(dtype=jnp.float64):
    draw = np.random.default_rng(0).normal
    return [
        jnp.asarray(draw(size=(ROWS, LENGTH, heads, SIZE)), dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def value_and_gradients(attention, query, key, value, read):
    return jax.value_and_grad(lambda *qkv: (attention(*qkv) * read).sum(), (0, 1, 2))(query, key, value)


def whole(window=None):
    return lambda *qkv: packed_attention(*qkv, segments=SEGMENTS, backend="xla", window=window)


def close(found, wanted, atol=1e-12):
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=atol), found, wanted)


@pytest.mark.parametrize("window", [None, 3, 20])
def test_blocks_of_queries_equal_attention_at_once(kernel, small_blocks, window):
    found = value_and_gradients(lambda *qkv: cudnn.causal(*qkv, SEGMENTS, window), *arrays())
    close(found, value_and_gradients(whole(window), *arrays()))
    assert max(queries for queries, _ in kernel) == 4 and max(keys for _, keys in kernel) <= LENGTH
    if window is None:
        assert min(keys for _, keys in kernel) == 8  # the first group's
    else:
        assert max(keys for _, keys in kernel) <= 8 + window + 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_what_a_query_may_not_see_is_far_below_every_score(dtype):
    tokens = cudnn.Tokens(jnp.arange(LENGTH)[None], SEGMENTS)
    bias = cudnn._bias(tokens, tokens, None, dtype)
    assert bias.shape == (ROWS, 1, LENGTH, LENGTH) and bias.dtype == dtype
    seen = np.asarray(jnp.equal(SEGMENTS[:, :, None], SEGMENTS[:, None])) & np.tri(LENGTH, dtype=bool)
    assert (bias[:, 0][seen] == 0).all() and (bias[:, 0][~seen] <= -(2.0**15)).all()
    assert jnp.isfinite(bias).all()


def test_short_rows_are_one_call(kernel):
    close(
        value_and_gradients(lambda *qkv: cudnn.causal(*qkv, SEGMENTS, None), *arrays()),
        value_and_gradients(whole(), *arrays()),
    )
    assert set(kernel) == {(LENGTH, LENGTH)}


def test_gradients_of_keys_are_summed_in_float32(kernel, small_blocks):
    """Each is a sum over 13 blocks; in bfloat16 that of row 1, which all of them see, would lose more."""
    given = arrays(jnp.bfloat16)
    exact = value_and_gradients(whole(), *(x.astype(jnp.float64) for x in given))[1]
    found = value_and_gradients(lambda *qkv: cudnn.causal(*qkv, SEGMENTS, None), *given)[1]
    at_once = value_and_gradients(whole(), *given)[1]

    def error(gradients):
        return sum(
            float(jnp.abs(got - want)[1].mean()) for got, want in zip(gradients[1:], exact[1:], strict=True)
        )

    assert error(found) < 1.5 * error(at_once)


@pytest.mark.parametrize(
    "rows, length, size, calls",
    [
        (1, 32768, 32768, 1),
        (16, 4096, 4096, 1),
        (1, 65536, 8192, 8),
        (1, 131072, 16384, 8),
        (4, 32768, 4096, 8),
    ],
)
def test_rows_are_cut_by_what_their_bias_takes(rows, length, size, calls):
    query = jax.ShapeDtypeStruct((rows, length, 4, 128), jnp.bfloat16)
    assert cudnn.takes_whole(query) == (calls == 1)
    if calls == 1:
        return
    groups = cudnn.groups(length, None)
    assert [(group.end - group.first, group.oldest) for group in groups] == [(size, 0)] * calls
    of_group = jax.ShapeDtypeStruct((rows, size, 4, 128), jnp.bfloat16)
    block = cudnn.block_size(of_group, length)
    assert (
        block % 128 == 0 and rows * block * length * 2 <= cudnn.LARGEST_PART < 2 * rows * block * length * 2
    )


@pytest.mark.parametrize("length", [8, 10, 52, 4100])
@pytest.mark.parametrize("window", [None, 1, 5, 4096])
def test_groups_are_even_and_see_all_that_their_queries_do(length, window):
    groups = cudnn.groups(length, window)
    assert [group.first for group in groups[1:]] == [group.end for group in groups[:-1]]
    assert groups[0].first == 0 and groups[-1].end == length and len(groups) <= cudnn.GROUPS
    for first, end, oldest in groups:
        assert (end - first) % 2 == (end - oldest) % 2 == 0
        assert oldest <= max(0, first - (length if window is None else window - 1))


@pytest.mark.parametrize("size, window", [(2, None), (4, 3)])
def test_gathered_keys_give_attention_on_one_device(kernel, small_blocks, size, window):
    *qkv, read = arrays()
    # sequences that 2 x context divides into halves of even length
    qkv, read, segments = [x[:, :48] for x in qkv], read[:, :48], SEGMENTS[:, :48]
    plain = lambda *qkv: packed_attention(*qkv, segments=segments, backend="xla", window=window)  # noqa: E731
    wanted = value_and_gradients(plain, *qkv, read)
    order = context.zigzag(48, size)
    mesh = jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,))
    cut = P(None, "context")

    def parts(segments, read, *qkv):
        attention = lambda *qkv: cudnn_gathered(*qkv, segments=segments, window=window)  # noqa: E731
        loss, gradients = value_and_gradients(attention, *qkv, read)
        return jax.lax.psum(loss, "context"), gradients

    run = jax.shard_map(parts, mesh=mesh, in_specs=cut, out_specs=(P(), cut), check_vma=False)
    loss, gradients = jax.jit(run)(*(x[:, order] for x in (segments, read, *qkv)))
    close((loss, [x[:, np.argsort(order)] for x in gradients]), (wanted[0], list(wanted[1])))
    halves = {keys for _, keys in kernel}
    assert halves == {24, 48}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gathered_keys_in_the_engine_change_nothing(kernel, small_blocks, monkeypatch, remat):
    monkeypatch.setattr(attend, "_takes_cudnn", lambda *_: True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (4, 48)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": (rng.random((4, 48)) > 0.3).astype(np.float64)}
    batch["segments"] = np.tile(np.asarray(SEGMENTS[:, :48]), (2, 1))
    sizes = dict(vocab_size=32, num_layers=2, hidden_size=16, mlp_size=16, num_heads=4, num_kv_heads=2)
    model = transformer(TransformerConfig(**sizes))
    params = init_params(TransformerConfig(**sizes), jax.random.key(0), jnp.float64)
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2)
    wanted = jaxfb.get_forward_backward_func()(model, params, batch, plan)
    assert not kernel
    found = jaxfb.get_forward_backward_func(jaxfb.make_mesh(context=4), remat=remat)(
        model, params, batch, plan
    )
    assert {keys for _, keys in kernel} >= {24, 48}
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-12)
    close(found.grads, wanted.grads)
