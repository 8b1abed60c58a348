"""A matmul of groups equals a loop over rows, and so do its gradients, on the CPU's way and on the others'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfb.models import grouped_matmul as module
from jaxfb.models.grouped_matmul import grouped_matmul

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


@pytest.mark.parametrize("platform", ["cpu", "others"])
def test_equals_a_loop_over_rows(platform, monkeypatch):
    if platform == "others":
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    draw = np.random.default_rng(0)
    rows, kernels, cotangent = (
        draw.normal(size=shape) for shape in ((ROWS, BEFORE), (GROUPS, BEFORE, AFTER), (ROWS, AFTER))
    )

    @jax.jit
    def run(rows, kernels, sizes):
        out, vjp = jax.vjp(lambda r, k: grouped_matmul(r, k, sizes), rows, kernels)
        return out, *vjp(cotangent)

    for name, sizes in SIZES.items():
        got, wanted = run(rows, kernels, jnp.array(sizes, jnp.int32)), plain(rows, kernels, cotangent, sizes)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12, err_msg=name)


def test_the_work_on_cpu_is_that_of_the_rows():
    """There is room for the worst case; what the loops run over are the tiles that have rows."""
    tiles = jax.jit(lambda sizes: module._Tiles.of(sizes, 4096))(jnp.array([100, 0, 300, 129], jnp.int32))
    assert tiles.row.shape == (4096 // 128 + 4, 128) and tiles.used == 1 + 3 + 2


def test_gradients_in_bfloat16_are_summed_in_float32():
    rows, kernels = jnp.ones((4096, 2), jnp.bfloat16), jnp.ones((1, 2, 2), jnp.bfloat16)
    cotangent = jnp.full((4096, 2), 1 / 128, jnp.bfloat16)
    sizes = jnp.array([4096], jnp.int32)
    _, vjp = jax.vjp(lambda k: grouped_matmul(rows, k, sizes), kernels)
    np.testing.assert_array_equal(vjp(cotangent)[0].astype(np.float32), 32.0)
