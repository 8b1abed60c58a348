"""The formula counts heads in whole tiles, latent attention, sliding windows, and forward passes, near the compiler."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.formula.memory import forward_bytes
from jaxfb.planner.formula.time import step_flops
from jaxfb.planner.formula.widths import padding_width
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import estimated

ONE_B = "mesh.fsdp=16 batch.rows=128 batch.rows_per_microbatch=1 parallel.fsdp_gather=layer"
LATENT = (
    "model.latent.key_value_rank=512 model.latent.rotary_size=32 model.latent.value_size=64 model.head_size=96 "
    "model.num_kv_heads=32"
)
EXPERTS = (
    "model.num_experts=16 model.expert_mlp_size=1024 model.shared_expert_size=2048 model.experts_per_token=4 "
    "model.tied_embeddings=false"
)
WINDOW = (
    "model.window=512 data.sequence_length=8192 parallel.remat=halves optimizer.name=sgd "
    'optimizer.options={"momentum":0.9}'
)


@pytest.mark.parametrize(
    "more, gigabytes, seconds",
    [
        # by libtpu 0.0.48
        ("", 4.55, 0.345),
        (LATENT, 5.13, 0.393),
        (EXPERTS, 6.11, 0.541),
        ("model.vocab_size=256000", 5.59, 0.430),
        (WINDOW, 4.97, 1.564),
    ],
)
def test_1b_on_sixteen_chips_is_near_the_compiler(more, gigabytes, seconds):
    config = load_config("configs/1b.yaml", [*ONE_B.split(), *more.split()])
    found = estimated(config, parse_topology("v5p:2x2x4"))
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert found.step_seconds == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("window, blocks", [(None, 8.5), (512, 2 - 1 / 16), (1024, 3 - 3 / 16)])
def test_kernels_multiply_whole_blocks_at_both_ends_of_a_window(window, blocks):
    """Blocks of 512 keys of a row of 8192: of 16 blocks of queries the first sees one, and each later one more, at most
    as many as the window reaches and its own.
    """
    layout = [*ONE_B.split(), "data.sequence_length=8192", "parallel.remat=layer"]
    none, windowed = (
        load_config("configs/1b.yaml", [*layout, *more])
        for more in ([], [f"model.window={window}"] if window else [])
    )
    topology, tokens = parse_topology("v5p:2x2x4"), 128 * 8192 / 16
    flops, whole = (step_flops(one, model_sizes(one), topology) / tokens for one in (windowed, none))
    # scores and output: two products, and again, and five of the backward, less those that are counted as its model's
    of_a_block = (2 + 2 + 5) * 2 * 16 * 2048 * 512
    assert whole - flops == pytest.approx((8.5 - blocks) * of_a_block, abs=whole * 1e-6)


def test_heads_fill_tiles_on_a_tpu_alone():
    narrow, wide = (load_config(f"configs/{name}.yaml", []) for name in ("1b", "8b"))
    tpu, gpu = parse_topology("v5p:2x2x4"), parse_topology("gpu:h100x8")
    assert padding_width(narrow, model_sizes(narrow), tpu) == (2 * 32 + 2 * 8) * 64
    assert padding_width(narrow, model_sizes(narrow), gpu) == padding_width(wide, model_sizes(wide), tpu) == 0


def test_a_pass_without_gradients_takes_one_block_of_logits():
    """Log-probs of 1B by libtpu 0.0.48. The formula had 1.94 GB."""
    config = load_config("configs/1b.yaml", ONE_B.split())
    found = forward_bytes(config, model_sizes(config), parse_topology("v5p:2x2x4"))
    assert found / 1e9 == pytest.approx(1.34, rel=0.07)
