"""Operations of a mixture of experts: of the rows that are routed, not of the room for the worst case."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.kernels import kernel_flops
from jaxfb.planner.verdict import plan

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
