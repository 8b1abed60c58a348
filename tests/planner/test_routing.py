"""Operations of a mixture of experts: of the rows that are routed, not of the room for the worst case."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxfb.config import load_config
from jaxfb.models.config import TransformerConfig
from jaxfb.models.grouped_matmul import TILE, TILE_OF_GPUS, tile_size
from jaxfb.models.moe import how_dispatched
from jaxfb.parallel.expert import spaces
from jaxfb.planner import parse_topology
from jaxfb.planner.program_cost import hlo_cost
from jaxfb.planner.program_cost.kernels import kernel_flops
from jaxfb.planner.program_cost.routing import Routed, routed
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


@pytest.mark.parametrize(
    ("expert", "platform", "length", "most"),
    [
        (1, "tpu", 1024, TILE),
        (2, "tpu", 1024, TILE),
        (2, "tpu", 16384, TILE),
        (1, "gpu", 16384, TILE_OF_GPUS),
    ],
)
def test_turns_of_grouped_products_are_those_of_the_rows_that_are_routed(expert, platform, length, most):
    """And half a tile more of each group."""
    sizes = TransformerConfig(8, num_layers=1, hidden_size=8, num_heads=1, num_experts=4, experts_per_token=2)
    mesh = {"data": 3, "fsdp": 1, "expert": expert, "context": 2}
    job = SimpleNamespace(
        schedule=None,
        sizes=sizes,
        mesh=SimpleNamespace(shape=mesh, devices=np.array([SimpleNamespace(platform=platform)])),
        plan=SimpleNamespace(rows_per_global_microbatch=6 * expert),
        config=SimpleNamespace(data=SimpleNamespace(sequence_length=length)),
    )
    tokens = 2 * length // 2
    (space,) = spaces(tokens, 2, 4, expert, **how_dispatched(sizes, tokens))
    rows, groups = space.rows, 4 // expert
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((rows, 8), (groups, 8, 8))]
    jaxpr = jax.make_jaxpr(jax.lax.ragged_dot)(*shapes, np.full(groups, rows // groups, np.int32))
    found = routed(job, jaxpr)
    turns = space.even / tile_size(rows, groups, most) + groups / 2
    assert found.share == space.even / rows and found.turns == turns
    assert found.of([rows]) == (found.share, turns) == found.of([])
    assert routed(job, jax.make_jaxpr(lambda x: x + 1)(1.0)) == Routed()
