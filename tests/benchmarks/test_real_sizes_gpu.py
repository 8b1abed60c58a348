"""The jobs of the benchmark for GPUs train the same with each of their configs, and divide; nothing is compiled."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from page.real_gpu import SECTIONS  # noqa: E402
from real_sizes import layout, taken  # noqa: E402
from real_sizes_gpu import JOBS, ROWS, SIDES, config_of  # noqa: E402

from jaxfb.mesh import mesh_sizes  # noqa: E402
from jaxfb.planner import parse_topology  # noqa: E402
from jaxfb.planner.gpu import check_hosts  # noqa: E402

LAYOUT = ("mesh", "parallel", "schedule", "chunks")


def trained(config):
    """What decides the result: all but the layout, the rows of a microbatch, and how the loss is computed."""
    model = replace(config.model, loss_chunk=1, sequence_parallel=False)
    batch = replace(config.batch, rows_per_microbatch=1)
    kept = replace(config, model=model, batch=batch, run=replace(config.run, dir="runs/one"))
    return {key: value for key, value in vars(kept).items() if key not in LAYOUT}


@pytest.mark.parametrize("name", JOBS)
def test_a_config_for_one_kind_of_gpu_trains_what_the_other_does(name):
    ours, general = (config_of(JOBS[name], side) for side in SIDES)
    same_layout = ours.mesh == general.mesh and ours.batch == general.batch
    assert same_layout == (ours.mesh.context > 1)  # those rows have a layout of their job
    assert trained(ours) == trained(general)


@pytest.mark.parametrize("name", JOBS)
def test_the_layout_divides_the_rows_and_the_hosts(name):
    config, topology = config_of(JOBS[name], "jaxfb"), parse_topology(JOBS[name].topology)
    check_hosts(config, topology)
    mesh = mesh_sizes(vars(config.mesh), topology.num_devices, "gpu")
    replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    assert config.batch.rows % (replicas * config.batch.rows_per_microbatch) == 0


@pytest.mark.parametrize("name", JOBS)
def test_the_ticks_of_a_pipeline_are_known_where_an_axis_takes_what_is_left(name):
    config = config_of(JOBS[name], "jaxfb")
    ticks = taken(config, layout(config, parse_topology(JOBS[name].topology)))
    assert (ticks is not None) == (config.mesh.pipe > 1)


def test_the_section_counts_steps_over_their_products():
    (section,) = SECTIONS
    row = dict(hbm_gb=8.0, arguments_gb=2.0, step_s=12.0, work_s=11.0, products_s=10.0, collectives_s=4.0,
               exposed_s=3.0, mfu=0.6, compile_cpu_s=9.0, peak_memory_gb=1.0)  # fmt: skip
    result = {
        "settings": {"gpu": "H100", "seq": 4096},
        "rows": {
            "one": {"jaxfb": row, "any_chip": row | {"step_s": 24.0}},
            "two": {"jaxfb": row | {"step_s": 15.0}},
        },
    }
    facts = section.facts(result)
    assert (facts["least"], facts["most"], facts["exposed_most"]) == (1.2, 1.5, 0.25)
    assert facts["faster_least"] == facts["faster_most"] == 2.0
    assert len(section.tables(result)[0].lines()) == 2 + 3 + 1


def test_the_results_on_the_page_are_of_the_jobs():
    rows = json.loads(ROWS.results.read_text())["rows"]
    assert list(rows) == list(JOBS) and all({"jaxfb"} <= set(row) <= set(SIDES) for row in rows.values())
