"""An update in a loop of at most one turn, as on GPUs, has the bits of one in a branch, as elsewhere."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import on_the_host
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec
from trees import CASES, ROWS, TREES, arrays, batch_of, dict_loss, params_of

from jaxfb import BatchPlan, make_mesh, make_train_step
from jaxfb.update import conditional

PLAN = BatchPlan(rows=ROWS, num_microbatches=2)
PROCESSOR = Path("/proc/cpuinfo")
ROUNDS_IN_PLACES = PROCESSOR.exists() and "avx512_bf16" in PROCESSOR.read_text()


def leaves_of(state):
    return jax.tree.leaves(on_the_host((state.params, state.opt_state, state.step, state.nonfinite_updates)))


def assert_same(found, wanted):
    """The same bits; of bfloat16 the same to rounding where the processor has instructions for it, since it then rounds
    where a program uses them."""
    assert len(found) == len(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        if one.dtype == jnp.bfloat16 and ROUNDS_IN_PLACES:
            np.testing.assert_allclose(*(x.astype(np.float32) for x in (one, other)), rtol=2**-6, atol=2**-9)
        else:
            assert one.tobytes() == other.tobytes()


def after_three_updates(step, params):
    """The leaves after each of three updates, of which the second is not finite and skipped."""
    state, found = step.init(params), []
    for seed, under_root in ((0, None), (1, 0.0), (2, None)):
        batch = batch_of(seed) if under_root is None else batch_of(seed, under_root=under_root)
        state, metrics = step(state, batch)
        assert bool(metrics.skipped) == (under_root is not None)
        found.append(leaves_of(state))
    assert any(one.tobytes() != other.tobytes() for one, other in zip(found[0], found[2], strict=True))
    return found


@pytest.mark.filterwarnings("ignore:the optimizer accumulates")
@pytest.mark.parametrize("name", CASES)
def test_a_loop_has_the_bits_of_a_branch(name, monkeypatch):
    optimizer, dtype, tree = CASES[name]
    make, loss = TREES[tree]

    def run():
        step = make_train_step(loss, optimizer, None, PLAN, max_grad_norm=1.0, dropout=False)
        return after_three_updates(step, make(*arrays(dtype)))

    branch = run()
    monkeypatch.setattr(conditional, "_copies_branches", lambda mesh: True)
    assert_same(run(), branch)


def test_a_loop_keeps_the_places_of_a_state_on_a_mesh(monkeypatch):
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=2)

    def run():
        step = make_train_step(dict_loss, optax.adam(0.1), mesh, plan, optimizer_sharding="data")
        places = jax.tree.map(lambda leaf: leaf.sharding, step.init(params_of()).opt_state)
        assert any(place.spec != PartitionSpec() for place in jax.tree.leaves(places))
        return after_three_updates(step, params_of())

    branch = run()
    monkeypatch.setattr(conditional, "_copies_branches", lambda mesh: True)
    assert_same(run(), branch)


@pytest.mark.parametrize(("platform", "primitive"), [("cpu", "cond"), ("tpu", "cond"), ("gpu", "while")])
def test_a_loop_stands_where_branches_are_copied(platform, primitive):
    device = AbstractDevice(device_kind="any", platform=platform, num_cores=None)
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    traced = jax.make_jaxpr(lambda flag, x: conditional.changed_if(flag, jnp.cos, x, mesh))(True, 1.0)
    assert [one.primitive.name for one in traced.eqns if one.primitive.name in ("cond", "while")] == [
        primitive
    ]
