"""The formula counts what an optimizer's update and what multi-token prediction take, near the compiler's answers."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.formula_memory import update_bytes
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import estimated

MUON = (
    "optimizer.name=muon optimizer.options={} batch.rows=64 batch.rows_per_microbatch=1 parallel.fsdp_gather=layer "
    "parallel.remat=layer"
).split()


@pytest.mark.parametrize(
    "vocabulary, needed, seconds", [(32064, 11.61, 2.350), (128256, 15.24, 2.571), (256512, 19.99, 2.881)]
)
def test_multi_token_prediction_is_near_the_compiler(vocabulary, needed, seconds):
    """By libtpu 0.0.48. Without the embedding and the residuals the formula had 11.6, 12.4 and 16.3 GB."""
    layout = ["model.mtp_depth=1", "batch.rows=64", f"model.vocab_size={vocabulary}"]
    found = estimated(load_config("configs/8b.yaml", layout), parse_topology("v5p:2x2x4"))
    assert found.needed / 1e9 == pytest.approx(needed, rel=0.05)
    assert found.step_seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("config, topology, needed", [("1b", "v5p:2x2x1", 10.24), ("8b", "v5p:2x2x4", 27.04)])
def test_muon_takes_all_its_matrices_at_once(config, topology, needed):
    """By libtpu 0.0.48. Without the update the formula had 6.2 and 10.3 GB."""
    found = estimated(load_config(f"configs/{config}.yaml", MUON), parse_topology(topology))
    assert found.needed / 1e9 == pytest.approx(needed, rel=0.07)


@pytest.mark.parametrize(
    "config, topology, shards, layers", [("1b", "v5p:2x2x1", 4, 16), ("8b", "v5p:2x2x4", 16, 32)]
)
def test_what_muon_takes_by_hand(config, topology, shards, layers):
    """Every matrix whole in bfloat16, and three and a half shards of each in float32."""
    config, topology = (
        load_config(f"configs/{config}.yaml", [*MUON, f"mesh.fsdp={shards}"]),
        parse_topology(topology),
    )
    sizes = model_sizes(config)
    attention = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_size
    matrices = layers * sizes.hidden_size * (attention + 3 * sizes.mlp_size)
    wanted = matrices * (2 + 3.5 * 4 / shards)
    assert update_bytes(config, sizes, topology) == pytest.approx(wanted, rel=0.001)
    on_host = load_config("configs/8b.yaml", [*MUON, "mesh.fsdp=16", "optimizer.memory=host"])
    by_layer = update_bytes(on_host, model_sizes(on_host), topology)
    whole = load_config("configs/8b.yaml", [*MUON, "mesh.fsdp=16"])
    assert by_layer == update_bytes(whole, model_sizes(whole), topology) / 32
    assert update_bytes(whole, model_sizes(whole), parse_topology("v5e:4x4")) == 0
