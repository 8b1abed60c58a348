"""The law in 16 bits: sums over rows, microbatches and devices lose nothing, on any axis and head placement."""

from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb import BatchPlan, Pipelined, Sum, get_forward_backward_func, make_mesh
from jaxfb.forward_backward.equivalence import TOLERANCES
from jaxfb.losses.sequences import Sequences
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.training.check import synthetic_batch

SHORT = ("bfloat16", "float16")


def mesh_of(sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))])


def replicas_of(sizes):
    return int(np.prod([sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")]))


# gradients that 16 bits cannot represent


def weighted(params, microbatch, rng):
    weights = params["w"]
    return Sum((weights * microbatch["x"].astype(weights.dtype)[:, None]).sum(), float(len(microbatch["x"])))


def gradient(model, params, parts, sizes, rows_per_microbatch=1, **options):
    """The sum over rows of each row's part."""
    plan = BatchPlan(
        rows=len(parts), data_parallel=replicas_of(sizes), rows_per_microbatch=rows_per_microbatch
    )
    fb = get_forward_backward_func(mesh_of(sizes), normalize="none", **options)
    return fb(model, params, {"x": np.array(parts, np.float32)}, plan).grads


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"data": 2}, {}),
        ({"fsdp": 2}, {"fsdp_gather": "layer"}),
        ({"fsdp": 2}, {"fsdp_gather": "step"}),
        ({"fsdp": 2, "data": 2}, {}),
        ({"expert": 2}, {}),
        ({"data": 2}, {"optimizer_sharding": "data"}),
        ({"data": 2}, {"optimizer_sharding": "gradients"}),
        ({"fsdp": 2, "data": 2}, {"optimizer_sharding": "gradients"}),
    ],
    ids=str,
)
def test_parts_of_replicas_and_microbatches_are_summed_in_float32(sizes, options, dtype):
    large = 40000 if dtype == "float16" else 2.0**100
    for parts in ([2048, 1, 1, 1], [large, large, -large, -large]):
        grads = gradient(weighted, {"w": jnp.zeros((4, 4), dtype)}, parts, sizes, **options)["w"]
        assert grads.dtype == np.float32 and np.all(grads == sum(parts))


def test_an_accumulator_wider_than_the_parameters_is_that_of_the_scatter_too():
    """2**24 + 1 is beyond float32."""
    params = {"w": jnp.zeros((4, 4), "float32")}
    for gather in ("layer", "step"):
        options = {"fsdp_gather": gather, "accum_dtype": "float64"}
        grads = gradient(weighted, params, [2.0**24, 1], {"fsdp": 2}, **options)["w"]
        assert grads.dtype == np.float64 and np.all(grads == 2.0**24 + 1)


def test_devices_are_summed_in_the_reduce_dtype_and_microbatches_exactly():
    """bfloat16 has no 257: a sum over devices has lost a 1 that one over microbatches keeps."""
    params, parts = {"w": jnp.zeros((4, 4), "float32")}, [256, 1, 1, 0]
    mesh, rounded = {"fsdp": 2}, {"reduce_dtype": "bfloat16"}
    for sizes, options, total in (
        (mesh, {}, 258),
        (mesh, rounded, 257),
        (mesh, rounded | {"fsdp_gather": "step"}, 258),
        ({"data": 2}, rounded, 258),
        ({"data": 2}, rounded | {"optimizer_sharding": "gradients"}, 257),
    ):
        grads = gradient(weighted, params, parts, sizes, **options)["w"]
        assert grads.dtype == np.float32 and np.all(grads == total), (sizes, options, grads)


def test_a_reduce_dtype_that_is_wider_than_the_sum_is_refused():
    for given, params, nearest in (
        ({"accum_dtype": "bfloat16", "reduce_dtype": "float32"}, "float32", "bfloat16"),
        ({"reduce_dtype": "float64"}, "float32", "float32"),
    ):
        with pytest.raises(ValueError, match=f"is wider than {nearest}.*use reduce_dtype={nearest}, or None"):
            gradient(weighted, {"w": jnp.zeros((4, 4), params)}, [1, 2], {"fsdp": 2}, **given)


