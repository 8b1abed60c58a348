"""Memory that a layout leaves is used: less recomputation, weights that stay gathered, each with its price."""

import re
from dataclasses import replace

import pytest

from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.memory_left import least, prices, variants
from jaxfb.planner.search import search

TOPOLOGY = parse_topology("v6e:8x8")


def config_of(*more):
    return load_config("configs/8b.yaml", ("mesh.fsdp=64", *more))


def estimated(config, **parallel):
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return estimate(config, model_sizes(config), TOPOLOGY)


def test_each_layer_that_is_not_recomputed_costs_as_much_and_saves_as_much():
    found = [
        estimated(config_of(), remat=remat)
        for remat in ("full", "selective*8+full", "selective*16+full", "selective*24+full", "selective")
    ]
    more = [b.activations - a.activations for a, b in zip(found, found[1:], strict=False)]
    less = [a.work_seconds - b.work_seconds for a, b in zip(found, found[1:], strict=False)]
    assert more == pytest.approx([more[0]] * 4) and more[0] > 1e9
    assert less == pytest.approx([less[0]] * 4) and less[0] > 0.05


def test_weights_that_stay_cost_two_bytes_a_parameter_and_save_their_gathers():
    config = config_of()
    every, some = estimated(config), estimated(config, fsdp_gather=16)
    held = 2 * 16 * 218_112_000  # parameters of a layer, in two bytes
    assert some.total - every.total == pytest.approx(held, rel=0.01)
    assert every.wire_seconds > some.wire_seconds > estimated(config, fsdp_gather="step").wire_seconds


def test_prices_name_each_step_and_what_it_takes():
    lines = prices(least(config_of()), model_sizes(config_of()), TOPOLOGY)
    assert any(line.startswith("remat=selective*8+full: +") for line in lines)
    assert any(line.startswith("fsdp_gather=16: +") for line in lines)
    # weights that stay gathered of some layers are copied, and nothing hides the half of their gradients' scatters
    slower = {line for line in lines if re.match(r"fsdp_gather=\d", line)}
    assert slower and all(re.search(r" GB, \+[\d.]+ s$", line) for line in slower)
    assert all(re.search(r" GB, -[\d.]+ s$", line) for line in {*lines} - slower)


def test_what_is_left_is_only_offered_where_it_can_run():
    config = config_of("optimizer.sharding=gradients", "mesh.fsdp=8", "mesh.data=8")
    found = list(variants(config, model_sizes(config)))
    assert {one.parallel.fsdp_gather for one in found} == {"layer", "step"}
    assert all(config_from_dict(config_to_dict(one)) == one for one in found)


@pytest.mark.slow
def test_the_search_fills_what_is_left():
    found = search(config_of(), TOPOLOGY, layouts=24, compiled=0)
    parts = [
        one
        for one in found
        if "+" in one.config.parallel.remat or one.config.parallel.fsdp_gather not in ("layer", "step")
    ]
    assert parts and all(one.verdict.fits for one in found)
    assert max(one.verdict.needed for one in parts) > 0.6 * TOPOLOGY.chip.memory
