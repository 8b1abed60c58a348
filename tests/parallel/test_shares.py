"""A head of which neighbours have a share each: whose tokens, which columns, and the gradient that goes back."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.parallel import grid, shares
from jaxfb.parallel.table import Table

VOCAB, WIDTH, TOKENS = 192, 16, 6
CASES = [
    ({"fsdp": 8}, P("fsdp"), 1, VOCAB),
    ({"fsdp": 8}, P("fsdp"), 1, VOCAB + 6),  # shares of 50 columns, the last of 48
    ({"fsdp": 8}, P("fsdp"), 0, VOCAB),
    ({"fsdp": 8}, P(None, "fsdp"), 0, VOCAB + 6),
    ({"fsdp": 2, "context": 4}, P(("fsdp", "context")), 1, VOCAB),
    ({"fsdp": 4, "context": 2}, P(("fsdp", "context")), 0, VOCAB),
    ({"fsdp": 2, "expert": 2, "context": 2}, P(("fsdp", "expert", "context")), 0, VOCAB),
]


def on_all(sizes, spec, run, matrix, vocabulary, tokens=TOKENS):
    """Returns what `run(table, shares)` returns on each device, stacked."""
    mesh = jaxfb.make_mesh(**sizes)

    def one(shard):
        table = Table(shard, spec, vocabulary, jnp.dtype("float64"))
        found = shares.shares_of(table, tokens)
        assert found is not None
        return jax.tree.map(lambda leaf: leaf[None], run(table, found))

    every = P(tuple(sizes))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False))(matrix)


def matrix_of(vocabulary, vocab):
    """Returns a head, or an embedding, and the former of either."""
    head = np.random.default_rng(0).normal(size=(WIDTH, vocab))
    return (head if vocabulary == 1 else head.T.copy()), head


@pytest.mark.parametrize("tile", [1, 128], ids=["rows of any length", "whole tiles"])
@pytest.mark.parametrize(("sizes", "spec", "vocabulary", "vocab"), CASES, ids=str)
def test_neighbours_have_each_column_once(sizes, spec, vocabulary, vocab, tile, monkeypatch):
    monkeypatch.setattr(shares, "platform_here", lambda: "tpu" if tile > 1 else "cpu")
    matrix, head = matrix_of(vocabulary, vocab)

    def run(table, found):
        assert found.of(table).shape[1] % tile == 0
        return found.together(found.of(table)[None]), found.together(found.ids(table)[None])

    every, ids = map(np.asarray, on_all(sizes, spec, run, matrix, vocabulary))
    for kernels, columns in zip(every, ids, strict=True):
        kernel, columns = np.concatenate(kernels, -1), columns.reshape(-1)
        real = columns < vocab
        assert sorted(columns[real]) == list(range(vocab))
        assert tile > 1 or vocab % len(kernels) or real.all()
        np.testing.assert_array_equal(kernel[:, real], head[:, columns[real]])


@pytest.mark.parametrize("tile", [1, 128], ids=["rows of any length", "whole tiles"])
@pytest.mark.parametrize(("sizes", "spec", "vocabulary", "vocab"), CASES, ids=str)
def test_the_gradients_of_all_shares_are_summed_into_shards(
    sizes, spec, vocabulary, vocab, tile, monkeypatch
):
    monkeypatch.setattr(shares, "platform_here", lambda: "tpu" if tile > 1 else "cpu")
    matrix, head = matrix_of(vocabulary, vocab)

    def run(table, found):
        """Each device adds the columns of its share, times one more than its number."""
        grad = (1.0 + jax.lax.axis_index(tuple(sizes))) * found.of(table)
        return found.scattered(table, grad).shard, found.ids(table)

    shards, ids = map(np.asarray, on_all(sizes, spec, run, matrix, vocabulary))
    factors = [sum(1 + device for device, own in enumerate(ids) if column in own) for column in range(vocab)]
    grad = np.concatenate(list(shards), axis=0 if spec[0] else 1)
    np.testing.assert_allclose(grad if vocabulary == 1 else grad.T, head * factors, rtol=1e-12)


@pytest.mark.parametrize(("sizes", "spec", "vocabulary", "vocab"), CASES[:5:4], ids=str)
def test_what_is_gathered_from_neighbours_comes_back(sizes, spec, vocabulary, vocab):
    def run(table, found):
        mine = jnp.arange(3.0) + 10 * jax.lax.axis_index(tuple(sizes))
        together = found.together(mine)
        return mine, found.own(together), found.summed(together), jnp.float64(found.grid.across)

    mine, own, summed, across = on_all(sizes, spec, run, matrix_of(vocabulary, vocab)[0], vocabulary)
    np.testing.assert_array_equal(mine, own)
    np.testing.assert_array_equal(summed, np.asarray(mine) * np.asarray(across)[:, None])


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "across"),
    [
        ("TPU v6 lite", {"fsdp": 64}, 4096, 8),
        ("TPU v5", {"fsdp": 64}, 4096, 4),
        ("TPU v5", {"fsdp": 64}, 1024, 16),
        ("TPU v5", {"fsdp": 64}, 10000, 4),
        ("TPU v5", {"fsdp": 64}, 10700, None),  # a third of the vocabulary
        ("TPU v6 lite", {"fsdp": 256}, 4096, None),
        ("TPU v6 lite", {"fsdp": 256}, 2048, 16),
        ("TPU v5 lite", {"fsdp": 256}, 2048, None),
        ("NVIDIA H100", {"fsdp": 64}, 4096, 4),
        ("TPU v5", {"fsdp": 16, "context": 4}, 8192, 4),
        ("TPU v5", {"fsdp": 2}, 4096, None),
        ("TPU v5", {"fsdp": 7}, 4096, None),
    ],
)
@pytest.mark.parametrize("width", [4096, 1024])
def test_as_many_neighbours_as_send_the_fewest_bytes(kind, shape, tokens, across, width, monkeypatch):
    """Of the head of 8B; where it is narrow, what is kept of many tokens would take more memory than all of it."""
    for name in ("kind_here", "get_abstract_mesh"):
        value = kind if name == "kind_here" else SimpleNamespace(shape=shape)
        monkeypatch.setattr(grid, name, lambda value=value: value)
    monkeypatch.setattr(shares, "kind_here", lambda: kind)
    axes = tuple(shape)
    table = SimpleNamespace(cut=(0, axes), vocabulary=1, whole_shape=(width, 128256), dtype="bfloat16")
    found = shares.shares_of(table, tokens)
    across = across if tokens <= 3 * width else None
    assert (found and found.grid.across) == across
    assert found is None or found.grid.across * found.grid.within == np.prod([*shape.values()])
