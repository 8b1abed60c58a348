"""The reader of compiled costs: loops counted, slices read as slices, waits shortened by the work beside them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.planner.chips import GPUS, Chip
from jaxfb.planner.compiled import too_large
from jaxfb.planner.program_cost.hlo_cost import HOST, cost_of, executed
from jaxfb.planner.program_cost.hlo_products import product_flops

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


# as XLA writes it for the SparseCore of a v6e, and shortened: what is sent comes with the update
ON_SPARSECORE = """HloModule m, is_scheduled=true
%called (p: f32[1000,1000]) -> f32[2000,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  ROOT %g = f32[2000,1000]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}
}
ENTRY %main (a: f32[1000,1000], b: f32[1000,1000]) -> f32[2000,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  %b = f32[1000,1000]{1,0} parameter(1)
  %call-start = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %before = f32[1000,1000]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %call-update = ((f32[1000,1000]{1,0}), f32[2000,1000]{1,0}) call-update(%call-start, %before)
  %beside = f32[1000,1000]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
  ROOT %call-done = f32[2000,1000]{1,0} call-done(%call-update)
}
"""

# as XLA writes a gather for a v5e, and shortened: a chain of fusions carries it out and hands on what it gathers
LINK = """ (shard: f32[500,1000], space: f32[1000,1000], mark: u32[]) -> f32[1000,1000] {
  %shard = SHARD parameter(0)
  %space = WHOLE parameter(1)
  %mark = MARK parameter(2)
  %gather = WHOLE all-gather(%shard), replica_groups={{0,1}}, dimensions={0}, CHAIN
"""
IN_A_CHAIN = """HloModule m, is_scheduled=true
%begin (shard: f32[500,1000]) -> (f32[500,1000], f32[1000,1000], u32[]) {
  %shard = SHARD parameter(0)
  %gather = WHOLE all-gather(%shard), replica_groups={{0,1}}, dimensions={0}, CHAIN
  ROOT %begun = (SHARD, WHOLE, MARK) custom-call(%gather), CALL="AsyncCollectiveStart"
}
%beside@LINK@  %a.1 = WHOLE parameter(3)
  %b.1 = WHOLE parameter(4)
  %product = WHOLE convolution(%a.1, %b.1), dim_labels=bf_io->bf
  ROOT %all = (WHOLE, HANDED_ON) tuple(%product, %shard, %space, %gather, %mark)
}
%end@LINK@  ROOT %there = WHOLE custom-call(%shard, %space, %gather, %mark), CALL="AsyncCollectiveDone"
}
ENTRY %main (s: f32[500,1000], a: f32[1000,1000], b: f32[1000,1000]) -> f32[1000,1000] {
  %s = SHARD parameter(0)
  %a = WHOLE parameter(1)
  %b = WHOLE parameter(2)
  %start = (SHARD, WHOLE, MARK) fusion(%s), kind=kCustom, calls=%begin
  %s.1 = SHARD get-tuple-element(%start), index=0
  %w.1 = WHOLE get-tuple-element(%start), index=1
  %m.1 = MARK get-tuple-element(%start), index=2
  %both = (WHOLE, HANDED_ON) fusion(%s.1, %w.1, %m.1, %a, %b), kind=kOutput, calls=%beside
  %s.2 = SHARD get-tuple-element(%both), index=1
  %w.2 = WHOLE get-tuple-element(%both), index=2
  %m.2 = MARK get-tuple-element(%both), index=4
  ROOT %done = WHOLE fusion(%s.2, %w.2, %m.2), kind=kCustom, calls=%end
}
"""
for old, new in {
    "@LINK@": LINK,
    "HANDED_ON": "SHARD, WHOLE, WHOLE, MARK",
    "WHOLE": "f32[1000,1000]{1,0}",
    "SHARD": "f32[500,1000]{1,0}",
    "MARK": "u32[]{:S(2)}",
    "CHAIN": 'frontend_attributes={chain_id="3"}',
    "CALL": "custom_call_target",
}.items():
    IN_A_CHAIN = IN_A_CHAIN.replace(old, new)

# a reduce-scatter on a v5e: an all-reduce fused with the slice behind it
SCATTER = """HloModule m, is_scheduled=true
%all-reduce-scatter.1 (p: f32[1000,1000]) -> f32[500,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  %sum = f32[1000,1000]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %own = f32[500,1000]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={500,1000}
}
ENTRY %main (a: f32[1000,1000]) -> f32[500,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  ROOT %r = f32[500,1000]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def chip(flops=1e30, bandwidth=1e30, axis_bandwidth=1e30, torus=0) -> Chip:
    return Chip("made up", flops, 1e9, bandwidth, axis_bandwidth, source="", torus=torus)


def test_a_loop_of_products_costs_its_length():
    def chain(x, weights):
        return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

    text = jax.jit(chain).lower(jnp.ones((64, 128)), jnp.ones((7, 128, 128))).compile().as_text()
    cost = cost_of(text, jaxfb.make_mesh(data=2), chip(flops=1.0))
    assert cost.flops == cost.work_seconds == 7 * 2 * 64 * 128 * 128


def test_instructions_that_take_longer_than_their_products_are_found():
    def chain(x, weights):
        return jnp.sin(lax.scan(lambda y, w: (y @ w, None), x, weights)[0])

    text = jax.jit(chain).lower(jnp.ones((64, 128)), jnp.ones((7, 128, 128))).compile().as_text()
    mesh, slow = jaxfb.make_mesh(data=2), chip(flops=1e6, bandwidth=1e6)
    found = [*executed(text, slow)]
    total = sum(one.times * one.cost.work_seconds for one in found)
    assert total == pytest.approx(cost_of(text, mesh, slow).work_seconds)
    (product,) = (one for one in found if one.cost.product_seconds)
    assert product.times == 7 and product.beside_products == 0
    there_and_back = pytest.approx(2 * jnp.ones((64, 128)).nbytes / 1e6)  # of the sine
    assert any(one.times == 1 and one.beside_products == there_and_back for one in found)


def test_work_between_start_and_done_hides_the_wait():
    mesh = jaxfb.make_mesh(data=2)
    # the product takes 2 s, the permute 4 s, the sum 4 s
    cost = cost_of(OVERLAPPED, mesh, chip(flops=1e9, axis_bandwidth=1e6))
    permute, total = cost.traffic["data", "collective-permute"], cost.traffic["data", "all-reduce"]
    assert (permute.seconds, permute.exposed_seconds, permute.asynchronous) == (4, 2, 4e6)
    assert (total.seconds, total.exposed_seconds, total.asynchronous) == (4, 4, 0)
    assert (permute.beside_products, total.beside_products) == (4e6, 0)
    assert cost.exposed_seconds == 6


def test_a_permute_on_a_torus_takes_one_of_the_two_links_along_an_axis():
    mesh = jaxfb.make_mesh(data=2)
    permutes = [
        cost_of(OVERLAPPED, mesh, chip(axis_bandwidth=1e6, torus=dims)).traffic["data", "collective-permute"]
        for dims in (0, 2)
    ]
    assert [one.seconds for one in permutes] == [4, 8]


def test_what_a_sparsecore_sends_is_hidden_from_the_update_on_that_gives_it_its_operands():
    # each product takes 2 s, the gather of half of 8 MB 4 s
    cost = cost_of(ON_SPARSECORE, jaxfb.make_mesh(data=2, fsdp=4), chip(flops=1e9, axis_bandwidth=1e6))
    assert list(cost.traffic) == [("fsdp", "all-gather")]
    gather = cost.traffic["fsdp", "all-gather"]
    assert (gather.count, gather.bytes, gather.asynchronous) == (1, 8e6, 8e6)
    assert (cost.work_seconds, gather.seconds, gather.exposed_seconds) == (4, 4, 2)
    (found,) = collectives(ON_SPARSECORE)
    assert (found.kind, found.times, found.replica_groups) == (
        "all-gather",
        1,
        ((0, 1), (2, 3), (4, 5), (6, 7)),
    )


def test_what_a_chain_of_fusions_gathers_is_moved_once_and_beside_their_products():
    mesh, megabyte = jaxfb.make_mesh(data=2), 1e6
    # the product takes 2 s, the gather of half of 4 MB 2 s
    cost = cost_of(IN_A_CHAIN, mesh, chip(flops=1e9, axis_bandwidth=1e6))
    assert (cost.work_seconds, cost.exposed_seconds) == (2, 0)
    assert cost.traffic["data", "all-gather"].seconds == 2
    gathered, product = (2 + 4) * megabyte, 3 * 4 * megabyte
    assert cost.bytes == gathered + product
    slow = cost_of(IN_A_CHAIN, mesh, chip(bandwidth=1e6))
    assert slow.work_seconds == 12  # of the product alone


def test_a_scatter_that_is_a_fusion_is_communication_and_no_work():
    cost = cost_of(SCATTER, jaxfb.make_mesh(data=2), chip(bandwidth=1e6, axis_bandwidth=1e6))
    assert (cost.work_seconds, cost.exposed_seconds, cost.bytes) == (0, 2, 6e6)


def test_collectives_among_the_same_devices_follow_one_another():
    second = "%start.2 = (f32[1000,1000]{1,0}, f32[1000,1000]{1,0}) collective-permute-start(%b), source_target_pairs"
    text = OVERLAPPED.replace("  %early", f"  {second}={{{{0,1}},{{1,0}}}}\n  %early")
    text = text.replace("  %sum", "  %done.2 = f32[1000,1000]{1,0} collective-permute-done(%start.2)\n  %sum")
    cost = cost_of(text, jaxfb.make_mesh(data=2), chip(flops=1e9, axis_bandwidth=1e6))
    permute = cost.traffic["data", "collective-permute"]  # of 8 s the product hides 2
    assert (permute.count, permute.seconds, permute.exposed_seconds) == (2, 8, 6)


def test_a_wait_for_another_collective_counts_as_that_ones():
    gather = "all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}"
    begun, text = "%start = (f32[1000,1000]{1,0}, f32[2000,1000]{1,0}) ", OVERLAPPED
    for line in OVERLAPPED.splitlines():
        text = text.replace(line, "") if "%done = " in line else text
        text = text.replace(line, f"  {begun}{gather}") if "%start = " in line else text
    cost = cost_of(text, jaxfb.make_mesh(data=2), chip(flops=1e9, axis_bandwidth=1e6))
    # the gather takes 4 s, the product beside it 2 s; the all-reduce of 4 s is sent after the gather
    found = {kind: (row.seconds, row.exposed_seconds) for (_, kind), row in cost.traffic.items()}
    assert found == {"all-gather": (4, 2), "all-reduce": (4, 4)}


def test_a_conditional_runs_its_longest_branch():
    def either(which, x):
        return lax.cond(which, lambda: (x @ x) @ x, lambda: x @ x.T)

    text = jax.jit(either).lower(True, jnp.ones((128, 128))).compile().as_text()
    assert "conditional(" in text
    assert cost_of(text, jaxfb.make_mesh(data=2), chip(flops=1.0)).flops == 2 * 2 * 128**3


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
    assert product_flops("convolution", out, left, right, f"%a, %b), {window}, dim_labels={labels}") == flops


def test_out_of_memory_is_read_with_its_numbers():
    early = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (192.17G) "
        "exceeds available HBM (15.75G)."
    )
    late = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.83G of 15.75G hbm. Exceeded by 4.08G."
    assert too_large(early).needed == 192.17 * 2**30
    assert (too_large(late).needed, too_large(late).available) == (19.83 * 2**30, 15.75 * 2**30)
    assert too_large("INTERNAL: something else") is None