# hidden is the row's number, all of outer["w"] and of the layers' weights multiply it: each row's part is that number
counting = Pipelined(
    embed=lambda outer, mb, rng: mb["x"].astype(outer["w"].dtype)[:, None],
    layer=lambda w, h, mb, rng: (h, {"layer": Sum((w["w"] * h).astype("float32").sum(), float(len(h)))}),
    head=lambda outer, h, mb, rng: Sum((outer["w"] * h).sum(), float(len(h))),
)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pipe": 2}, {"head_placement": "last"}),
        ({"pipe": 2}, {"head_placement": "rows"}),
        pytest.param(
            {"pipe": 2, "fsdp": 2},
            {"head_placement": "rows", "schedule": "zero_bubble"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pipe": 2, "data": 2},
            {"layers_per_stage": (1, 2), "optimizer_sharding": "data"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_parts_of_stages_are_summed_in_float32(sizes, options, dtype):
    layers = sum(options.get("layers_per_stage", (1, 1)))
    params = {"w": jnp.zeros(4, dtype), "layers": {"w": jnp.zeros((layers, 4), dtype)}}
    rows = 2 * replicas_of(sizes)
    parts = [2048, 1] * rows
    grads = gradient(counting, params, parts, sizes, rows_per_microbatch=2, **options)
    if options.get("head_placement") == "rows":  # a microbatch's rows are on different devices
        assert np.all(grads["w"] == sum(parts))
    alone = [2048] * rows + [1] * rows
    grads = gradient(counting, params, alone, sizes, rows_per_microbatch=2, **options)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    assert all(np.all(leaf == sum(alone)) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2}], ids=str)
def test_parts_of_embedding_and_head_of_tied_weights_are_summed_in_float32(sizes, dtype):
    """The head's part is the row's number, the embedding's 2048."""
    tied = Pipelined(
        embed=lambda outer, mb, rng: jnp.broadcast_to(2048 * outer["w"], (len(mb["x"]), 4, 4)),
        layer=lambda w, h, mb, rng: h + 0 * w,
        head=lambda outer, h, mb, rng: Sum(
            h.sum() + (outer["w"] * mb["x"][:, None, None].astype(h.dtype)).sum(), float(len(h))
        ),
    )
    params = {"w": jnp.zeros((4, 4), dtype), "layers": jnp.zeros((2, 4, 4), dtype)}
    grads = gradient(tied, params, [1, 3, 5, 7], sizes)["w"]
    assert np.all(grads == 4 * 2048 + 16)


def test_a_mask_in_16_bits_is_counted_in_float32():
    sequences = Sequences.of({"loss_mask": jnp.ones((1, 300), jnp.bfloat16)})
    assert sequences.mask.sum() == 300 and sequences.lengths().max() == 300


# what is computed in 16 bits, next to one device in the widest dtype


@lru_cache
def problem(**changed):
    experts = changed.pop("experts", 0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_size": 8,
        "mlp_size": 32, "attention": "xla", "num_experts": experts, "expert_mlp_size": 16,
        # all of them: a choice among close scores would be another one in another dtype
        "experts_per_token": experts or 1,
    }  # fmt: skip
    config = TransformerConfig(**sizes | changed)
    return transformer(config), init_params(config, jax.random.key(0)), synthetic_batch(8)


def check(dtype, mesh, model=None, schedules=("1f1b",), **options):
    """model: None is the toy; else what differs from the transformer of `problem`."""
    if model is None:
        arguments = toy.model, toy.params(layers=2), toy.batch(rows=8)
    else:
        arguments = problem(**model)
    found = jaxfb.check_equivalence(
        *arguments, [mesh], schedules, rows_per_microbatch=2, dtype=dtype, **options
    )
    assert found.dtype == dtype and len(found.ran) == 1, str(found)
    found.raise_if_above()
    if dtype in SHORT:
        found.raise_if_above(0.05)
    return found


CASES = [
    ({"data": 2}, None, {"optimizer_sharding": "gradients"}),
    ({"fsdp": 2}, None, {"fsdp_gather": "layer"}),
    ({"fsdp": 2}, None, {"fsdp_gather": "step"}),
    ({"tensor": 2}, {"sequence_parallel": True}, {}),
    ({"context": 2}, {"context_attention": "ring"}, {}),
    ({"context": 2}, {"context_attention": "all_gather"}, {}),
    ({"context": 2}, {"context_attention": "all_to_all"}, {}),
    ({"expert": 2}, {"experts": 4}, {}),
    ({"pipe": 2}, None, {"head_placement": "last"}),
    ({"pipe": 2, "data": 2}, None, {"head_placement": "rows"}),
    ({"pipe": 2, "tensor": 2}, {}, {"head_placement": "vocabulary"}),
    ({"pipe": 2}, {"mtp_depth": 1}, {"head_placement": "vocabulary", "schedules": ("zero_bubble",)}),
]
QUICK = [("bfloat16", *CASES[1])]
# of float16 those of the toy alone, which compile quickly: both dtypes take the same paths
SLOW = [("bfloat16", *case) for case in CASES] + [("float16", *case) for case in CASES if case[1] is None]
SLOW = [case for case in SLOW if case not in QUICK]


@pytest.mark.parametrize(
    ("dtype", "mesh", "model", "options"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_every_axis_and_head_placement_in_16_bits(dtype, mesh, model, options):
    check(dtype, mesh, model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("mesh", "model", "options"), [CASES[1], CASES[9]], ids=str)
def test_the_same_in_32_and_64_bits(dtype, mesh, model, options):
    found = check(dtype, mesh, model, **options)
    assert found.worst.size < (1e-12 if dtype == "float64" else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SHORT)
def test_a_16_bit_gradient_is_that_of_one_device_whatever_the_replicas(dtype):
    """Each microbatch gives the same numbers but for a rounding that XLA may leave out before a wider sum."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), toy.params(layers=2))
    batch = jax.tree.map(lambda leaf: leaf.astype("float32") if leaf.dtype == float else leaf, toy.batch())

    def run(sizes, **options):
        plan = BatchPlan(rows=16, data_parallel=replicas_of(sizes), rows_per_microbatch=2)
        return get_forward_backward_func(mesh_of(sizes), **options)(toy.model, params, batch, plan).grads

    alone = run({})
    for sizes, options in [({"data": 2}, {}), ({"fsdp": 2}, {}), ({"pipe": 2}, {"head_placement": "last"})]:
        chex.assert_trees_all_close(run(sizes, **options), alone, rtol=float(jnp.finfo(dtype).eps), atol=1e-5)


def test_a_dtype_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of 'float64', 'float32', 'bfloat16', 'float16'"):
        check("int8", {"data": 2})
    assert set(TOLERANCES) == {"float64", "float32", *SHORT}


# collectives


def sums_in_16_bits(program):
    """Names of the collectives of a traced program that add 16-bit floats of several devices."""
    found = []
    for eqn in program.eqns:
        if eqn.primitive.name in ("psum", "reduce_scatter", "psum_invariant"):
            found += [eqn.primitive.name] * any(var.aval.dtype in SHORT for var in eqn.invars)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                found += sums_in_16_bits(getattr(value, "jaxpr", value))
    return found


@pytest.mark.parametrize("accum_dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "changed", "options"),
    [
        ({"data": 2, "fsdp": 2}, {}, {"optimizer_sharding": "data"}),
        pytest.param({"fsdp": 2, "expert": 2}, {"experts": 2}, {}, marks=pytest.mark.slow),
        *(({"context": 2}, {"context_attention": how}, {}) for how in ("ring", "all_gather", "all_to_all")),
        ({"pipe": 2, "fsdp": 2}, {}, {"head_placement": "last", "layers_per_stage": (1, 1)}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:accum_dtype=bfloat16")
def test_no_collective_adds_16_bit_numbers(sizes, changed, options, accum_dtype):
    model, params, batch = problem(**changed)
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    plan = BatchPlan(rows=8, data_parallel=replicas_of(sizes), num_microbatches=2)
    fb = get_forward_backward_func(mesh_of(sizes), accum_dtype=accum_dtype, **options)
    program = jax.make_jaxpr(lambda p: fb(model, p, batch, plan).grads)(params)
    assert sums_in_16_bits(program.jaxpr) == []


def test_a_loss_function_may_add_bfloat16_itself_beside_an_automatic_axis():
    mesh = make_mesh(data=2)

    def body(x):
        return lax.psum(x, "data"), lax.pmax(x, "data"), lax.psum_scatter(x, "data", tiled=True)

    whole = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=(P(), P(), P("data")), axis_names={"data"}, check_vma=False
    )
    got = jax.jit(whole)(jnp.arange(4, dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in got} == {jnp.dtype("bfloat16")}
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf.tolist(), got), ([0, 2, 4, 6], [0, 1, 2, 3], [0, 2, 4, 6])
    )
