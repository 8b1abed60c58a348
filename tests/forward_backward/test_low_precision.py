"""16-bit parameters and computation: sums over microbatches and devices are float32 on every axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P
from marks import some_slow

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

TOLERANCES = {"bfloat16": 3e-2, "float16": 4e-3}


def linear(params, microbatch, rng):
    return jaxfb.Sum((params["w"] * microbatch["x"][:, None].astype(params["w"].dtype)).sum(), 1.0 * 4)


@pytest.mark.parametrize("gather", ["layer", "step"])
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"data": 2}, {"fsdp": 2, "data": 2}])
@pytest.mark.parametrize("parts", [(2048, 1), (40000, 40000)])
def test_gradients_of_float16_parameters_are_summed_in_float32(mesh, gather, parts):
    """Of each device a part that float16 holds, whose sum it does not."""
    replicas = int(np.prod(list(mesh.values())))
    values = np.zeros(replicas)
    values[:2] = parts
    plan = jaxfb.BatchPlan(rows=replicas, rows_per_microbatch=1, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), fsdp_gather=gather, normalize="none")
    params = {"w": jnp.ones((4, 4), jnp.float16)}
    out = fb(linear, params, {"x": jnp.asarray(values, jnp.float32)}, plan)
    assert out.grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(out.grads["w"], np.full((4, 4), sum(parts)))


def specs(tree):
    return {
        "embed": P("tensor"),
        "gain": P(),
        "layers": {"w": P(None, None, "tensor"), "b": P(None, "tensor")},
    }


CASES = [
    ({"data": 2, "fsdp": 2}, {}),
    pytest.param({"fsdp": 2, "tensor": 2}, {"param_specs": specs}, marks=pytest.mark.slow),
    pytest.param({"pipe": 2, "fsdp": 2}, {"head_placement": "last"}, marks=pytest.mark.slow),
    pytest.param({"pipe": 2, "data": 2}, {"head_placement": "rows"}, marks=pytest.mark.slow),
    pytest.param(
        {"pipe": 2, "tensor": 2}, {"param_specs": specs, "schedule": "zero_bubble"}, marks=pytest.mark.slow
    ),
]


def compared(got, wanted, tolerance):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        worst = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
        assert worst <= tolerance * scale, (jax.tree_util.keystr(path), worst, scale)


@pytest.mark.parametrize("dtype", some_slow(list(TOLERANCES), fast=("bfloat16",)))
@pytest.mark.parametrize("mesh, options", CASES, ids=lambda case: "-".join(map(str, case)))
def test_any_mesh_computes_in_16_bits_what_one_device_does(mesh, options, dtype):
    batch = jax.tree.map(jnp.asarray, toy.batch())
    batch = {n: leaf.astype(dtype) if leaf.dtype == jnp.float64 else leaf for n, leaf in batch.items()}
    params, (_, wanted) = toy.params(dtype=dtype), toy.gradient()
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, rows_per_microbatch=2, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    out = fb(toy.model, params, batch, plan)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(out.grads)} == {"float32"}
    compared(out.grads, wanted, TOLERANCES[dtype])


SIZES = TransformerConfig(
    vocab_size=32, num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=2, mlp_size=32, attention="xla"
)
AXES = [
    ({"pipe": 2, "tensor": 2}, {"head_placement": "vocabulary"}, {}),
    ({"pipe": 2, "fsdp": 2}, {"head_placement": "rows"}, {}),
    ({"context": 2, "data": 2}, {}, {"context_attention": "all_gather"}),
    ({"context": 2, "pipe": 2}, {}, {"context_attention": "ring"}),
    ({"expert": 2, "fsdp": 2}, {}, {"num_experts": 4, "expert_mlp_size": 16}),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, options, changes", AXES, ids=lambda case: "-".join(map(str, case)))
def test_the_transformer_computes_in_bfloat16_on_every_axis(mesh, options, changes):
    import dataclasses

    sizes = dataclasses.replace(SIZES, **changes)
    params = init_params(sizes, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 32, (8, 16)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": np.ones((8, 16), np.float32)}

    def grads(mesh, **more):
        replicas = int(np.prod([mesh.get(axis, 1) for axis in ("data", "fsdp", "expert")]))
        plan = jaxfb.BatchPlan(rows=8, num_microbatches=2, data_parallel=replicas)
        fb = jaxfb.get_forward_backward_func(
            jaxfb.make_mesh(devices=jax.devices()[: int(np.prod(list(mesh.values())))], **mesh), **more
        )
        return fb(transformer(sizes), params, batch, plan).grads

    compared(
        grads(mesh, compute_dtype="bfloat16", **options), grads({"data": 1}, compute_dtype="bfloat16"), 0.1
    )