# as XLA writes them for an H100: attention, a product by cuBLAS, a layer's slice and a layer's sum in their stacks
OF_A_GPU = """HloModule m, is_scheduled=true
%slice_of (i: s32[], stack: f32[32,64,128]) -> bf16[64,1,128] {
  %stack = f32[32,64,128]{2,0,1} parameter(1)
  %seen = f32[64,32,128]{2,1,0} bitcast(%stack)
  %i = s32[] parameter(0)
  %one = f32[64,1,128]{2,1,0} dynamic-slice(%seen, %i, %i, %i), dynamic_slice_sizes={64,1,128}
  ROOT %cast = bf16[64,1,128]{2,1,0} convert(%one)
}
%put_into (i: s32[], update: f32[64,128], stack: f32[32,64,128]) -> f32[64,32,128] {
  %stack = f32[32,64,128]{2,0,1} parameter(2)
  %seen = f32[64,32,128]{2,1,0} bitcast(%stack)
  %update = f32[64,128]{1,0} parameter(1)
  %raised = f32[64,1,128]{2,1,0} bitcast(%update)
  %i = s32[] parameter(0)
  ROOT %put = f32[64,32,128]{2,1,0} dynamic-update-slice(%seen, %raised, %i, %i, %i)
}
ENTRY %main (q: bf16[1,64,8,16], k: bf16[1,64,2,16]) -> f32[64,128] {
  %q = bf16[1,64,8,16]{3,2,1,0} parameter(0)
  %k = bf16[1,64,2,16]{3,2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %stack = f32[32,64,128]{2,0,1} parameter(3)
  %x = bf16[64,128]{1,0} parameter(4)
  %forward = (bf16[1,8,64,16]{3,1,2,0}, f32[1,8,64]{2,1,0}, u8[7000000]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["1","8","64","64"]},"mask_type":"CAUSAL"}}
  %backward = (bf16[1,8,64,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["1","8","64","64"]},"mask_type":"NO_MASK"}}
  %layer = bf16[64,1,128]{2,1,0} fusion(%i, %stack), kind=kLoop, calls=%slice_of
  %weight = bf16[64,128]{1,0} bitcast(%layer)
  %product = (f32[128,128]{1,0}, s8[4194304]{0}) custom-call(%x, %weight), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}
  %sum = f32[64,128]{1,0} parameter(5)
  ROOT %kept = f32[64,32,128]{2,1,0} fusion(%i, %sum, %stack), kind=kLoop, calls=%put_into
}
"""  # noqa: E501


