"""A pipeline's last tick reduces the layers' gradients: the same gradients, each reduced once, beside its backward."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.schedules import KINDS, kind_of, make

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def plan_of(mesh, num_microbatches):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    return jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)


def engine(mesh, overlap=True, **options):
    return jaxfb.get_forward_backward_func(
        jaxfb.make_mesh(pipe=2, **mesh), overlap_grad_reduce=overlap, **options
    )


def gradients(mesh, layers=4, num_microbatches=4, dtype=np.float64, **options):
    arguments = toy.params(layers=layers, dtype=dtype), toy.batch(), plan_of(mesh, num_microbatches), KEY
    return engine(mesh, **options)(toy.model, *arguments)


CASES = [
    ({"data": 2}, {}),
    ({"data": 2}, {"schedule": "zero_bubble", "remat": "none", "poison_bubbles": True}),
    slow({"data": 4}, {"num_microbatches": 1, "poison_bubbles": True}),
    ({"data": 2}, {"schedule": "interleaved", "num_chunks": 2, "remat": "layer"}),
    slow({"data": 2}, {"schedule": "v_shape", "num_chunks": 2, "optimizer_sharding": "data"}),
    slow({"data": 2}, {"schedule": "gpipe", "remat": "full", "layers": 12, "optimizer_sharding": "data"}),
    slow({"data": 2}, {"layers": 5, "layers_per_stage": (2, 3), "poison_bubbles": True}),
    slow({"data": 2}, {"layers": 5, "layers_per_stage": (2, 3), "optimizer_sharding": "data"}),
    slow({"data": 2}, {"remat": "none*1+full", "layers": 4}),
    slow({"fsdp": 4}, {"fsdp_gather": "step", "remat": "selective", "schedule": "zero_bubble", "layers": 8}),
    slow({"data": 2, "fsdp": 2}, {"fsdp_gather": "step", "optimizer_sharding": "data", "num_chunks": 2}),
    slow({"data": 2, "fsdp": 2}, {"fsdp_gather": "layer", "remat": "layer"}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "remat": "full", "layers": 12}),
    slow({"data": 2, "fsdp": 2}, {"gather_ahead": True, "fsdp_gather": 1, "schedule": "zero_bubble"}),
    slow({"data": 2}, {"head_placement": "last", "normalize": "microbatch"}),
]


@pytest.mark.parametrize(("mesh", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device(mesh, options):
    out = gradients(mesh, **options)
    loss, grads = toy.gradient(options.get("layers", 4), seed=5)
    if "normalize" in options:  # another objective: that of a call that reduces at the end
        at_the_end = gradients(mesh, overlap=False, **options)
        loss, grads = at_the_end.loss, at_the_end.grads
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"dtype": np.float32, "compute_dtype": "bfloat16"}, 3e-2),
        ({"dtype": np.float32, "accum_dtype": "float64", "fsdp_gather": "step"}, 2e-6),
        ({"dtype": np.float64, "accum_dtype": "float32", "schedule": "zero_bubble"}, 2e-6),
    ],
    ids=str,
)
def test_every_dtype_is_as_exact_as_on_one_device(options, rtol):
    out = gradients({"data": 2, "fsdp": 2}, **options)
    wanted, dtype = toy.gradient(4, seed=5)[1], options.get("accum_dtype", "float32")
    for grad, exact in zip(jax.tree.leaves(out.grads), jax.tree.leaves(wanted), strict=True):
        assert grad.dtype == dtype
        assert np.abs(grad - exact).max() < rtol * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [["layers.w", "embed"], ["embed", "gain"]], ids=str)
def test_frozen_parameters_have_no_gradient(trainable):
    out, wanted = gradients({"data": 2}, trainable=trainable), toy.gradient(4, seed=5)[1]
    assert out.grads["layers"]["b"] is None
    close(out.grads["embed"], wanted["embed"])
    if "layers.w" in trainable:
        close(out.grads["layers"]["w"], wanted["layers"]["w"])


def summed(num_microbatches, overlap):
    """Bytes that a call sums over data."""
    fb, plan = engine({"data": 2}, overlap), plan_of({"data": 2}, num_microbatches)
    params, batch = toy.params(layers=8), toy.batch()
    text = jax.jit(lambda p, b: fb(toy.model, p, b, plan, KEY).grads).lower(params, batch).compile().as_text()
    found = [one for one in collectives(text) if one.kind == "all-reduce" and "data" in one.axes(fb.mesh)]
    return sum(one.bytes * one.times for one in found)


@pytest.mark.slow
def test_there_is_one_reduction_however_many_microbatches():
    """And before the first layer's gradients are there, one of zeros."""
    two, four, at_the_end = summed(2, True), summed(4, True), summed(2, False)
    layer = sum(leaf[0].nbytes for leaf in jax.tree.leaves(toy.params(layers=8)["layers"]))
    assert abs(four - two) < 100  # the records of two more microbatches
    assert at_the_end <= two <= at_the_end + layer


@pytest.mark.parametrize("name", KINDS.names)
def test_every_schedule_in_lockstep_ends_with_the_first_chunk(name):
    """The planner relies on it."""
    kind = kind_of(name)
    pieces, chunks = 4 if name.startswith("seq") else 1, 2 if "v" in name or name == "interleaved" else 1
    program = make(name, 4, 8, chunks, pieces).program
    assert program.ends_with_first_chunk == (not kind.by_device and pieces == 1)
    before, last = program.phases_before_last_tick, program.last_tick
    assert before[-1].stop == last.start and last.num_ticks == 1 and set(last.kinds) <= set("BW")


def test_a_table_may_end_with_another_chunk():
    program = make("interleaved", 2, 2, 2, 1).program
    others = [[1, 1]] * program.num_ticks
    assert program.ends_with_first_chunk
    assert not replace(program, rows=program.rows | {"b_chunk": others}).ends_with_first_chunk
