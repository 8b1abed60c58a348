"""The guess that orders layouts: as a count of ticks says, and near what is then traced."""

from dataclasses import replace

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.estimate import estimate
from jaxfb.planner.guess import _turns, guess
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import of_estimate

ONE_B = (
    "model.num_layers=8 batch.rows=64 batch.rows_per_microbatch=1 mesh.dp=1 parallel.fsdp_gather=step".split()
)


@pytest.mark.parametrize(
    "layout, layers, head",
    [
        ("mesh.fsdp=8", 1, 1),
        ("mesh.pp=4 mesh.fsdp=2 schedule=1f1b", 1 + 3 / 32, 1),
        ("mesh.pp=4 mesh.fsdp=2 schedule=zero_bubble", 1 + 2 / 32, 1),
        # a head in each of the M * V - P * V + P ticks in which forward and backward run
        ("mesh.pp=4 mesh.fsdp=2 schedule=interleaved chunks=2", 1 + 3 / 64, (32 * 2 - 4 * 2 + 4) / 32),
    ],
)
def test_a_pipeline_fills_and_meets_its_head_in_every_tick(layout, layers, head):
    assert _turns(load_config("configs/1b.yaml", [*ONE_B, *layout.split()])) == pytest.approx((layers, head))


@pytest.mark.parametrize("topology", ["gpu:h100x16", "v5e:4x4"])
def test_a_guess_is_near_what_is_traced(topology):
    machine = parse_topology(topology)
    for layout in (
        "mesh.fsdp=16 parallel.remat=selective",
        "mesh.pp=4 mesh.fsdp=2 mesh.tp=2 schedule=interleaved chunks=2 parallel.remat=layer",
    ):
        config = load_config("configs/1b.yaml", [*ONE_B, *layout.split()])
        guessed = guess(config, model_sizes(config), machine)
        verdict = of_estimate(*estimate(config, machine), machine)
        assert guessed.seconds == pytest.approx(verdict.step_seconds, rel=0.35)
        assert guessed.bytes == pytest.approx(verdict.needed, rel=0.5)


def test_what_goes_between_hosts_takes_longer():
    config = load_config("configs/1b.yaml", [*ONE_B, "mesh.dp=16", "mesh.fsdp=1"])
    sizes, machine = model_sizes(config), parse_topology("gpu:h100x16")
    near = replace(machine, chip=replace(machine.chip, island=16))
    assert guess(config, sizes, machine).seconds > guess(config, sizes, near).seconds
