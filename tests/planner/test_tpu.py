"""What is asked of the TPU compiler beyond JAX, and its answer where libtpu is installed."""

from types import SimpleNamespace

import jax
import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology, tpu
from jaxfb.planner.program_cost.hlo_cost import HOST
from jaxfb.planner.verdict import plan

REPORT = """Memory Space: default (color=0)
Total bytes: 9973785664 (9.29GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
    1.96GiB( 13%);    1.96GiB;   6360596480;                3; f32[1024,128256]

Memory Space: vmem (color=1)
Total bytes: 117440512 (112.00MiB)
"""
compiler = pytest.mark.skipif(not tpu.is_installed(), reason="no libtpu here; pip install 'jaxfb[plan]'")


@pytest.mark.parametrize(
    "shape, itemsize, tiled",
    [
        ((32, 64, 4096), 4, 32 * 64 * 4096 * 4),
        ((2, 8, 16), 4, 2 * 8 * 128 * 4),
        ((384, 32), 4, 384 * 32 * 4),  # the longer dim goes along a tile's rows
        ((2, 32, 16), 4, 2 * 16 * 128 * 4),
        ((2, 200), 4, 2 * 256 * 4),
        ((200,), 4, 256 * 4),
        ((), 4, 512),
    ],
)
def test_an_array_fills_tiles(shape, itemsize, tiled):
    assert tpu.tiled_bytes(shape, itemsize) == tiled


def test_the_memory_of_a_program_is_read_from_its_report(tmp_path):
    assert tpu.reported_bytes(tmp_path) is None
    (tmp_path / "module_0000.jit_step.memory-usage-report.txt").write_text(REPORT)
    (tmp_path / "module_0001.small.memory-usage-report.txt").write_text(REPORT.replace("9973785664", "512"))
    assert tpu.reported_bytes(tmp_path) == 9973785664


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:8x8x16", (True, True, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5p:2x2x1", (False, False, False)),
        ("v4:4x4x8", (True, True, True)),
        ("v5e:16x16", (True, True, False)),
        ("v5e:8x16", (False, True, False)),
        ("v6e:8x8", (False, False, False)),
    ],
)
def test_the_compiler_is_told_which_sides_of_a_slice_are_closed(topology, expected):
    assert tpu.wraps(parse_topology(topology)) == expected


@compiler
@pytest.mark.slow
def test_the_compiler_answers_without_a_tpu():
    sizes = "model.num_layers=2 model.hidden_size=256 data.tokenizer=bytes batch.rows=16 mesh.dp=4"
    asked = [*sizes.split(), "mesh.fsdp=1", "mesh.tp=1", "precision.compute_dtype=bfloat16"]
    verdict = plan(load_config("configs/mesh8.yaml", asked), parse_topology("v5e:2x2"))
    assert verdict.fits and verdict.compiled.arguments == pytest.approx(verdict.estimate.arguments, rel=0.01)
    assert 1 < verdict.compiled.flops / verdict.model_flops < 1.3


LAYERS = (
    "model.num_layers=4 model.vocab_size=32768 data.sequence_length=2048 batch.rows=64 batch.rows_per_microbatch=4 "
    "mesh.dp=1 mesh.fsdp=1"
).split()


@compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "mesh.fsdp=4 parallel.fsdp_gather=layer parallel.remat=full",
        "mesh.dp=4 optimizer.sharding=data parallel.remat=selective",
        "mesh.pp=4 schedule=1f1b parallel.remat=full",
    ],
)
def test_the_formulas_memory_is_near_the_compilers(layout):
    with jax.enable_x64(False):  # as outside tests: otherwise attention is the plain one
        verdict = plan(load_config("configs/1b.yaml", [*LAYERS, *layout.split()]), parse_topology("v5e:2x2"))
    assert verdict.estimate.total == pytest.approx(verdict.compiled.total - verdict.compiled.code, rel=0.35)


