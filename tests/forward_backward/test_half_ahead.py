"""FSDP's gathers half a layer ahead of their use: the same gradients, and half a layer less that a loop carries."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job
from jaxfb.platforms.compat import equations
from jaxfb.types import Halves

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def second(weights, hidden, microbatch, rng, beside=()):
    return toy.layer(weights, hidden, microbatch, rng), beside


# "b" is gathered a layer ahead, "w" in its turn
MODEL = replace(toy.model, halves=Halves(lambda weights, hidden, microbatch, rng: hidden, second, ("w",)))


def gradients(mesh, layers=3, num_microbatches=2, schedule=None, dtype=np.float64, model=MODEL, **options):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), schedule, **options)
    return fb(model, toy.params(layers=layers, dtype=dtype), toy.batch(), plan, KEY)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 4}, {"remat": "layer"}),
        ({"fsdp": 2}, {"remat": "selective", "layers": 4, "num_microbatches": 1}),
        slow({"fsdp": 2}, {"remat": "halves", "layers": 1}),
        slow({"data": 2, "fsdp": 2}, {"remat": "full", "optimizer_sharding": "data"}),
        slow({"fsdp": 2}, {"remat": "none*1+full", "fsdp_gather": 2}),
        slow({"pipe": 2, "fsdp": 2}, {"remat": "full", "layers": 10, "schedule": "1f1b"}),
        slow({"pipe": 2, "fsdp": 2}, {"remat": "none", "layers": 10, "schedule": "zero_bubble"}),
        slow({"pipe": 2, "fsdp": 2}, {"remat": "layer", "layers": 7, "layers_per_stage": (6, 1)}),
        slow(
            {"pipe": 2, "fsdp": 2},
            {"remat": "layer", "layers": 8, "schedule": "interleaved", "num_chunks": 2},
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(mesh, options):
    out = gradients(mesh, **options, gather_ahead="half")
    loss, grads = toy.gradient(options.get("layers", 3), seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp_gather", ["layer", 2])
def test_scatters_in_several_steps_give_the_gradients_of_one_device(fsdp_gather, in_two_steps):
    """As on v6e where fsdp is a whole slice: those of the first half a turn apart, those of the second in one."""
    out = gradients({"fsdp": 4}, remat="full", fsdp_gather=fsdp_gather, gather_ahead="half")
    close(out.grads, toy.gradient(3, seed=5)[1])


@pytest.mark.parametrize(
    "options",
    [
        {"trainable": ["layers.b"]},
        slow({"trainable": ["layers.w", "embed"]}),
        {"dtype": np.float32, "compute_dtype": "bfloat16"},
        slow({"dtype": np.float32, "reduce_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_a_layer_ahead(options):
    """Bit by bit: every sum is formed in the same order and dtype."""
    far, half = (
        gradients({"fsdp": 4}, remat="layer", gather_ahead=each, **options) for each in (True, "half")
    )
    assert jax.tree.structure(far.grads) == jax.tree.structure(half.grads)
    for one, other in zip(jax.tree.leaves(far.grads), jax.tree.leaves(half.grads), strict=True):
        np.testing.assert_array_equal(one, other)


def carried_shapes(topology, ahead, *over, of="quickstart"):
    """The shapes of all that loops carry from turn to turn, of a config's model on four devices."""
    shape = ("data.tokenizer=bytes", "parallel.remat=full", f"parallel.gather_ahead={ahead}", *over)
    config = load_config(f"configs/{of}.yaml", shape)
    job = make_job(config, abstract_mesh(config, 4, abstract_device(parse_topology(topology))))
    program = job.step.trace(job.state, job.batch).jaxpr
    loops = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    pairs = [
        pair for eqn in loops for pair in zip(eqn.outvars, eqn.params["jaxpr"].jaxpr.outvars, strict=True)
    ]
    # what is stacked has one dim more outside than in a turn
    return {inner.aval.shape for outer, inner in pairs if outer.aval.shape == inner.aval.shape}


ATTENTION, MLP = {(96, 96), (96, 48)}, {(96, 256), (256, 96)}


@pytest.mark.parametrize(
    ("topology", "ahead", "over"),
    [
        ("cpu:4", "half", ("mesh.fsdp=4",)),
        slow("v5p:2x2x1", "half", ("mesh.fsdp=4",)),
        slow("v5p:2x2x1", "null", ("mesh.fsdp=2", "mesh.tp=2")),
    ],
)
def test_loops_carry_no_whole_array_of_the_second_half(topology, ahead, over):
    found = carried_shapes(topology, ahead, *over)
    assert found >= ATTENTION and not found & MLP


@pytest.mark.parametrize("topology", ["cpu:4", slow("v5p:2x2x1"), slow("gpu:h100x4")])
def test_a_layer_ahead_they_carry_both_halves(topology):
    ahead = "true" if topology == "cpu:4" else "null"
    assert carried_shapes(topology, ahead, "mesh.fsdp=4") >= ATTENTION | MLP


def test_a_model_that_names_no_second_half_is_refused():
    with pytest.raises(ValueError, match=r"Halves\.second_params.*use gather_ahead=True"):
        gradients({"fsdp": 2}, model=toy.model, gather_ahead="half")
