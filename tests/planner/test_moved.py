"""What is done before or after the loop over microbatches instead of in it takes memory all the while."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxfb.planner.moved import moved_bytes
from jaxfb.planner.program import region_of

LAYERS, IN, OUT, SHARDS, MICROBATCHES = 3, 8, 16, 4, 5
STACK = jax.ShapeDtypeStruct((LAYERS, IN, OUT // SHARDS), jnp.float32)
X = jax.ShapeDtypeStruct((MICROBATCHES, 2, IN), jnp.bfloat16)


def region(step, *arguments):
    """Of a function of what one of four devices holds."""
    return region_of(jax.make_jaxpr(step, axis_env=[("fsdp", SHARDS)])(*arguments))


def gathers(dim, read=lambda w: w.astype(jnp.bfloat16)):
    """Each microbatch gathers each layer's weight along `dim`."""

    def layer(x, weight):
        whole = lax.all_gather(read(weight), "fsdp", axis=dim, tiled=True)
        return x, (x[:, :1] * whole.sum()).sum()

    return lambda stack, xs: lax.scan(lambda c, x: (c, lax.scan(layer, x, stack)[1]), 0, xs)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tpu_casts_parameters_once_and_a_gpu_turns_those_gathered_across(dim):
    found = region(gathers(dim), STACK, X)
    size = LAYERS * IN * OUT // SHARDS
    assert moved_bytes(found, "tpu") == 2 * size
    assert moved_bytes(found, "gpu") == (4 * size if dim else 0)
    assert moved_bytes(found, "cpu") == 0


def test_what_is_read_uncast_as_well_is_cast_in_the_loop():
    both = region(gathers(0, lambda w: w.astype(jnp.bfloat16) * w.sum().astype(jnp.bfloat16)), STACK, X)
    assert moved_bytes(both, "tpu") == 0


@pytest.mark.parametrize("added_as_it_is", [True, False])
def test_a_tpu_scatters_a_sum_once(added_as_it_is):
    def turn(total, x):
        gradient = lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
        return total + (gradient if added_as_it_is else gradient @ gradient.T @ gradient), None

    total = jax.ShapeDtypeStruct((IN // SHARDS, OUT), jnp.float32)
    found = region(
        lambda total, xs: lax.scan(turn, total, xs),
        total,
        jax.ShapeDtypeStruct((MICROBATCHES, IN, OUT), jnp.float32),
    )
    assert moved_bytes(found, "tpu") == (4 * (IN - IN // SHARDS) * OUT if added_as_it_is else 0)
    assert moved_bytes(found, "gpu") == 0
