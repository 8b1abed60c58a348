"""The last microbatch's backward reduces the layers' gradients: the same gradients, each reduced once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.config import load_config
from jaxfb.forward_backward.options import EngineOptions
from jaxfb.forward_backward.resolved import resolve
from jaxfb.hlo import collectives
from jaxfb.mesh import data_parallel
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.planner import parse_topology
from jaxfb.planner.counts import reduces_beside
from jaxfb.planner.job import abstract_device, abstract_mesh, model_sizes
from jaxfb.platforms.kinds import V5E, V5P
from jaxfb.training.from_config.options import engine_options

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def make(mesh, **options):
    return jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), overlap_grad_reduce=True, **options)


def plan_of(mesh, num_microbatches):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    return jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)


def gradients(mesh, layers=3, num_microbatches=2, dtype=np.float64, **options):
    arguments = toy.params(layers=layers, dtype=dtype), toy.batch(), plan_of(mesh, num_microbatches), KEY
    return make(mesh, **options)(toy.model, *arguments)


CASES = [
    ({"data": 2}, {}),
    ({"data": 2}, {"num_microbatches": 1}),
    ({"fsdp": 4}, {"fsdp_gather": "step", "remat": "layer"}),
    slow({"data": 4}, {"num_microbatches": 2, "optimizer_sharding": "data"}),
    slow({"data": 2, "fsdp": 2}, {"fsdp_gather": "step", "remat": "selective"}),
    slow({"data": 2, "fsdp": 2}, {"fsdp_gather": "step", "optimizer_sharding": "data", "layers": 4}),
    slow({"data": 2, "fsdp": 2}, {"fsdp_gather": "layer"}),
    slow({"data": 2}, {"remat": "none*1+full", "layers": 4}),
    slow({"data": 2}, {"layers": 1, "remat": "full"}),
    ({"data": 2, "fsdp": 2}, {"gather_ahead": True}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "optimizer_sharding": "data", "layers": 4}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "num_microbatches": 1}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "fsdp_gather": 1}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "remat": "none*1+full", "layers": 5}),
]


@pytest.mark.parametrize(("mesh", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device(mesh, options):
    out = gradients(mesh, **options)
    loss, grads = toy.gradient(options.get("layers", 3), seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"dtype": np.float32}, 2e-6),
        ({"dtype": np.float32, "compute_dtype": "bfloat16"}, 3e-2),
        slow({"dtype": np.float32, "reduce_dtype": "bfloat16"}, 2e-6),
        slow({"dtype": np.float32, "accum_dtype": "float64"}, 2e-6),
        ({"dtype": np.float64, "accum_dtype": "float32"}, 2e-6),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "gather", [{"fsdp_gather": "step"}, slow({"fsdp_gather": "layer", "gather_ahead": True})], ids=str
)
def test_every_dtype_is_as_exact_as_on_one_device(options, gather, rtol):
    """Also with reduce_dtype, which is of sums in the loop: the one reduction is in the dtype of the sums."""
    if "layer" in gather.values() and "reduce_dtype" in options:
        rtol = 2e-2  # each microbatch's sums over fsdp are rounded
    out = gradients({"data": 2, "fsdp": 2}, **gather, **options)
    wanted = toy.gradient(3, seed=5)[1]
    dtype = options.get("accum_dtype", "float32")
    for grad, exact in zip(jax.tree.leaves(out.grads), jax.tree.leaves(wanted), strict=True):
        assert grad.dtype == dtype
        assert np.abs(grad - exact).max() < rtol * np.abs(exact).max()


def test_frozen_parameters_have_no_gradient():
    out = gradients({"data": 2}, trainable=["layers.w", "embed"])
    wanted = toy.gradient(3, seed=5)[1]
    assert out.grads["layers"]["b"] is None
    close(out.grads["layers"]["w"], wanted["layers"]["w"])
    close(out.grads["embed"], wanted["embed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes", "options"),
    [
        ({"data": 2, "tensor": 2}, {"sequence_parallel": True}, {}),
        ({"data": 2, "context": 2}, {"tied_embeddings": True}, {"fsdp_gather": "step"}),
        ({"fsdp": 2, "expert": 2}, {"num_experts": 4, "expert_mlp_size": 8}, {"fsdp_gather": "step"}),
        ({"data": 2, "fsdp": 2}, {}, {"gather_ahead": "half", "optimizer_sharding": "data"}),
        ({"data": 2, "tensor": 2, "fsdp": 2}, {"sequence_parallel": True}, {"gather_ahead": True}),
    ],
    ids=str,
)
def test_a_transformer_on_every_axis_has_the_gradients_of_one_device(mesh, sizes, options):
    common = {"vocab_size": 32, "num_layers": 3, "hidden_size": 16, "num_heads": 2, "mlp_size": 32}
    model, rng = transformer(TransformerConfig(**common | sizes)), np.random.default_rng(0)
    params = init_params(TransformerConfig(**common | sizes), jax.random.key(1), jnp.float64)
    tokens = rng.integers(0, 32, (toy.ROWS, 8), dtype=np.int32)
    mask = rng.random((toy.ROWS, 8))
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "loss_mask": mask}
    of_one = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=1))
    out = make(mesh, **options)(model, params, batch, plan_of(mesh, 2))
    wanted = of_one(model, params, batch, plan_of({}, 1))
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


def reduced(mesh, num_microbatches, overlap, **options):
    """Bytes that a call sums over devices; of scatters over fsdp in each microbatch, none."""
    made = jaxfb.make_mesh(**mesh)
    fb = jaxfb.get_forward_backward_func(made, overlap_grad_reduce=overlap, **options)
    plan, params, batch = plan_of(mesh, num_microbatches), toy.params(layers=5), toy.batch()
    text = jax.jit(lambda p, b: fb(toy.model, p, b, plan, KEY).grads).lower(params, batch).compile().as_text()
    found = [one for one in collectives(text) if one.kind in ("all-reduce", "reduce-scatter")]
    in_loop = ("fsdp",) if options.get("gather_ahead") else ()
    return sum(one.bytes * one.times for one in found if one.axes(made) != in_loop)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 2}, {}),
        slow({"fsdp": 2}, {"fsdp_gather": "step"}),
        slow({"data": 2, "fsdp": 2}, {"gather_ahead": True}),
    ],
    ids=str,
)
def test_there_is_one_reduction_however_many_microbatches(mesh, options):
    """And before the first layer's gradients are there, one of zeros, with a scatter before it another one."""
    two, four = (reduced(mesh, number, True, **options) for number in (2, 4))
    at_the_end = reduced(mesh, 2, False, **options)
    layer = sum(leaf[0].nbytes for leaf in jax.tree.leaves(toy.params(layers=5)["layers"]))
    assert abs(four - two) < 100  # the records of two more microbatches
    assert at_the_end <= two <= at_the_end + layer * (2 if "gather_ahead" in options else 1)


