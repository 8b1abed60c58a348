"""Arrays that a pipeline carries from tick to tick keep the order of their rows, where a compiler may change it."""

import jax
import jax.numpy as jnp
import pytest

from jaxfb.forward_backward.pipeline import _if
from jaxfb.forward_backward.slot import Slot
from jaxfb.parallel import row_order
from jaxfb.parallel.row_order import in_rows


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


def test_a_slot_is_written_and_read_in_the_order_of_rows(on_tpu):
    buffers, index = jnp.zeros((3, 2, 4)), jnp.int32(1)
    put = lambda buffers, value: Slot(buffers, index).put(value).buffers  # noqa: E731
    assert constraints(put, buffers, jnp.ones((2, 4))) == 2  # before and after
    assert constraints(lambda buffers: Slot(buffers, index).get(), buffers) == 1


def test_sums_leave_both_branches_of_an_event_in_the_order_of_rows(on_tpu):
    """In each branch one constraint on the way in and one on the way out would do; "same" needs one."""

    def event(valid, sums):
        return _if(
            "loss", "some", valid, lambda given: {"table": given["table"] + 1, "scale": given["scale"]}, sums
        )

    sums = {"table": jnp.zeros((4, 3)), "scale": jnp.zeros(3)}
    (cond,) = [one for one in jax.make_jaxpr(event)(jnp.int32(1), sums).eqns if one.primitive.name == "cond"]
    found = [
        [one.primitive.name for one in branch.eqns].count("layout_constraint")
        for branch in cond.params["branches"]
    ]
    assert found == [1, 2]
