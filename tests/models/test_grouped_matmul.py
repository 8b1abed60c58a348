"""A matmul of groups equals a loop over rows, and so do its gradients, on the CPU's way and on the others'."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import use_kernels_of_gpus
from jax import lax

from jaxfb.models import grouped_matmul as module
from jaxfb.models.grouped_matmul import Kernels, grouped_matmul, tile_size
from jaxfb.models.tiles import Tiles
from jaxfb.platforms.compat import equations

ROWS, GROUPS, BEFORE, AFTER = 40, 3, 4, 6
SIZES = {
    "uneven": [5, 0, 30],
    "full": [1, 20, 19],
    "one": [0, 40, 0],
    "none": [0, 0, 0],
    "tiles": [8, 16, 16],
}


def plain(rows, kernels, cotangent, sizes):
    """(out, gradient of rows, gradient of kernels), a row at a time."""
    group = np.repeat(np.arange(GROUPS), sizes)
    out, of_rows, of_kernels = np.zeros((ROWS, AFTER)), np.zeros_like(rows), np.zeros_like(kernels)
    for row, index in enumerate(group):
        out[row] = rows[row] @ kernels[index]
        of_rows[row] = kernels[index] @ cotangent[row]
        of_kernels[index] += np.outer(rows[row], cotangent[row])
    return out, of_rows, of_kernels


def undefined(shape, dtype):
    """`lax.empty`, with values that are seen wherever they are used."""
    return jnp.full(shape, jnp.nan, dtype)


def one_after_another(kernels, rows, sizes):
    """What several products answer, whose matrices' gradients are summed on the way from one to the next."""
    kernels, out = Kernels.of(kernels), []
    for each in zip(rows, sizes, strict=True):
        answer, kernels = kernels.multiply(*each)
        out.append(answer)
    return jnp.stack(out)


def in_a_loop(kernels, rows, sizes):
    """The same, whose sums JAX begins with zeros."""

    def turn(kernels, each):
        answer, kernels = kernels.multiply(*each)
        return kernels, answer

    return lax.scan(turn, Kernels.of(kernels), (rows, sizes))[1]


@pytest.mark.parametrize("by", ["loops", "kernels"])
@pytest.mark.parametrize("products", [one_after_another, in_a_loop])
def test_the_first_product_writes_the_gradient_and_the_others_add_to_it(products, by, monkeypatch):
    """Groups that the first one has no rows of included."""
    if by == "kernels":
        use_kernels_of_gpus(monkeypatch)
    monkeypatch.setattr(lax, "empty", undefined)
    draw, sizes = np.random.default_rng(0), np.array([[5, 0, 30], [0, 40, 0], [1, 20, 0]], np.int32)
    shapes = (3, ROWS, BEFORE), (GROUPS, BEFORE, AFTER), (3, ROWS, AFTER)
    rows, kernels, cotangent = (draw.normal(size=shape) for shape in shapes)
    got = jax.jit(lambda *args: jax.vjp(lambda kernels: products(kernels, *args), kernels)[1](cotangent))
    wanted = [plain(*each[:1], kernels, *each[1:])[2] for each in zip(rows, cotangent, sizes, strict=True)]
    np.testing.assert_allclose(got(rows, sizes)[0], sum(wanted), atol=1e-12)


def test_no_zeros_are_written_to_add_a_gradient_to():
    kernels, rows, sizes = (
        np.ones((GROUPS, BEFORE, AFTER)),
        np.ones((2, ROWS, BEFORE)),
        np.ones((2, GROUPS), int),
    )
    gradient = jax.grad(lambda kernels: one_after_another(kernels, rows, sizes).sum())
    found = equations(jax.make_jaxpr(gradient)(kernels).jaxpr)
    made = {eqn.primitive.name for eqn in found if kernels.shape in [var.aval.shape for var in eqn.outvars]}
    assert "empty" in made and "broadcast_in_dim" not in made


