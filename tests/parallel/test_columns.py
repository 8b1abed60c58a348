"""Tokens looked up in columns of an embedding: the rows of the whole, and the gradient of one device."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.parallel import columns, grid
from jaxfb.parallel.look_up import look_up
from jaxfb.parallel.table import Table
from jaxfb.platforms.compat import equations

VOCAB, WIDTH, ROWS, LENGTH = 192, 16, 8, 24
MESHES = [
    ({"fsdp": 8}, P("fsdp"), VOCAB),
    ({"fsdp": 8}, P(None, "fsdp"), VOCAB - 2),
    ({"fsdp": 2, "context": 4}, P(("fsdp", "context")), VOCAB),
    ({"fsdp": 4, "context": 2}, P(None, ("fsdp", "context")), VOCAB - 2),
    ({"fsdp": 4, "data": 2}, P("fsdp"), VOCAB),
]


def given(vocab):
    """An embedding, tokens of which one is often there, and cotangents that do not cancel."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((ROWS, LENGTH)) < 0.4, 3, rng.integers(0, vocab, (ROWS, LENGTH)))
    return rng.normal(size=(vocab, WIDTH)), tokens, rng.normal(0.3, 1.0, (ROWS, LENGTH, WIDTH))


def looked_up(sizes, spec, matrix, tokens, cotangent, reduce_dtype=None, dtype="float64"):
    """Returns (the rows, the gradient of the embedding, the traced program)."""
    mesh, axes = jaxfb.make_mesh(**sizes), tuple(sizes)

    def run(shard, tokens, cotangent):
        def of(shard):
            table = Table(shard, spec, 0, jnp.dtype(dtype), reduce_dtype)
            assert columns.columns_of(table, tokens.size) is not None
            return look_up(table, tokens)

        rows, vjp = jax.vjp(of, shard)
        return rows, jax.lax.psum(vjp(cotangent)[0], [axis for axis in axes if axis == "data"])

    each = P(axes)
    run = jax.shard_map(run, mesh=mesh, in_specs=(spec, each, each), out_specs=(each, spec), check_vma=False)
    arguments = matrix, tokens, cotangent.astype(dtype)
    return *jax.jit(run)(*arguments), jax.make_jaxpr(run)(*arguments)