def test_a_gpus_library_calls_and_slices_behind_bitcasts_are_read():
    cost = cost_of(OF_A_GPU, jaxfb.make_mesh(data=2))
    scores, product = 8 * 64 * 64 * 16, 2 * 128 * 128 * 64
    assert cost.flops == 2 * 2 * scores / 2 + 2 * 5 * scores + product
    queries, keys, layer = 2 * 64 * 8 * 16, 2 * 64 * 2 * 16, 64 * 128
    attention = 2 * (2 * queries + 2 * keys) + 4 * 8 * 64
    cast, matmul = 4 * layer + 2 * layer, 2 * 2 * layer + 4 * 128 * 128
    assert cost.bytes == pytest.approx(attention + cast + matmul + 2 * 4 * layer, abs=64)  # and six indices
    windowed = OF_A_GPU.replace('"CAUSAL"', '"CAUSAL","sliding_window_length":16')
    seen = 16 * (2 * 64 - 16) / (2 * 64**2)
    assert cost_of(windowed, jaxfb.make_mesh(data=2)).flops == cost.flops - 2 * 2 * scores * (1 / 2 - seen)


def test_a_group_over_several_hosts_goes_by_the_network_of_all_its_members():
    h100 = GPUS["h100"]
    assert h100.group_bandwidth(range(8)) == 450e9
    assert h100.group_bandwidth([0, 8, 16, 24]) == 50e9
    assert h100.group_bandwidth(range(0, 64, 2)) == 200e9
    assert h100.group_bandwidth(range(64)) == 400e9


