"""The tensor axis changes only where things are: same gradients, split like the weights, of which none is gathered."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from whole import apply

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.losses.cross_entropy import chunked_cross_entropy
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.tensor import (
    check_tensor_divides,
    constrain,
    gathered_once_backward,
    on_head_shards,
    transformer_param_specs,
)

SIZES = {
    "vocab_size": 32,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 24,
}
ROWS, LENGTH = 4, 6


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2, 2), ("data", "tensor"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )


def _microbatch():
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 32, (2, ROWS, LENGTH), np.int32)
    mask = draw.integers(0, 2, (ROWS, LENGTH)).astype(np.float32)
    return {"tokens": tokens[0], "targets": tokens[1], "loss_mask": mask, "segments": tokens[0] // 16}


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_equal_one_device_and_no_weight_is_gathered(mesh, tied):
    config = TransformerConfig(
        **SIZES, tied_embeddings=tied, qkv_bias=True, qk_norm=True, dropout=0.2, loss_chunk=5
    )
    make = jax.jit(lambda key: init_params(config, key, jnp.float64))
    params, model = make(jax.random.key(0)), transformer(config)
    keys = jax.random.split(jax.random.key(1), ROWS)

    def loss_sum(params, microbatch, keys):
        out = apply(model, params, microbatch, keys)
        return out.terms["cross_entropy"].total, out.metrics["accuracy"].total

    def summed(params, microbatch, keys):
        return jax.lax.psum(jax.value_and_grad(loss_sum, has_aux=True)(params, microbatch, keys), "data")

    expected = jax.jit(jax.value_and_grad(loss_sum, has_aux=True))(params, _microbatch(), keys)
    sharded = jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, transformer_param_specs(params)
    )
    compiled = jax.jit(sharded).lower(placed, _microbatch(), keys).compile()
    out = compiled(placed, _microbatch(), keys)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), out, expected)
    jax.tree.map(
        lambda grad, param: np.testing.assert_(grad.sharding.is_equivalent_to(param.sharding, grad.ndim)),
        out[1],
        placed,
    )
    found = collectives(compiled.as_text())
    assert {one.kind for one in found} == {"all-reduce", "all-gather"}
    (gathered,) = (one for one in found if one.kind == "all-gather")
    assert gathered.bytes == ROWS // 2 * LENGTH * 16 * 8  # the gradient of what the head is given


def test_the_gradient_of_the_heads_input_is_split_over_tensor(mesh):
    """Each device has its tokens' sums alone: what adds them up over a pipeline's stages has a part of the bytes."""
    draw = np.random.default_rng(2).normal
    hidden, head = draw(size=(ROWS, LENGTH, 16)), draw(size=(16, 32))
    targets, mask = np.ones((ROWS, LENGTH), np.int32), np.ones((ROWS, LENGTH))

    def gradient(hidden, head):
        loss = lambda hidden: chunked_cross_entropy(hidden, head, targets, mask).loss_sum  # noqa: E731
        return jax.grad(loss)(hidden)

    expected = gradient(jnp.asarray(hidden), jnp.asarray(head))
    with jax.set_mesh(mesh):
        grad = jax.jit(gradient)(hidden, jax.device_put(head, NamedSharding(mesh, P(None, "tensor"))))
    np.testing.assert_allclose(grad, expected, atol=1e-13)
    assert grad.sharding.spec[1] == "tensor"


def test_the_embedding_gradient_is_a_plain_scatter_add(mesh):
    config = TransformerConfig(**SIZES)
    params, tokens = init_params(config, jax.random.key(0), jnp.float64), _microbatch()["tokens"] % 5
    cotangent = np.random.default_rng(1).normal(size=(ROWS, LENGTH, 16))
    expected = np.zeros((32, 16))
    np.add.at(expected, tokens, cotangent)

    def gradient(outer):
        embed = lambda outer: transformer(config).embed(outer, {"tokens": tokens})  # noqa: E731
        return jax.vjp(embed, outer)[1](jnp.asarray(cotangent))[0]["embed"]["embedding"]

    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
            params,
            transformer_param_specs(params),
        )
        grad = jax.jit(gradient)({name: leaf for name, leaf in placed.items() if name != "layers"})
    np.testing.assert_allclose(grad, expected, atol=1e-13)
    assert grad.sharding.spec[0] == "tensor"


def test_constrain_is_nothing_outside_a_mesh_and_never_refuses_to_run(mesh):
    x = jnp.ones((4, 6))
    assert constrain(x, None, "tensor") is x
    with jax.set_mesh(mesh):
        spec = jax.jit(lambda x: constrain(x, None, "tensor"))(x).sharding.spec
        assert "tensor" in spec and spec[0] is None
        assert constrain(x[:, :5], None, "tensor").shape == (4, 5)
    explicit = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        assert constrain(x, None, "tensor") is x
    with pytest.raises(ValueError, match="one entry per dim"):
        constrain(x, "tensor")


def test_the_gradient_of_attentions_output_is_gathered_before_its_products(mesh):
    """Otherwise each of the two products gathers it."""
    x = jnp.ones((ROWS, LENGTH, 16))

    def gradient(cotangent):
        return jax.vjp(lambda x: gathered_once_backward(x, 2 * 2047), x)[1](cotangent)[0]

    assert gathered_once_backward(x, 16) is x
    with jax.set_mesh(mesh):
        assert gathered_once_backward(x, 2 * 2048) is x  # its products are longer than a gather
        np.testing.assert_array_equal(jax.jit(gradient)(2 * x), 2 * x)
        (gathered,) = [eqn for eqn in jax.make_jaxpr(gradient)(x).eqns if "constraint" in eqn.primitive.name]
    assert "tensor" not in gathered.params["sharding"].spec


@pytest.mark.parametrize("more", [{}, {"num_kv_heads": 4, "head_size": 4, "latent": Latent(4, 2, 4)}])
def test_attention_asks_for_one_gather_of_its_gradient(mesh, more):
    config = TransformerConfig(**SIZES | more, sequence_parallel=True)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(lambda params: apply(transformer(config), params, _microbatch(), None))(
            params
        )
    assert "_gathered_once_backward" in str(traced)


def test_every_weight_is_split_and_no_layer_dim_is():
    shapes = jax.eval_shape(lambda: init_params(TransformerConfig(**SIZES, qkv_bias=True), jax.random.key(0)))
    specs = transformer_param_specs(shapes)
    attention, mlp = specs["layers"]["attention"], specs["layers"]["mlp"]
    assert attention["query"] == attention["key"] == attention["value"]
    assert attention["query"] == {"bias": P(None, "tensor"), "kernel": P(None, None, "tensor")}
    assert attention["output"]["kernel"] == mlp["down"]["kernel"] == P(None, "tensor", None)
    assert mlp["gate"]["kernel"] == mlp["up"]["kernel"] == P(None, None, "tensor")
    assert specs["embed"]["embedding"] == P("tensor", None) and specs["head"]["kernel"] == P(None, "tensor")
    assert specs["norm"]["scale"] == specs["layers"]["mlp_norm"]["scale"] == P()


@pytest.mark.parametrize(
    "field, message",
    [
        ("num_kv_heads", r"num_kv_heads=2 must be a multiple of tensor=4; use num_kv_heads=4 or tensor=2"),
        ("vocab_size", r"vocab_size=2 must be a multiple of tensor=4"),
    ],
)
def test_a_tensor_axis_that_does_not_divide_is_refused(field, message):
    config = SimpleNamespace(**{"num_heads": 8, "num_kv_heads": 4, "mlp_size": 8, "vocab_size": 8, field: 2})
    check_tensor_divides(config, 2)
    with pytest.raises(ValueError, match=message):
        check_tensor_divides(config, 4)


def gathers_and_scatters(mesh, gather):
    """Those of one forward and backward of a narrow transformer, in the compiled program."""
    narrow = TransformerConfig(vocab_size=512, num_layers=2, hidden_size=64, num_heads=4, mlp_size=256)
    model = transformer(narrow)
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=2, data_parallel=mesh.shape["fsdp"])
    fb = jaxfb.get_forward_backward_func(mesh, fsdp_gather=gather)
    params = jax.eval_shape(lambda: init_params(narrow, jax.random.key(0)))
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        fb.param_specs(model, params),
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((8, 16), dtype) for name, dtype in dtypes.items()}
    compiled = jax.jit(lambda p, b: fb(model, p, b, plan)).lower(params, batch).compile()
    return [one for one in collectives(compiled.as_text()) if one.kind in ("all-gather", "reduce-scatter")]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["layer", pytest.param("step", marks=pytest.mark.slow)])
def test_fsdp_brings_together_what_tensor_leaves_a_device(gather):
    """Half the bytes over fsdp at tensor=2, and no weight is ever whole over tensor."""
    meshes = [jaxfb.make_mesh(fsdp=2, tensor=size, devices=jax.devices()[: 2 * size]) for size in (1, 2)]
    of_head = 2 * 16 * 64 * 4  # the gradient of what the head is given: two rows in float32
    found = [
        [
            one
            for one in gathers_and_scatters(mesh, gather)
            if one.axes(mesh) != ("tensor",) or one.bytes != of_head
        ]
        for mesh in meshes
    ]
    assert all(one.axes(meshes[1]) == ("fsdp",) for one in found[1])
    for kind in ("all-gather", "reduce-scatter"):
        whole, halves = (sum(one.bytes * one.times for one in each if one.kind == kind) for each in found)
        assert 0 < halves < 0.52 * whole, kind


def test_a_vocabulary_over_pipe_and_tensor_is_never_whole_over_tensor():
    """A stage's share of the embedding and of the head, and their gradients, stay split while fsdp gathers and sums."""
    meshes = [
        jaxfb.make_mesh(pipe=2, fsdp=2, tensor=size, devices=jax.devices()[: 4 * size]) for size in (1, 2)
    ]
    found = [gathers_and_scatters(mesh, "step") for mesh in meshes]
    whole, halves = (
        sum(one.bytes for one in each if "fsdp" in one.axes(mesh))
        for each, mesh in zip(found, meshes, strict=True)
    )
    assert halves == whole / 2
    table = 512 // 2 * 64 * 4  # a stage's share in float32
    assert all(one.bytes < table for one in found[1] if one.axes(meshes[1]) == ("tensor",))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_that_the_axis_does_not_cut_are_whole_on_every_shard(kv_heads):
    """Pieces with one kv head on tensor=2 ended in an error of shard_map; without pieces they are computed."""
    tensor = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    query, key = (jnp.arange(24.0 * heads).reshape(2, 3, heads, 4) for heads in (4, kv_heads))
    product = lambda query, key, two: two * query * jnp.repeat(key, 4 // kv_heads, axis=2)  # noqa: E731
    with jax.set_mesh(tensor):
        found = jax.jit(lambda *heads: on_head_shards(product, heads, jnp.float32(2)))(query, key)
    np.testing.assert_array_equal(found, product(query, key, 2))
