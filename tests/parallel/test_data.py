"""Gradients of gathered weights, scattered whole or a block at a time."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.mesh import manual_axes
from jaxfb.parallel import data
from jaxfb.parallel.sharding import manual_part


@pytest.mark.parametrize(
    "shape, spec, axes",
    [
        ((384, 128), P("fsdp"), {}),  # of each device's 96 rows a third at a time
        ((120, 256), P("fsdp"), {}),  # 30 rows fill no tiles, so columns are cut
        ((256, 384), P(None, "fsdp"), {}),
        ((128, 512), P("fsdp", "tensor"), {"tensor": 2}),
    ],
)
def test_a_gradient_scattered_in_blocks_has_the_same_bits(monkeypatch, shape, spec, axes):
    """In bfloat16, where a gradient is widened before it is summed: all of it, or block by block."""
    mesh = jaxfb.make_mesh(fsdp=4, **axes)
    shard = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    cotangents = jax.random.normal(jax.random.key(1), (4, *shape), jnp.bfloat16)

    def one_device(shard, cotangent):
        _, vjp = jax.vjp(lambda one: data.gather_shard(one, spec, jnp.dtype("bfloat16")), shard)
        return vjp(cotangent[0])[0]

    def scattered(largest):
        monkeypatch.setattr(data, "LARGEST_SCATTER", largest)
        cut = manual_part(spec)
        run = jax.jit(
            jax.shard_map(
                lambda *given: one_device(*given),
                mesh=mesh,
                in_specs=(cut, P("fsdp")),
                out_specs=cut,
                axis_names=set(manual_axes(mesh)),
                check_vma=False,
            )
        )
        loops = run.lower(shard, cotangents).as_text().count("stablehlo.while")
        return loops, jax.device_get(run(shard, cotangents))

    (none, whole), (one, in_blocks) = scattered(2**28), scattered(2**16)
    assert (none, one) == (0, 1)
    chex.assert_trees_all_equal(in_blocks, whole)
    expected = cotangents.astype(jnp.float32).sum(0)
    chex.assert_trees_all_close(whole, jax.device_get(expected), rtol=1e-5, atol=1e-5)