@compiler
@pytest.mark.slow
def test_a_state_on_the_host_is_not_counted_as_the_chips():
    """The compiler would compute products again to make space for it: 38% more operations of 8B on v5e:2x4."""
    with jax.enable_x64(False):
        config = load_config("configs/8b.yaml", ["mesh.fsdp=8", "optimizer.memory=host"])
        verdict = plan(config, parse_topology("v5e:2x4"))
    assert verdict.fits and verdict.compiled.flops / verdict.model_flops < 1.5


@compiler
@pytest.mark.slow
def test_inputs_of_layers_travel_to_the_host_and_back_beside_the_products_of_other_layers():
    """A backward that read its layer's input in its own turn would wait for every one of them."""
    layout = (
        "mesh.pp=2 mesh.dp=2 model.num_layers=16 batch.rows=32 schedule=1f1b parallel.remat=offload".split()
    )
    with jax.enable_x64(False):
        verdict = plan(load_config("configs/1b.yaml", [*LAYERS, *layout]), parse_topology("v5e:2x2"))
    read, write = (verdict.traffic[HOST, kind] for kind in ("read", "write"))
    turns, layers = write.count // 8, 8
    assert (read.count, write.count) == (turns * (layers + 1), turns * layers)
    for moved in (read, write):
        assert moved.beside_products > 0.85 * moved.bytes
        assert moved.exposed_seconds < 0.1 * moved.seconds


@compiler
@pytest.mark.slow
def test_slots_of_a_pipeline_are_not_copied_in_every_tick():
    """Without a given order of their buffers the step would take 1.29 times as long as its products, with it 1.16."""
    layout = (
        "model.num_layers=8 model.vocab_size=16384 batch.rows=16 batch.rows_per_microbatch=1 mesh.dp=1 mesh.fsdp=1 "
        "mesh.pp=4 schedule=zb_v chunks=2 parallel.remat=none"
    ).split()
    with jax.enable_x64(False):
        compiled = plan(load_config("configs/8b.yaml", layout), parse_topology("v5p:2x2x1")).compiled
    assert compiled.work_seconds < 1.22 * compiled.product_seconds


@compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "topology"),
    [
        ("mesh.fsdp=32 mesh.context=2", "v5p:4x4x4"),  # both axes share a ring: `jaxfb/platforms/torus.py`
        ("mesh.fsdp=32 mesh.dp=2", "v6e:8x8"),  # scatters: `jaxfb/platforms/compiler.py`
    ],
)
def test_communication_of_fsdp_runs_beside_products_where_it_is_not_over_the_whole_slice(layout, topology):
    sizes = (
        "model.num_layers=4 model.vocab_size=4096 model.hidden_size=4096 model.mlp_size=14336 "
        "data.sequence_length=4096 batch.rows=128 batch.rows_per_microbatch=1 parallel.fsdp_gather=layer "
        "parallel.remat=full mesh.tp=1"
    )
    with jax.enable_x64(False):
        verdict = plan(
            load_config("configs/1b.yaml", [*sizes.split(), *layout.split()]), parse_topology(topology)
        )
    of_fsdp = {kind: found for (axes, kind), found in verdict.traffic.items() if "fsdp" in axes}
    assert of_fsdp["all-gather"].exposed_seconds < 0.2 * of_fsdp["all-gather"].seconds
    assert of_fsdp["reduce-scatter"].bytes > 20 * getattr(of_fsdp.get("all-reduce"), "bytes", 0)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v4:2x2x4", {"chip_config_name": "megacore"}),
        ("v5p:2x2x4", {}),
        ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
    ],
)
def test_a_slice_is_asked_for_as_its_chips_are(topology, options, monkeypatch):
    """Both cores of a v4 are one device; a slice of one chip is less than a host."""
    asked = []

    def described(text, platform, **given):
        asked.append((text, platform, given))
        if len(asked) > 1:
            raise RuntimeError("no such slice\nfurther lines")
        return SimpleNamespace(devices=["chip"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", described)
    found = parse_topology(topology)
    assert tpu.devices(found) == ["chip"]
    ((text, platform, given),) = asked
    assert (text, platform, given.pop("wrap")) == (found.text, "tpu", tpu.wraps(found)) and given == options
    with pytest.raises(ValueError, match=rf"libtpu does not make {found.text}: no such slice; use"):
        tpu.devices(found)