# as libtpu 0.0.48 writes them, shortened: memory 5 is the host's
WITH_HOST = """HloModule m, is_scheduled=true
ENTRY %main (a: f32[1000,1000], h: f32[8,500,1000]) -> f32[8,500,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  %h = f32[8,500,1000]{2,1,0:T(8,128)S(5)} parameter(1)
  %zero = s32[] constant(0)
  %read = ((f32[8,500,1000]{2,1,0:T(8,128)S(5)}, s32[], s32[], s32[]), f32[1,500,1000]{2,1,0:T(8,128)}, u32[]{:S(2)}) dynamic-slice-start(%h, %zero, %zero, %zero), dynamic_slice_sizes={1,500,1000}
  %beside = f32[1000,1000]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
  %part = f32[1,500,1000]{2,1,0:T(8,128)} dynamic-slice-done(%read)
  %fast = (f32[1000,1000]{1,0:S(1)}, f32[1000,1000]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %there = f32[1000,1000]{1,0:S(1)} copy-done(%fast)
  %copy = (f32[1000,1000]{1,0:S(5)}, f32[1000,1000]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %written = f32[1000,1000]{1,0:S(5)} copy-done(%copy)
  %write = ((f32[8,500,1000]{2,1,0:T(8,128)S(5)}, f32[1,500,1000]{2,1,0:T(8,128)}, s32[], s32[], s32[]), f32[8,500,1000]{2,1,0:T(8,128)S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%h, %part, %zero, %zero, %zero)
  ROOT %r = f32[8,500,1000]{2,1,0:T(8,128)S(5)} dynamic-update-slice-done(%write)
}
"""  # noqa: E501


def test_what_moves_from_and_to_the_hosts_memory_is_hidden_by_the_work_beside_it():
    """The product takes 2 s, a slice of 2 MB 4 s each way, the copy of 4 MB 8 s; one to other memory does not count."""
    link = replace(chip(flops=1e9), host_bandwidth=0.5e6)
    cost = cost_of(WITH_HOST, jaxfb.make_mesh(data=2), link)
    read, write = cost.traffic.pop((HOST, "read")), cost.traffic.pop((HOST, "write"))
    assert (read.count, read.bytes, read.seconds, read.exposed_seconds) == (1, 2e6, 4, 2)
    assert (write.count, write.bytes, write.seconds, write.exposed_seconds) == (2, 6e6, 12, 12)
    assert (read.beside_products, write.beside_products) == (2e6, 0) and not cost.traffic


def test_what_xla_for_gpus_moves_in_a_fusion_counts_as_the_same():
    """As XLA of jax 0.10.2 writes it: a fusion that is named after the slice in it."""
    text = WITH_HOST.replace("%read", "%dynamic-slice-start.1").replace(
        "%write ", "%dynamic-update-slice-start "
    )
    text = text.replace("(%write)", "(%dynamic-update-slice-start)")
    for kind in ("dynamic-slice", "dynamic-update-slice"):
        text = text.replace(f" {kind}-start(", " fusion-start(").replace(f" {kind}-done(", " fusion-done(")
    assert text.count("fusion-") == 4
    link = replace(chip(flops=1e9), host_bandwidth=0.5e6)
    assert cost_of(text, jaxfb.make_mesh(data=2), link) == cost_of(WITH_HOST, jaxfb.make_mesh(data=2), link)