@pytest.mark.parametrize(("sizes", "spec", "vocab"), MESHES, ids=str)
def test_rows_and_gradient_are_those_of_the_whole(sizes, spec, vocab):
    matrix, tokens, cotangent = given(vocab)
    rows, grad, _ = looked_up(sizes, spec, matrix, tokens, cotangent)
    wanted = np.zeros_like(matrix)
    np.add.at(wanted, tokens, cotangent)
    np.testing.assert_array_equal(rows, matrix[tokens])
    np.testing.assert_allclose(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sizes", "spec", "vocab"), MESHES[:2], ids=str)
def test_tokens_outside_the_vocabulary_have_zeros_and_no_gradient(sizes, spec, vocab):
    matrix, tokens, cotangent = given(vocab)
    tokens[:, ::2] = -1
    tokens[:, 1::4] = vocab + 5
    rows, grad, _ = looked_up(sizes, spec, matrix, tokens, cotangent)
    inside = (tokens >= 0) & (tokens < vocab)
    wanted = np.zeros_like(matrix)
    np.add.at(wanted, tokens[inside], cotangent[inside])
    np.testing.assert_array_equal(np.asarray(rows)[inside], matrix[tokens[inside]])
    assert inside.any() and not np.asarray(rows)[~inside].any()
    np.testing.assert_allclose(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_a_narrow_gradient_is_summed_over_the_tokens_in_float32(reduce_dtype):
    matrix, tokens, cotangent = given(VOCAB)
    cotangent = cotangent.astype(jnp.bfloat16)
    given_here = {"fsdp": 8}, P("fsdp"), matrix.astype(np.float32), tokens, cotangent
    rows, grad, _ = looked_up(*given_here, reduce_dtype, "bfloat16")
    wanted = np.zeros_like(matrix)
    np.add.at(wanted, tokens, cotangent.astype(np.float64))
    assert rows.dtype == jnp.bfloat16 and grad.dtype == jnp.float32
    np.testing.assert_array_equal(rows, matrix.astype(jnp.bfloat16)[tokens])
    np.testing.assert_allclose(
        grad, wanted, rtol=1e-2 if reduce_dtype else 1e-6, atol=0.02 if reduce_dtype else 1e-5
    )


def test_the_gradient_is_added_one_device_at_a_time():
    """Places of many devices in one scatter would be sorted together, which takes the TPU compiler seconds."""
    sizes, spec, vocab = MESHES[0]
    program = looked_up(sizes, spec, *given(vocab))[2]
    added = [
        one.invars[2].aval.shape for one in equations(program.jaxpr) if one.primitive.name == "scatter-add"
    ]
    assert added and max(shape[0] for shape in added) == ROWS * LENGTH // 8


def test_neither_the_embedding_nor_its_gradient_is_anywhere_whole():
    sizes, spec, vocab = MESHES[0]
    program = looked_up(sizes, spec, *given(vocab))[2]
    (inside,) = (one.params["jaxpr"] for one in equations(program.jaxpr) if one.primitive.name == "shard_map")
    largest = max(var.aval.size for eqn in equations(inside) for var in eqn.outvars)
    assert largest <= vocab * WIDTH // 4


@pytest.mark.parametrize(
    ("kind", "shape", "spec", "tokens", "across"),
    [
        ("TPU v6 lite", {"fsdp": 64}, P("fsdp"), 4096, 8),
        ("TPU v5", {"fsdp": 64}, P("fsdp"), 4096, 16),
        ("TPU v5", {"fsdp": 64}, P("fsdp"), 8192, 16),
        ("TPU v5", {"fsdp": 64}, P("fsdp"), 32768, 4),
        ("TPU v5", {"fsdp": 64}, P("fsdp"), 131072, None),
        ("TPU v5", {"fsdp": 512}, P(None, "fsdp"), 4096, 8),
        ("TPU v5 lite", {"fsdp": 256}, P("fsdp"), 4096, 16),
        ("TPU v5", {"fsdp": 16, "context": 4}, P(("fsdp", "context")), 8192, 16),
        ("TPU v5", {"fsdp": 2}, P("fsdp"), 4096, None),
        ("TPU v5", {"fsdp": 7}, P("fsdp"), 4096, None),
    ],
)
def test_each_device_has_as_few_columns_as_its_tokens_and_the_tiles_allow(
    kind, shape, spec, tokens, across, monkeypatch
):
    """Of 8B, and of 70B on 512 chips."""
    monkeypatch.setattr(grid, "get_abstract_mesh", lambda: SimpleNamespace(shape=shape))
    monkeypatch.setattr(grid, "kind_here", lambda: kind)
    monkeypatch.setattr(columns, "platform_here", lambda: "tpu")
    whole = 128256, 8192 if shape == {"fsdp": 512} else 4096
    table = SimpleNamespace(
        vocabulary=0, cut=(0, tuple(shape)), whole_shape=whole, sum_dtype=jnp.dtype("float32")
    )
    found = columns.columns_of(table, tokens)
    assert (found and found.grid.across) == across
    table.vocabulary = 1  # a head: no rows to look up
    assert columns.columns_of(table, tokens) is None


@pytest.mark.parametrize("made", [grid.grids, grid.adjacent_grids])
def test_rows_of_devices_along_several_axes_have_the_sizes_of_their_axes(made, monkeypatch):
    sizes = {"fsdp": 2, "data": 1, "context": 3, "expert": 5}
    monkeypatch.setattr(grid, "get_abstract_mesh", lambda: SimpleNamespace(shape=sizes))
    monkeypatch.setattr(grid, "kind_here", lambda: None)
    found = made(tuple(sizes))
    assert len(found) == 2
    for one in found:
        axes = (one.inner, one.outer) if one.adjacent else (one.outer, one.inner)
        assert axes[0] + axes[1] == ("fsdp", "context", "expert")
        for names, size in ((one.outer, one.across), (one.inner, one.within)):
            assert math.prod(sizes[name] for name in names) == size > 1
