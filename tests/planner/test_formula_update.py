"""The formula counts what an optimizer's update and what multi-token prediction take, near the compiler's answers."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.formula_memory import update_bytes
from jaxfb.planner.formula_update import muon_flops, muon_seconds
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


def test_multi_token_prediction_keeps_its_residuals_beside_a_pipeline_too():
    """1B on 16 v5p by libtpu 0.0.48. Without them the formula had 6.66 GB."""
    layout = "mesh.fsdp=4 mesh.pipe=4 batch.rows=128 batch.rows_per_microbatch=1 parallel.fsdp_gather=layer"
    found = estimated(
        load_config("configs/1b.yaml", [*layout.split(), "model.mtp_depth=1"]), parse_topology("v5p:2x2x4")
    )
    assert found.needed / 1e9 == pytest.approx(7.39, rel=0.08)
    assert found.step_seconds == pytest.approx(0.612, rel=0.1)


@pytest.mark.parametrize("config, topology, needed", [("1b", "v5p:2x2x1", 10.24), ("8b", "v5p:2x2x4", 27.04)])
def test_muon_takes_all_its_matrices_at_once(config, topology, needed):
    """By libtpu 0.0.48. Without the update the formula had 6.2 and 10.3 GB."""
    found = estimated(load_config(f"configs/{config}.yaml", MUON), parse_topology(topology))
    assert found.needed / 1e9 == pytest.approx(needed, rel=0.07)


@pytest.mark.parametrize(
    "config, topology, seconds",
    [
        ("1b mesh.fsdp=16 batch.rows=128 parallel.remat=selective", "v5p:2x2x4", 0.480),
        ("8b", "v5p:2x2x4", 3.5),
    ],
)
def test_muon_multiplies_and_gathers_its_matrices_twice(config, topology, seconds):
    """By libtpu 0.0.48. Without the update the formula had 0.345 and 2.4 s."""
    name, *layout = config.split()
    found = estimated(load_config(f"configs/{name}.yaml", [*MUON, *layout]), parse_topology(topology))
    assert found.step_seconds == pytest.approx(seconds, rel=0.05)


def test_the_products_of_muon_by_hand():
    """Of a matrix with more rows than columns every device multiplies all of the smaller square by itself. 1B on 16
    chips: 9.12 ms at the peak rate each time by the compiler.
    """
    topology = parse_topology("v5p:2x2x4")
    config = load_config("configs/1b.yaml", [*MUON, "mesh.fsdp=16"])
    flops = lambda short, long, shards: 4 * short**2 * long / 16 + 2 * short**3 / shards  # noqa: E731
    wide, tall, few = flops(2048, 8192, 16), flops(2048, 8192, 1), flops(512, 2048, 1)
    layer = 2 * wide + tall + 2 * flops(2048, 2048, 16) + 2 * few
    found = muon_flops(config, model_sizes(config))
    assert found == pytest.approx(2 * 5 * 16 * layer)
    assert found / topology.chip.flops / 2 == pytest.approx(9.12e-3, rel=0.01)
    fewer = load_config("configs/1b.yaml", [*MUON, "mesh.fsdp=16", "optimizer.options.ns_steps=3"])
    assert muon_flops(fewer, model_sizes(fewer)) == pytest.approx(found * 3 / 5)
    plain = load_config("configs/1b.yaml", ["mesh.fsdp=16"])
    assert muon_seconds(plain, model_sizes(plain), topology.chip) == (0, 0)


def test_a_stage_and_a_tensor_shard_update_their_part_of_the_matrices():
    layouts = (
        "mesh.fsdp=16",
        "mesh.pipe=4 mesh.fsdp=4",
        "mesh.tensor=4 mesh.fsdp=4",
        "mesh.data=16 mesh.fsdp=1",
    )
    whole, staged, cut, repeated = (
        muon_flops(config, model_sizes(config))
        for config in (load_config("configs/1b.yaml", [*MUON, *one.split()]) for one in layouts)
    )
    assert staged == cut
    assert staged < whole < repeated


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
