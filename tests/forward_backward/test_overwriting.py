"""Gradients that wait for their scatter in the memory of another layer's: the same numbers, and one buffer for all."""

import jax
import numpy as np
import pytest
import toy
from comparisons import close
from jax.sharding import PartitionSpec as P
from late import call, gradients, of_transformer

from jaxfb.config import load_config
from jaxfb.forward_backward.layers import execution, overwriting
from jaxfb.planner import parse_topology
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job
from jaxfb.platforms.compat import equations


@pytest.fixture(autouse=True)
def on_any_platform(monkeypatch):
    """And with matrices that fill no tile."""
    monkeypatch.setattr(execution, "overwrites_gradients", lambda remat: True)
    monkeypatch.setattr(overwriting, "_LEAST", 0)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ({"fsdp": 4}, 3, {"remat": "full"}),
    slow({"fsdp": 4}, 1, {"remat": "full"}),
    slow({"fsdp": 2}, 4, {"remat": "none"}),
    slow({"fsdp": 4}, 5, {"remat": "layer", "reduce_dtype": "float64"}),
    slow({"fsdp": 4}, 3, {"remat": "full", "fsdp_gather": 2}),
    slow({"data": 2, "fsdp": 4}, 3, {"remat": "full", "overlap_grad_reduce": True}),
    slow({"pipe": 2, "fsdp": 4}, 6, {"remat": "layer", "schedule": "1f1b"}),
]


@pytest.mark.parametrize(("mesh", "layers", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device(mesh, layers, options):
    out = gradients(mesh, layers, gather_ahead=True, **options)
    loss, grads = toy.gradient(layers, seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.parametrize(("mesh", "layers", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device_with_a_scatter_in_two_steps(mesh, layers, options, in_two_steps):
    test_gradients_are_those_of_one_device(mesh, layers, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"trainable": ["layers.b"]},
        {"trainable": ["layers.w", "embed"]},
        {"dtype": np.float32, "compute_dtype": "bfloat16"},
        {"dtype": np.float32, "reduce_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_gradients_are_bitwise_those_without_it(options, monkeypatch):
    with_it = gradients({"fsdp": 4}, 3, gather_ahead=True, remat="full", **options)
    monkeypatch.setattr(execution, "overwrites_gradients", lambda remat: False)
    jax.clear_caches()  # calls with equal options share one trace
    without = gradients({"fsdp": 4}, 3, gather_ahead=True, remat="full", **options)
    jax.tree.map(np.testing.assert_array_equal, with_it.grads, without.grads)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, "half"])
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}], ids=str)
def test_gradients_of_the_transformer_are_those_of_one_device(experts, ahead):
    whole, cut = of_transformer(experts, gather_ahead=ahead, remat="full")
    close(cut.loss, whole.loss)
    close(cut.grads, whole.grads)


@pytest.mark.parametrize(
    ("topology", "layout", "writes"),
    [
        ("v6e:2x4", ["parallel.remat=full"], True),
        ("v5p:2x2x2", ["parallel.remat=offload"], True),
        ("v5e:2x4", ["parallel.remat=full"], False),
        ("gpu:h100x8", ["parallel.remat=full"], False),
        ("v6e:2x4", ["parallel.remat=selective"], False),
        ("v6e:2x4", ["parallel.remat=full", "parallel.gather_ahead=half"], False),
        ("v6e:2x4", ["parallel.remat=full", "mesh.fsdp=4", "mesh.tensor=2"], False),
        ("v6e:2x4", ["parallel.remat=layer", "mesh.fsdp=4", "mesh.pipe=2", "schedule=1f1b"], False),
    ],
    ids=str,
)
def test_it_is_the_default_where_it_was_measured_to_pay(topology, layout, writes, monkeypatch):
    monkeypatch.undo()
    sizes = ["data.tokenizer=bytes", "model.num_heads=8", "model.num_kv_heads=8", "model.hidden_size=512"]
    config = load_config("configs/quickstart.yaml", [*sizes, "mesh.fsdp=8", *layout])
    job = make_job(config, abstract_mesh(config, 8, abstract_device(parse_topology(topology))))
    program = job.step.trace(job.state, job.batch).jaxpr
    found = [
        tuple(np.subtract(*(var.aval.shape[-2:] for var in eqn.invars[:2])))
        for eqn in equations(program)
        if eqn.primitive.name == "dynamic_update_slice"
        and eqn.invars[0].aval.ndim == eqn.invars[1].aval.ndim == 2
    ]
    assert bool({(0, 128), (16, 0)} & set(found)) == writes


def test_buffers_are_wider_where_that_is_little(monkeypatch):
    monkeypatch.undo()
    specs = {"up": P("fsdp"), "down": P(None, "fsdp"), "lora": P("fsdp"), "scale": P("fsdp"), "frozen": None}
    shapes = {"up": (256, 512), "down": (512, 256), "lora": (4096, 16), "scale": (4096,)}
    grads = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} | {"frozen": None}
    found = overwriting.Overwriting(specs).buffers(grads)
    wider = {"up": (256, 640), "down": (528, 256)}
    assert {name: leaf.shape for name, leaf in found.items() if leaf is not None} == shapes | wider
    back = overwriting.Overwriting(specs).read(jax.tree.map(lambda leaf: np.ones(leaf.shape), found))
    assert {name: leaf.shape for name, leaf in back.items() if leaf is not None} == shapes


def test_a_layer_writes_the_buffer_of_the_layer_before_it_behind_its_scatter():
    fb, arguments = call({"fsdp": 4}, 4, gather_ahead=True, remat="full")
    program = jax.make_jaxpr(lambda *given: fb(*given).grads, static_argnums=(0, 3))(*arguments).jaxpr
    made_by = {id(var): eqn for eqn in equations(program) for var in eqn.outvars}
    writes = [
        [var.aval.shape for var in eqn.invars[:2]] + [made_by.get(id(eqn.invars[0]))]
        for eqn in equations(program)
        if eqn.primitive.name == "dynamic_update_slice"
    ]
    wider = [(buffer, grad, by) for buffer, grad, by in writes if buffer[1] == grad[1] + 128]
    # the matrix of each of the two layers that are a turn of the loop
    assert [(buffer, grad) for buffer, grad, _ in wider] == [((8, 136), (8, 8))] * 2
    for _, _, barrier in wider:
        assert barrier.primitive.name == "optimization_barrier"
        waited_for = {made_by[id(var)].primitive.name for var in barrier.invars if id(var) in made_by}
        assert "slice" in waited_for  # the part of the shard that is scattered
