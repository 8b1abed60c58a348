"""The formula counts what layers keep, what waits between stages and what experts take as compiled programs have it."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.formula.memory import kept_bytes
from jaxfb.planner.formula.pieces import waiting_bytes
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import estimated

FOUR_LAYERS = "model.num_layers=4 model.tied_embeddings=false mesh.data=1 optimizer.options={}"
DENSE = (
    f"{FOUR_LAYERS} model.hidden_size=2560 model.num_heads=20 model.num_kv_heads=10 model.vocab_size=50304 "
    "model.mlp_size=7680 batch.rows=64 batch.rows_per_microbatch=4 mesh.fsdp=4 parallel.remat=none "
    "parallel.fsdp_gather=step"
)
ADAPTERS = (
    f"{FOUR_LAYERS} model.hidden_size=2560 model.num_heads=20 model.num_kv_heads=20 model.vocab_size=50304 "
    "model.mlp_size=7680 data.sequence_length=4096 batch.rows=128 batch.rows_per_microbatch=1 mesh.pipe=4 "
    "mesh.fsdp=4 schedule=1f1b parallel.remat=none parallel.fsdp_gather=layer lora.rank=16 "
    "precision.frozen_dtype=bfloat16"
)
EXPERTS = (
    f"{FOUR_LAYERS} model.num_heads=16 model.num_kv_heads=4 model.vocab_size=32768 model.mlp_size=4096 "
    "model.num_experts=8 model.experts_per_token=2 model.expert_mlp_size=1536 batch.rows=64 "
    "batch.rows_per_microbatch=4 parallel.remat=none"
)
APART, TOGETHER = (
    "mesh.fsdp=2 mesh.expert=2 parallel.fsdp_gather=step",
    "mesh.fsdp=4 parallel.fsdp_gather=layer",
)
STAGES_OF_EXPERTS = (
    "model.num_layers=8 model.hidden_size=3072 model.num_heads=24 model.num_kv_heads=6 model.vocab_size=50304 "
    "model.tied_embeddings=false model.mlp_size=9216 model.num_experts=8 model.experts_per_token=4 "
    "model.expert_mlp_size=1024 data.sequence_length=4096 batch.rows=128 batch.rows_per_microbatch=4 mesh.data=1 "
    "mesh.pipe=4 mesh.fsdp=2 mesh.expert=2 parallel.fsdp_gather=step parallel.remat=layer"
)
SPLIT_STAGES = (
    "model.num_layers=8 model.tied_embeddings=false model.num_heads=16 model.num_kv_heads=8 model.vocab_size=32768 "
    "model.mlp_size=6144 data.sequence_length=4096 batch.rows=16 batch.rows_per_microbatch=1 mesh.data=1 mesh.pipe=4 "
    "mesh.fsdp=1 chunks=2 schedule=zb_v parallel.remat=selective"
)
LATENT = (
    f"{FOUR_LAYERS} model.num_heads=16 model.num_kv_heads=16 model.vocab_size=32768 model.mlp_size=6144 "
    "model.latent.key_value_rank=512 model.latent.rotary_size=64 model.latent.value_size=128 model.head_size=192 "
    "data.sequence_length=4096 batch.rows=64 batch.rows_per_microbatch=1 mesh.fsdp=4 parallel.fsdp_gather=layer "
    "parallel.remat=selective optimizer.name=lion"
)
ON_THE_HOST = (
    "model.num_layers=4 model.num_heads=16 model.num_kv_heads=4 model.vocab_size=32768 model.mlp_size=8192 "
    "data.sequence_length=8192 batch.rows=32 batch.rows_per_microbatch=1 mesh.data=1 mesh.fsdp=2 mesh.tensor=2 "
    "model.sequence_parallel=true parallel.fsdp_gather=layer parallel.remat=offload optimizer.name=adafactor "
    "optimizer.options={}"
)
TIED_ON_ONE = (
    "model.num_layers=4 batch.rows=16 batch.rows_per_microbatch=2 precision.compute_dtype=float32 "
    "parallel.remat=layer mesh.fsdp=1 run.tokens=null run.updates=10000"
)


@pytest.mark.parametrize(
    "layout, topology, gigabytes, seconds",
    [
        # by the compiler of libtpu 0.0.48
        (DENSE, "v5p:2x2x1", 11.36, 0.245),
        (ADAPTERS, "v5p:2x2x4", 4.34, 0.243),
        (f"{EXPERTS} {APART}", "v5p:2x2x1", 9.93, 0.161),
        (f"{EXPERTS} {TOGETHER}", "v5p:2x2x1", 8.04, 0.1498),
        (STAGES_OF_EXPERTS, "v5p:2x2x4", 9.96, 0.904),
        (SPLIT_STAGES, "v5p:2x2x1", 6.44, 0.179),
        (LATENT, "v5e:2x2", 2.80, 1.043),
        (ON_THE_HOST, "v5e:2x2", 1.28, 1.262),
        (TIED_ON_ONE, "v5p:1x1x1", 12.50, 0.308),
    ],
)
def test_small_models_of_many_kinds_are_near_the_compiler(layout, topology, gigabytes, seconds):
    found = estimated(load_config("configs/1b.yaml", layout.split()), parse_topology(topology))
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert found.step_seconds == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    "layout, gigabytes",
    [(DENSE, 4.362), (ADAPTERS, 3.376), (f"{EXPERTS} {APART}", 4.681), (f"{EXPERTS} {TOGETHER}", 3.892)],
)
def test_residuals_are_those_that_compiled_programs_keep(layout, gigabytes):
    """The arrays that their loops over microbatches or ticks carry from the forward to the backward."""
    config, topology = load_config("configs/1b.yaml", layout.split()), parse_topology("v5p:2x2x1")
    sizes = model_sizes(config)
    kept = kept_bytes(config, sizes, topology) - waiting_bytes(config, sizes, topology)
    assert kept / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_between_stages_a_hidden_state_and_a_gradient_wait_and_one_more_travels():
    """Two slots of each, one of them for what nobody reads, what arrives, and what leaves."""
    config = load_config("configs/1b.yaml", STAGES_OF_EXPERTS.split())
    waits = waiting_bytes(config, model_sizes(config), parse_topology("v5p:2x2x4"))
    assert waits == 6 * 2 * 4 * 4096 * 3072
    alone = load_config("configs/1b.yaml", DENSE.split())
    assert waiting_bytes(alone, model_sizes(alone), parse_topology("v5p:2x2x1")) == 0
