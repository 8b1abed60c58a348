"""An optimizer state in the host's memory: the train state is the one that it is on the devices."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

import jaxfb
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.update.pipeline_state import opened
from jaxfb.update.streamed import LayerStream, WholeStream

ADAMW = jaxfb.make_optimizer("adamw", learning_rate=0.1, weight_decay=0.1)
MUON = jaxfb.make_optimizer("muon", learning_rate=0.1, weight_decay=0.1)
ADAFACTOR = jaxfb.make_optimizer("adafactor", learning_rate=0.1, min_dim_size_to_factor=2)
CHAIN = optax.chain(optax.clip_by_global_norm(0.3), optax.inject_hyperparams(optax.adam)(learning_rate=0.1))


def step_of(memory, sizes=None, optimizer=ADAMW, **options):
    mesh = jaxfb.make_mesh(**(sizes or {"data": 1}))
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=max(2 // replicas, 1), data_parallel=replicas)
    options = {"max_grad_norm": 0.5, "optimizer_memory": memory, **options}
    return jaxfb.make_train_step(toy.model, optimizer, mesh, plan, **options)


def places_of(state):
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


def numbers(state):
    return jax.tree.map(np.asarray, (state.params, state.opt_state, state.step))


def in_host_memory(state):
    """The memory kinds of the state's matrices."""
    state = opened(state)[0]
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
    return kinds == {"pinned_host"}


@pytest.mark.parametrize(
    "sizes, optimizer, options",
    [
        ({"data": 1}, ADAMW, {}),
        pytest.param({"data": 2, "fsdp": 2}, MUON, {"optimizer_sharding": "data"}, marks=pytest.mark.slow),
        pytest.param(
            {"pipe": 2, "fsdp": 2},
            ADAMW,
            {"schedule": "interleaved", "num_chunks": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"pipe": 2}, ADAMW, {"schedule": "1f1b", "layers_per_stage": (3, 1)}), marks=pytest.mark.slow
        ),
        pytest.param({"data": 1}, ADAFACTOR, {}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, CHAIN, {}, marks=pytest.mark.slow),
        pytest.param(
            {"fsdp": 2},
            ADAMW,
            {"trainable": ["layers"], "loss_scale": jaxfb.optim.DynamicLossScale()},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adamw", "muon-zero1", "pipeline", "uneven", "adafactor", "chain", "frozen"],
)
def test_updates_are_those_on_the_devices(sizes, optimizer, options):
    here, there = (step_of(memory, sizes, optimizer, **options) for memory in ("device", "host"))
    a, b = here.init(toy.params()), there.init(toy.params())
    assert in_host_memory(b) and not in_host_memory(a)
    for seed in range(3):
        batch = toy.batch(seed, rows=8)
        places = places_of(b)
        a, of_a = here(a, batch)
        b, of_b = there(b, batch)
        assert places_of(b) == places  # the next step moves nothing
        chex.assert_trees_all_close(numbers(a), numbers(b), rtol=1e-12, atol=1e-15)
        chex.assert_trees_all_close(of_a, of_b, rtol=1e-12)


@pytest.mark.slow
def test_a_skipped_update_leaves_all_bits():
    step = step_of("host", {"data": 2})
    state, _ = step(step.init(toy.params()), toy.batch(0, rows=8))
    before = numbers(state)
    bad = toy.batch(1, rows=8)
    bad["row_weight"] = bad["row_weight"] * np.nan
    state, metrics = step(state, bad)
    assert metrics.skipped and metrics.update_norm == 0
    chex.assert_trees_all_equal(numbers(state), before)
    state, metrics = step(state, toy.batch(1, rows=8))
    assert not metrics.skipped and int(state.step) == 2


@pytest.mark.slow
def test_a_moment_that_is_not_finite_is_found_in_its_layer():
    """The updates of all leaves are judged before the first is applied, the last layer's too."""
    step = step_of("host")
    state = step.init(toy.params())
    inner = state.opt_state.inner
    poisoned = inner._replace(mu={**inner.mu, "layers": {**inner.mu["layers"]}})
    poisoned.mu["layers"]["w"] = np.array(inner.mu["layers"]["w"])
    poisoned.mu["layers"]["w"][-1, 2, 3] = np.inf
    state = step.place(dataclasses.replace(state, opt_state=state.opt_state._replace(inner=poisoned)))
    before = numbers(state)
    state, metrics = step(state, toy.batch(0, rows=8))
    assert metrics.nonfinite_causes(toy.params()) == {"updates": ["['layers']['w']"]}
    chex.assert_trees_all_equal(numbers(state), before)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"pipe": 2}], ids=["fsdp", "pipe"])
def test_a_run_continues_with_the_state_in_either_memory(sizes, tmp_path):
    steps = {memory: step_of(memory, sizes) for memory in ("host", "device")}
    for saved, read in (("host", "device"), ("device", "host")):
        state, _ = steps[saved](steps[saved].init(toy.params()), toy.batch(0, rows=8))
        with CheckpointStore(tmp_path / saved) as store:
            store.save(1, state, {})
            store.wait()
            like = steps[read].abstract_state(lambda key: jax.tree.map(jnp.asarray, toy.params()))
            restored = steps[read].place(store.restore(like)[0])
        assert in_host_memory(restored) == (read == "host")
        chex.assert_trees_all_equal(numbers(restored), numbers(state))
        moved = steps[read].place(state)
        assert in_host_memory(moved) == (read == "host")
        chex.assert_trees_all_equal(numbers(moved), numbers(state))
        after, _ = steps[read](restored, toy.batch(1, rows=8))
        assert int(after.step) == 2


@pytest.mark.slow
def test_split_gradients_are_applied_to_it():
    whole, batch = step_of("host", {"fsdp": 2}), toy.batch(0, rows=8)
    a, _ = whole(whole.init(toy.params()), batch)
    b = whole.init(toy.params())
    b, _ = whole.apply(b, whole.gradients(b, batch))
    chex.assert_trees_all_close(numbers(a), numbers(b), rtol=1e-12, atol=1e-15)


def test_layers_travel_one_at_a_time():
    """No matrix of the layers' moments is on the devices whole, of an optimizer that treats layers alike."""
    step = step_of("host", {"fsdp": 2})
    program = str(step.trace(step.init(toy.params()), toy.batch(0, rows=8)).jaxpr)
    moved = re.findall(r":f64(<host>)?\[([\d,]+)\] = device_put", program)
    assert {shape for _, shape in moved if shape.count(",") == 2} == {"1,8,8"}


def test_which_optimizers_are_taken_apart():
    own = jaxfb.make_optimizer("adamw", learning_rate=0.1, mask=lambda params: True)
    kinds = {
        one: type(step_of("host", optimizer=one)._programs.change)
        for one in (ADAMW, MUON, ADAFACTOR, CHAIN, own)
    }
    assert list(kinds.values()) == [LayerStream, LayerStream, WholeStream, WholeStream, WholeStream]
