"""Operations of a mixture of experts: of the rows that are routed, not of the room for the worst case."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import hlo_cost, parse_topology
from jaxfb.planner.kernels import kernel_flops
from jaxfb.planner.routing import Routed
from jaxfb.planner.verdict import plan

# as the compiler for TPUs writes three products of 512 rows of 256 numbers, of two groups, with matrices of 256 x 384:
# forward, the gradient of the rows, that of the matrices. A kernel of other shapes is not among them.
MEGABLOX = """HloModule step
ENTRY %main (n: s32[], begins: s32[3], groups: s32[5], places: s32[5], first: s32[1], x: bf16[512,256], \
w: bf16[2,256,384]) -> bf16[2,256,384] {
  %n = s32[] parameter(0)
  %begins = s32[3]{0} parameter(1)
  %groups = s32[5]{0} parameter(2)
  %places = s32[5]{0} parameter(3)
  %first = s32[1]{0} parameter(4)
  %x = bf16[512,256]{1,0} parameter(5)
  %w = bf16[2,256,384]{2,1,0} parameter(6)
  %jvp_jit_gmm__.26 = bf16[512,384]{1,0:T(8,128)(2,1)} custom-call(%n, %begins, %groups, %places, %first, \
/*index=5*/%x, %w), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"tiling\\": {\\"tile_m\\": 128, \\"tile_k\\": 128, \\"tile_n\\": 128}}"
}}, metadata={op_name="jit(f)/shard_map/jvp(jit(gmm))/pallas_call"}
  %shard_map.12 = bf16[512,256]{1,0} custom-call(%n, %begins, %groups, %places, %first, %jvp_jit_gmm__.26, %w), \
custom_call_target="tpu_custom_call"
  %other.1 = bf16[512,256]{1,0} custom-call(%begins, %groups, %places, %first, %shard_map.12), \
custom_call_target="tpu_custom_call"
  ROOT %shard_map.13 = bf16[2,256,384]{2,1,0} custom-call(%n, %begins, %groups, %places, %first, %x, \
%jvp_jit_gmm__.26), custom_call_target="tpu_custom_call"
}
"""
SIZES = (
    "model.num_layers=2 model.hidden_size=64 model.expert_mlp_size=128 data.sequence_length=512 batch.rows=8 "
    "batch.num_microbatches=null batch.rows_per_microbatch=2 parallel.remat=none mesh.dp=1 optimizer.name=adamw"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 4])
def test_experts_cost_the_rows_that_are_routed(experts):
    config = load_config("configs/moe.yaml", [*SIZES, f"mesh.ep={experts}"])
    verdict = plan(config, parse_topology(f"cpu:{experts}"))
    # by hand attention is causal, and whole in the program; half of the last tile of each group is empty
    assert 1 < verdict.compiled.flops / verdict.model_flops < 1.45


@pytest.mark.slow
def test_the_pass_that_counts_is_counted():
    """A loss of the whole update's balance needs a forward pass over it before the first backward."""
    asked = [*SIZES, "mesh.ep=4", "model.batch_balance_coefficient=0.01"]
    verdict = plan(load_config("configs/moe.yaml", asked), parse_topology("cpu:4"))
    assert 1.35 < verdict.compiled.flops / verdict.model_flops < 1.9


def test_a_tpus_kernel_for_experts_counts_the_rows_there_are():
    shapes = [(1,), (4,), (64, 16), (2, 16, 32)]
    assert kernel_flops("ragged-dot-none.1", shapes, 10 / 64) == 2 * 10 * 16 * 32
    assert kernel_flops("ragged-dot-none.1", shapes) == 2 * 64 * 16 * 32


def test_a_grouped_product_is_known_by_what_it_is_given():
    """Its name is that of the function or the shard_map around it."""
    one = 2 * 512 * 256 * 384
    assert hlo_cost.cost_of(MEGABLOX, None).flops == 3 * one
    assert hlo_cost.cost_of(MEGABLOX, None, routed=Routed(share=0.25)).flops == 3 * one / 4
