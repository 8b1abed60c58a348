"""A search with options that are refused in some layouts leaves these out."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.search import search
from jaxfb.planner.verdict import estimated
from jaxfb.refusal import Refused

EIGHT_LAYERS = "model.num_layers=8 batch.rows=64 mesh.fsdp=1 mesh.data=8"
CHIPS = parse_topology("v5p:2x2x2")


def of(*options: str):
    return load_config("configs/1b.yaml", [*EIGHT_LAYERS.split(), *options])


def refuses(monkeypatch, refused):
    def answer(config, topology):
        if refused(config):
            raise Refused("[parallel] not here")
        return estimated(config, topology)

    monkeypatch.setattr("jaxfb.planner.search.estimated", answer)


def test_under_zero_2_no_pipeline_is_proposed():
    said = []
    found = search(of("optimizer.sharding=gradients"), CHIPS, layouts=12, compiled=0, say=said.append)
    assert len(found) > 3 and all(one.config.mesh.pipe == 1 for one in found)
    assert not any(line.startswith("left out: ") for line in said), "they are not even tried"


def test_layouts_in_which_an_option_is_refused_are_left_out(monkeypatch):
    refuses(monkeypatch, lambda config: config.parallel.remat == "selective")
    said = []
    found = search(of("parallel.remat=layer"), CHIPS, layouts=8, compiled=0, say=said.append)
    assert found and all(one.config.parallel.remat != "selective" for one in found)
    assert any(line.startswith("left out: ") and line.endswith("not here") for line in said)


def test_an_option_that_every_layout_refuses_ends_the_search_with_the_reason(monkeypatch):
    refuses(monkeypatch, lambda config: True)
    with pytest.raises(Refused, match="not here"):
        search(of(), CHIPS, layouts=2, compiled=0)