def test_frozen_matrices_keep_no_rows_and_have_no_gradient():
    rows, kernels = jnp.ones((ROWS, BEFORE)), jnp.ones((GROUPS, BEFORE, AFTER))
    sizes = jnp.array(SIZES["uneven"], jnp.int32)
    shapes = lambda function: {leaf.shape for leaf in jax.tree.leaves(jax.vjp(function, rows)[1])}  # noqa: E731
    frozen = shapes(lambda rows: grouped_matmul(rows, kernels, sizes))
    assert rows.shape not in frozen
    assert rows.shape in shapes(lambda rows: grouped_matmul(rows, kernels + rows.sum(), sizes))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "kernels", "tpu", "default"])
def test_equals_a_loop_over_rows(platform, monkeypatch):
    def choose(*args, **ways):
        return ways.get(platform, ways["default"])(*args)

    if platform == "kernels":
        use_kernels_of_gpus(monkeypatch)
    else:
        monkeypatch.setattr(lax, "platform_dependent", choose)
    monkeypatch.setattr(lax, "empty", undefined)
    draw = np.random.default_rng(0)
    rows, kernels, cotangent = (
        draw.normal(size=shape) for shape in ((ROWS, BEFORE), (GROUPS, BEFORE, AFTER), (ROWS, AFTER))
    )

    @jax.jit
    def run(rows, kernels, cotangent, sizes):
        out, vjp = jax.vjp(lambda r, k: grouped_matmul(r, k, sizes), rows, kernels)
        return out, *vjp(cotangent)

    if platform == "kernels":
        program = jax.make_jaxpr(run)(rows, kernels, cotangent, np.ones(GROUPS, np.int32))
        assert str(program).count("pallas_call") == 3
    for name, sizes in SIZES.items():
        behind = (np.arange(ROWS) >= sum(sizes))[:, None]  # undefined
        given = (np.where(behind, np.nan, rows), kernels, np.where(behind, np.nan, cotangent))
        got, wanted = run(*given, jnp.array(sizes, jnp.int32)), plain(*given, sizes)
        for a, b, defined in zip(got, wanted, (sum(sizes), sum(sizes), GROUPS), strict=True):
            np.testing.assert_allclose(a[:defined], b[:defined], atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    "dtype, rows, kernels, can",
    [
        (jnp.bfloat16, (512, 256), (4, 256, 384), True),
        (jnp.float16, (512, 384), (4, 256, 384), True),  # in the backward
        (jnp.float32, (512, 256), (4, 256, 384), False),
        (jnp.bfloat16, (512, 256), (4, 256, 200), False),
        (jnp.bfloat16, (512, 96), (4, 96, 256), False),
        (jnp.bfloat16, (1 << 20, 256), (4, 256, 2048), False),  # more numbers than 32 bits address
        (jnp.bfloat16, (512, 4096), (64, 4096, 8192), False),
    ],
)
def test_kernels_multiply_what_their_blocks_divide(monkeypatch, dtype, rows, kernels, can):
    grouped_kernels = pytest.importorskip("jaxfb.models.grouped_kernels")
    rows = jax.ShapeDtypeStruct(rows, dtype)
    assert module._gpu_kernels_for(rows, kernels) is None, "there is no GPU"
    monkeypatch.setattr(module, "platform_here", lambda: "gpu")
    assert module._gpu_kernels_for(rows, kernels) is (grouped_kernels if can else None)
    for capability, is_new in ((7.5, False), (8.0, True), (9.0, True)):
        monkeypatch.setattr(grouped_kernels, "compute_capability", lambda one=capability: one)
        assert (module._gpu_kernels_for(rows, kernels) is grouped_kernels) == (can and is_new)


