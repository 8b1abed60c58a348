"""Plans for GPUs: what the compiler is told, what is said where it is missing, and its answer where it is installed."""

import re

import pytest

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.planner import gpu, parse_topology
from jaxfb.planner.chips import GPUS, TPUS
from jaxfb.planner.verdict import plan

LAYERS = "model.num_layers=4 model.vocab_size=8192 batch.rows=64 data.sequence_length=1024".split()
compiler = pytest.mark.skipif(
    not gpu.is_installed(), reason="no XLA compiler for GPUs here; pip install 'jaxfb[cuda]'"
)


@pytest.mark.parametrize("chip", GPUS.values(), ids=GPUS)
def test_a_target_says_what_the_chip_is(chip):
    text = gpu.target_config(chip)
    fields = dict(re.findall(r"^  (\w+): (.+)$", text, re.MULTILINE))
    assert float(fields["memory_bandwidth"]) == chip.bandwidth
    assert float(fields["device_memory_size"]) == chip.memory
    rate = int(fields["core_count"]) * int(fields["fpus_per_core"]) * 2e9 * float(fields["clock_rate_ghz"])
    # of matrix units over plain ones: 16 from Ampere to Hopper, 32 before Blackwell's sparsity is left out
    assert 14 < chip.flops / rate < 33
    assert text.count("{") == text.count("}") and text.isascii()


def test_without_the_compiler_an_estimate_and_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "is_installed", lambda: False)
    assert main(["plan", "configs/8b.yaml", "--topology", "gpu:h100x8", *LAYERS]) == 0
    said = capsys.readouterr()
    assert "pip install 'jaxfb[cuda]'" in said.err and "without it a formula's estimate" in said.err
    assert "FITS: " in said.out and "(estimated)" in said.out
    with pytest.raises(ValueError, match=r"pip install 'jaxfb\[cuda\]'"):
        gpu.devices(GPUS["h100"])


def test_a_state_on_the_host_is_estimated_and_the_reason_is_given(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "is_installed", lambda: True)
    assert (
        main(["plan", "configs/8b.yaml", "--topology", "gpu:h200x8", *LAYERS, "optimizer.memory=host"]) == 0
    )
    said = capsys.readouterr()
    assert f"{gpu.NO_STATE_ON_HOST}; a formula's estimate" in said.err
    assert "FITS: " in said.out and "(estimated)" in said.out


def test_a_plugin_of_another_version_is_refused_with_the_one_to_install(monkeypatch):
    monkeypatch.setattr(gpu, "is_installed", lambda: True)
    monkeypatch.setattr(gpu, "version", lambda package: "0.9.1")

    def not_taken(**asked):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", not_taken)
    sentence = r"does not compile for GPUs with jax-cuda13-pjrt 0\.9\.1.*pip install 'jax\[cuda13\]==\d"
    with pytest.raises(ValueError, match=sentence):
        gpu.devices(GPUS["h100"])


def test_flash_attention_where_it_will_run():
    config = load_config("configs/8b.yaml", LAYERS)
    machine = parse_topology("gpu:h100x8")
    assert gpu.takes_flash(config, machine)
    ring = ["mesh.context=2", "model.context_attention=ring"]
    assert gpu.takes_flash(load_config("configs/8b.yaml", [*LAYERS, ring[0]]), machine)
    for changes in (["model.attention=xla"], ["precision.compute_dtype=float32"], ring):
        assert not gpu.takes_flash(load_config("configs/8b.yaml", [*LAYERS, *changes]), machine)
    asked = ["model.attention=cudnn", "precision.compute_dtype=float32"]
    with pytest.raises(ValueError, match="not float32; use compute_dtype='bfloat16'"):
        plan(load_config("configs/8b.yaml", [*LAYERS, *asked]), machine, compiles=False)


def test_flash_attention_leaves_out_scores_and_nothing_else():
    """Rows of as many tokens as a hidden state is wide look much like scores."""
    square = ["model.num_layers=4", "model.vocab_size=8192", "data.sequence_length=4096", "batch.rows=64"]
    by_cudnn, by_xla = (
        plan(load_config("configs/8b.yaml", [*square, *more]), parse_topology("gpu:h100x8"), compiles=False)
        for more in ([], ["model.attention=xla"])
    )
    assert by_cudnn.estimate.activations >= 4 * 4096 * 4096 * 2  # what each layer is given
    assert by_cudnn.estimate.activations == by_xla.estimate.activations
    assert by_cudnn.estimate.working < by_xla.estimate.working


def test_tensor_over_hosts_is_refused_as_the_mesh_would():
    config = load_config(
        "configs/8b.yaml", [*LAYERS, "mesh.tensor=16", "mesh.fsdp=1", "model.num_kv_heads=16"]
    )
    with pytest.raises(ValueError, match="2 slices cannot be shared out.*make data 2"):
        plan(config, parse_topology("gpu:h100x16"), compiles=False)


@compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, layout",
    [
        ("a100x1", "mesh.fsdp=1"),
        ("h100x8", "mesh.fsdp=8"),
        ("h200x16", "mesh.pipe=4 mesh.fsdp=2 mesh.tensor=2 schedule=1f1b"),
        ("b200x8", "mesh.pipe=2 mesh.tensor=2 mesh.data=2 mesh.fsdp=1 schedule=zero_bubble"),
    ],
)
def test_the_compiler_for_gpus_answers_without_a_gpu(topology, layout):
    verdict = plan(
        load_config("configs/8b.yaml", [*LAYERS, *layout.split()]), parse_topology(f"gpu:{topology}")
    )
    compiled, counted = verdict.compiled, verdict.estimate
    assert verdict.fits and compiled.arguments == pytest.approx(counted.arguments, rel=0.01)
    assert compiled.flops == pytest.approx(counted.flops, rel=0.25)
    assert verdict.model_flops < compiled.flops
    assert counted.total == pytest.approx(verdict.needed, rel=0.35)  # of gigabytes; nearer for large models
    assert bool(verdict.traffic) == (verdict.topology.num_devices > 1)
    assert all(0 <= row.exposed_seconds <= row.seconds * 1.001 for row in verdict.traffic.values())


def test_gpus_of_an_island_are_joined_by_no_torus():
    """A permute between two of them has the whole link."""
    assert not any(chip.torus for chip in GPUS.values()) and all(chip.torus for chip in TPUS.values())
