"""The reader of compiled costs: loops counted, slices read as slices, waits shortened by the work beside them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfb
from jaxfb.planner.compiled import too_large
from jaxfb.planner.hlo_cost import _flops, cost_of

OVERLAPPED = """HloModule m, is_scheduled=true
ENTRY %main (a: f32[1000,1000], b: f32[1000,1000]) -> f32[1000,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  %b = f32[1000,1000]{1,0} parameter(1)
  %start = (f32[1000,1000]{1,0}, f32[1000,1000]{1,0}) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %early = f32[1000,1000]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %done = f32[1000,1000]{1,0} collective-permute-done(%start)
  %sum = f32[1000,1000]{1,0} all-reduce(%early), replica_groups={{0,1}}, to_apply=%add
  ROOT %r = f32[1000,1000]{1,0} add(%sum, %done)
}
"""


def test_a_loop_of_products_costs_its_length():
    def chain(x, weights):
        return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

    text = jax.jit(chain).lower(jnp.ones((64, 128)), jnp.ones((7, 128, 128))).compile().as_text()
    cost = cost_of(text, jaxfb.make_mesh(data=2), 1.0, 1e30, 1.0)
    assert cost.flops == cost.work_seconds == 7 * 2 * 64 * 128 * 128


def test_work_between_start_and_done_hides_the_wait():
    mesh = jaxfb.make_mesh(data=2)
    # the product takes 2 s, the permute 4 s, the sum 4 s
    cost = cost_of(OVERLAPPED, mesh, flops=1e9, bandwidth=1e30, axis_bandwidth=1e6)
    permute, total = cost.traffic["data", "collective-permute"], cost.traffic["data", "all-reduce"]
    assert (permute.seconds, permute.exposed_seconds, permute.asynchronous) == (4, 2, 4e6)
    assert (total.seconds, total.exposed_seconds, total.asynchronous) == (4, 4, 0)
    assert cost.exposed_seconds == 6


@pytest.mark.parametrize(
    "labels, left, right, out, window, flops",
    [
        ("bf_io->bf", "f32[8,16]", "f32[16,4]", "f32[8,4]", "", 2 * 8 * 16 * 4),
        # a batch of products, written as a TPU does: the batch is a dim of the window, one tap meets each
        (
            "0bf_0io->0bf",
            "f32[3,8,16]",
            "f32[3,16,4]",
            "f32[3,8,4]",
            "window={size=3 stride=2 pad=0_0 lhs_dilate=3}",
            2 * 3 * 8 * 16 * 4,
        ),
        (
            "b0f_0io->b0f",
            "f32[2,5,16]",
            "f32[3,16,4]",
            "f32[2,5,4]",
            "window={size=3 pad=1_1}",
            2 * 2 * 13 * 64,
        ),
    ],
)
def test_a_convolution_counts_the_taps_that_meet_a_number(labels, left, right, out, window, flops):
    assert _flops("convolution", out, left, right, f"%a, %b), {window}, dim_labels={labels}") == flops


def test_out_of_memory_is_read_with_its_numbers():
    early = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.17G) "
        "exceeds available HBM (15.75G)."
    )
    late = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.83G of 15.75G hbm. Exceeded by 4.08G."
    assert too_large(early).needed == 192.17 * 2**30
    assert (too_large(late).needed, too_large(late).available) == (19.83 * 2**30, 15.75 * 2**30)
    assert too_large("INTERNAL: something else") is None