def test_reduced_gradients_are_written_over_the_sums():
    """What a reduction leaves in shape takes no memory of its own: no more than if it ran at the end."""
    rng, (layers, width), mesh = np.random.default_rng(0), (16, 64), {"data": 2, "fsdp": 2}
    stacked = {"w": rng.normal(size=(layers, width, width)), "b": rng.normal(size=(layers, width))}
    params = {"embed": rng.normal(size=(toy.VOCAB, width)), "gain": np.ones(3), "layers": stacked}

    def temporaries(overlap):
        options = {"gather_ahead": True, "overlap_grad_reduce": overlap}
        fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
        step = jax.jit(lambda p, b: fb(toy.model, p, b, plan_of(mesh, 2), KEY).grads)
        return step.lower(params, toy.batch()).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(True) <= temporaries(False)


def test_it_is_the_default_on_accelerators_where_gradients_are_whole():
    from jaxfb.forward_backward.layers.last_microbatch import obstacle_to_overlap, overlaps

    free = obstacle_to_overlap(None, "none")
    assert (
        free is None
        and overlaps(None, V5P[0], free, True, False)
        and overlaps(None, "gpu", free, True, False)
    )
    assert not overlaps(None, "cpu", free, True, False) and overlaps(True, "cpu", free, True, False)
    assert not overlaps(None, V5E, free, False, False) and not overlaps(False, V5E, free, True, False)
    assert overlaps(None, V5P[0], free, True, True) and overlaps(True, "gpu", free, True, True)
    assert not overlaps(None, "gpu", free, True, True) and not overlaps(None, V5E, free, True, True)
    cut = obstacle_to_overlap(None, "gradients")
    assert cut is not None and not overlaps(None, V5P[0], cut, True, False)