def test_a_jax_without_pallas_for_triton_multiplies_in_loops(monkeypatch):
    monkeypatch.setattr(module, "platform_here", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jaxfb.models.grouped_kernels", None)
    monkeypatch.delattr("jaxfb.models.grouped_kernels", raising=False)
    rows = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    assert module._gpu_kernels_for(rows, (4, 256, 384)) is None


@pytest.mark.parametrize(
    "kind, width, large",
    [
        ("NVIDIA H100 80GB HBM3", 4096, True),
        ("NVIDIA A100-SXM4-80GB", 256, True),
        ("NVIDIA H200", 384, False),
        ("NVIDIA GeForce RTX 4090", 4096, False),
        ("NVIDIA L40S", 4096, False),
        (None, 4096, False),
    ],
)
def test_blocks_fit_the_shared_memory(monkeypatch, kind, width, large):
    grouped_kernels = pytest.importorskip("jaxfb.models.grouped_kernels")
    monkeypatch.setattr(grouped_kernels, "kind_here", lambda: kind)
    blocks = grouped_kernels.blocks_for(width)
    assert (blocks is grouped_kernels.LARGE) == large and width % blocks.n == 0
    used = 2 * blocks.stages * blocks.k * (blocks.m + blocks.n)
    assert used <= (163 if large else 99) * 1024, "KiB of an A100, and of the smallest"


def test_the_work_is_that_of_the_rows():
    """There is room for the worst case; what the loops run over are the tiles that have rows."""
    tiles = jax.jit(lambda sizes: Tiles.of(sizes, 4096, 128))(jnp.array([100, 0, 300, 129], jnp.int32))
    assert tiles.group.shape == (4096 // 128 + 4,) and tiles.used == 1 + 3 + 2
    assert tiles.group[:6].tolist() == [0, 2, 2, 2, 3, 3]
    assert tiles.start[:6].tolist() == [0, 100, 228, 356, 400, 528]
    assert tiles.end[:6].tolist() == [100, 228, 356, 400, 528, 529]


def test_rows_that_are_done_have_no_tiles():
    sizes = jnp.array([100, 0, 300, 129], jnp.int32)
    first = Tiles.first(sizes, 128)
    assert first.start.tolist() == [0, 100, 100, 400] and first.end.tolist() == [100, 100, 228, 528]
    others = Tiles.of(sizes, 4096, 128, first.end - first.start)
    assert first.used == 4 and others.used == 2 + 1
    assert others.group[:3].tolist() == [2, 2, 3]
    assert others.start[:3].tolist() == [228, 356, 528] and others.end[:3].tolist() == [356, 400, 529]


@pytest.mark.parametrize("cut", [slice(5, 20), slice(30, None)])
def test_rows_of_another_group_or_of_none_reach_nothing(cut):
    """NaN in rows that are not a group's is inert for it, in products and in gradients."""
    rows, kernels = np.ones((ROWS, BEFORE)), np.ones((GROUPS, BEFORE, AFTER))
    rows[cut] = np.nan
    sizes = jnp.array([5, 15, 10], jnp.int32)
    out, vjp = jax.vjp(lambda r, k: grouped_matmul(r, k, sizes), rows, kernels)
    of_rows, of_kernels = vjp(jnp.ones_like(out))
    bad = np.zeros(ROWS, bool)
    bad[cut] = True
    np.testing.assert_array_equal(np.isnan(out).all(1), bad & (np.arange(ROWS) < 30))
    assert not np.isnan(of_rows).any()
    assert np.isnan(of_kernels).any(axis=(1, 2)).tolist() == [False, cut.start == 5, False]


def test_gradients_in_bfloat16_are_summed_in_float32():
    rows, kernels = jnp.ones((4096, 2), jnp.bfloat16), jnp.ones((1, 2, 2), jnp.bfloat16)
    cotangent = jnp.full((4096, 2), 1 / 128, jnp.bfloat16)
    sizes = jnp.array([4096], jnp.int32)
    _, vjp = jax.vjp(lambda k: grouped_matmul(rows, k, sizes), kernels)
    np.testing.assert_array_equal(vjp(cotangent)[0].astype(np.float32), 32.0)


@pytest.mark.parametrize(
    ("rows", "groups", "size"), [(4000, 4, 500), (64, 4, 8), (16, 4, 8), (6, 1, 6), (100_000, 4, 1024)]
)
def test_an_even_group_has_two_tiles_or_more(rows, groups, size):
    """Of 8 rows at least, where there are so many, and of 1024 at most."""
    assert tile_size(rows, groups) == size
