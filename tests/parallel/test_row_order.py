"""Arrays that a pipeline carries from tick to tick keep the order of their rows, where a compiler may change it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxfb
from jaxfb.config import load_config
from jaxfb.forward_backward.layers.slot import Slot, SlotInRows
from jaxfb.forward_backward.pipeline.executor import Tick
from jaxfb.parallel import row_order
from jaxfb.parallel.row_order import in_rows
from jaxfb.planner.job import make_job


def constraints(function, *args) -> int:
    return str(jax.make_jaxpr(lambda *given: function(*given))(*args)).count(" layout_constraint[")


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(row_order, "platform_here", lambda: "tpu")


@pytest.mark.parametrize("shape, expected", [((4, 3), 1), ((2, 4, 3), 1), ((4,), 0), ((), 0)])
def test_arrays_of_two_dimensions_keep_their_order_on_tpus(on_tpu, shape, expected):
    assert constraints(in_rows, jnp.zeros(shape)) == expected


def test_no_other_platform_is_told_an_order():
    assert constraints(in_rows, jnp.zeros((4, 3))) == 0


@pytest.mark.parametrize("slot, times", [(SlotInRows, 1), (Slot, 0)])
def test_a_slot_is_written_and_read_in_the_order_of_rows(on_tpu, slot, times):
    buffers, index = jnp.zeros((3, 2, 4)), jnp.int32(1)

    def put(buffers, value):
        return slot(buffers, index).put(value).buffers

    assert constraints(put, buffers, jnp.ones((2, 4))) == 2 * times  # before and after
    assert constraints(lambda buffers: slot(buffers, index).get(), buffers) == times
    assert isinstance(slot(buffers, index).put(jnp.ones((2, 4))), slot)


@pytest.mark.parametrize("keeps_order, expected", [(True, [1, 2]), (False, [0, 0])])
def test_sums_leave_both_branches_of_an_event_in_the_order_of_rows(on_tpu, keeps_order, expected):
    tick = SimpleNamespace(_keeps_order=keeps_order)

    def event(valid, sums):
        def more(given):
            return {"table": given["table"] + 1, "scale": given["scale"]}

        return Tick._if(tick, "loss", "some", valid, more, sums)  # pyright: ignore[reportArgumentType]

    sums = {"table": jnp.zeros((4, 3)), "scale": jnp.zeros(3)}
    (cond,) = [one for one in jax.make_jaxpr(event)(jnp.int32(1), sums).eqns if one.primitive.name == "cond"]
    found = [
        [one.primitive.name for one in branch.eqns].count("layout_constraint")
        for branch in cond.params["branches"]
    ]
    assert found == expected


@pytest.mark.parametrize(
    "schedule, chunks, ordered", [("interleaved", 2, True), ("zb_v", 2, True), ("1f1b", 1, False)]
)
def test_pipelines_of_several_chunks_keep_the_order(on_tpu, schedule, chunks, ordered):
    more = ("mesh.pp=4", "parallel.remat=layer", f"schedule={schedule}", f"chunks={chunks}")
    assert (times_in_step(4, *more) > 0) == ordered


@pytest.mark.parametrize("remat, times", [("selective", 2), ("none", 2), ("layer", 0), ("full", 0)])
def test_layers_hand_on_their_output_in_the_order_of_rows_where_it_is_a_residual(on_tpu, remat, times):
    """Before a layer and behind it, in the loop over the layers of the forward."""
    assert times_in_step(1, f"parallel.remat={remat}") == times


def times_in_step(devices: int, *more: str) -> int:
    """Returns how often a small model's step asks for an order."""
    small = ("model.num_layers=8", "model.hidden_size=32", "model.mlp_size=64", "data.sequence_length=32")
    rows = ("batch.rows=16", "batch.num_microbatches=8", "mesh.data=1")
    job = make_job(
        load_config("configs/quickstart.yaml", [*small, *rows, *more]),
        jaxfb.make_mesh(pipe=devices, devices=jax.devices()[:devices]),
    )
    return str(job.step.trace(job.state, job.batch).jaxpr).count(" layout_constraint[")