@pytest.mark.parametrize(
    ("topology", "overrides", "expected"),
    [
        ("v5p:2x2x1", ("mesh.data=4",), True),
        ("gpu:h100x4", ("mesh.data=4",), True),
        ("v5p:2x2x1", ("mesh.data=1", "mesh.fsdp=4", "parallel.fsdp_gather=step"), True),
        ("v5p:2x2x1", ("mesh.data=2", "mesh.fsdp=2"), True),
        ("v5p:2x2x1", ("mesh.data=1", "mesh.fsdp=4"), False),  # nothing is left to reduce
        ("v5p:2x2x1", ("mesh.data=2", "mesh.pp=2"), True),
        ("gpu:h100x4", ("mesh.data=2", "mesh.pp=2"), False),
        ("v5e:2x2", ("mesh.data=2", "mesh.pp=2"), False),
        ("v5p:2x2x1", ("mesh.data=2", "mesh.pp=2", "schedule=zb_v", "chunks=2"), False),
        ("v5p:2x2x1", ("mesh.data=4", "optimizer.sharding=gradients"), False),
        ("v5p:2x2x1", ("mesh.data=4", "parallel.overlap_grad_reduce=false"), False),
        ("cpu:4", ("mesh.data=4",), False),
    ],
)
def test_the_planner_and_the_step_have_the_same_default(topology, overrides, expected):
    where = parse_topology(topology)
    config = load_config("configs/quickstart.yaml", ("data.tokenizer=bytes", *overrides))
    assert reduces_beside(config, where) == expected
    mesh, model = abstract_mesh(config, 4, abstract_device(where)), model_sizes(config)
    params = jax.eval_shape(lambda: init_params(model, KEY))
    options = EngineOptions(**engine_options(config))
    plan = jaxfb.BatchPlan(rows=16, num_microbatches=2, data_parallel=data_parallel(mesh))
    assert resolve(mesh, options, transformer(model), params, plan).overlaps_grad_reduce == expected


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            {"pipe": 2, "data": 2},
            {"schedule": "zb_v", "num_chunks": 2},
            "a schedule of whole sequences whose devices are in lockstep and end with their first chunk, such as "
            "schedule=\"1f1b\", got 'zb_v'; use None",
        ),
        (
            {"data": 2},
            {"optimizer_sharding": "gradients"},
            'needs optimizer_sharding="none" or "data", got "gradients"; use "data"',
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(mesh, options, message):
    with pytest.raises(ValueError, match="overlap_grad_reduce=True") as refused:
        gradients(mesh, layers=4, **options)
    assert message in str(refused.value)


def test_a_loss_function_is_refused():
    def loss(params, microbatch, rng):
        return jaxfb.LossOutput({"loss": jaxfb.Sum(jnp.sum(params["w"]), 1.0)})

    with pytest.raises(ValueError, match="a Pipelined model, and this one is a loss function; use None"):
        make({"data": 2})(loss, {"w": jnp.ones(3)}, toy.batch(), plan_of({"data": 2}, 2))


def test_a_model_whose_hidden_state_has_no_gradient_is_reduced_at_the_end():
    """Its layers are no stage that runs in place."""

    def embed(outer, microbatch, rng):
        hidden = toy.model.embed(outer, microbatch, rng)
        return {"hidden": hidden, "number": jnp.zeros(hidden.shape[0], jnp.int32)}

    def layer(weights, hidden, microbatch, rng):
        after, out = toy.layer(weights, hidden["hidden"], microbatch, rng)
        return hidden | {"hidden": after}, out

    def head(outer, hidden, microbatch, rng):
        return toy.model.head(outer, hidden["hidden"], microbatch, rng)

    model = replace(toy.model, embed=embed, layer=layer, head=head)
    out = make({"data": 2})(model, toy.params(layers=3), toy.batch(), plan_of({"data": 2}, 2), KEY)
    close(out.grads, toy.gradient(3, seed=5)[1])
