"""The jobs of the benchmark of real sizes are legal, and the same for both sides; nothing is compiled."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from page.real import SECTIONS  # noqa: E402
from real_sizes_bytes import beside_formula  # noqa: E402
from real_sizes_tpu import JOBS, jaxfb_config  # noqa: E402

from jaxfb.mesh import mesh_sizes  # noqa: E402
from jaxfb.planner import parse_topology  # noqa: E402

AXES = {
    "ici_pipeline_parallelism": "pipe",
    "ici_data_parallelism": "data",
    "ici_fsdp_parallelism": "fsdp",
    "ici_tensor_parallelism": "tensor",
    "ici_expert_parallelism": "expert",
}
ROW = dict(hbm_gb=8.0, arguments_gb=2.0, step_s=10.0, work_s=8.0, products_s=7.0, collectives_s=4.0, exposed_s=2.0,
           mfu=0.6, compile_cpu_s=90.0, peak_memory_gb=2.0)  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_both_sides_have_the_same_mesh_and_rows(name):
    job, devices = JOBS[name], parse_topology(JOBS[name].topology).num_devices
    config = jaxfb_config(job)
    mesh = mesh_sizes(vars(config.mesh), devices, "none")
    if job.maxtext is None:
        return
    theirs = {"ici_fsdp_parallelism": devices, "per_device_batch_size": 1, "gradient_accumulation_steps": 16}
    theirs |= job.maxtext
    assert {axis: theirs.get(key, 1) for key, axis in AXES.items()} == {
        axis: mesh[axis] for axis in AXES.values()
    }
    rows = theirs["per_device_batch_size"] * devices
    assert rows * theirs["gradient_accumulation_steps"] == config.batch.rows
    microbatches = theirs.get("num_pipeline_microbatches", theirs["gradient_accumulation_steps"])
    replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    assert config.batch.rows == microbatches * replicas * config.batch.rows_per_microbatch


def test_the_section_counts_the_rows_that_both_sides_have():
    section = SECTIONS[0]
    alone, slower = {"jaxfb": ROW}, {"jaxfb": ROW | {"hbm_gb": 12.0, "step_s": 11.0}, "maxtext": ROW}
    used = {"jaxfb": ROW | {"hbm_gb": 60.0, "step_s": 8.0}, "maxtext": ROW}
    result = {
        "settings": {"seq": 4096, "compute_dtype": "bfloat16"},
        "rows": {"one": alone, "two": {"jaxfb": ROW, "maxtext": ROW}, "three": slower},
    }
    result["rows"]["four, memory used"] = used  # its memory is no cost
    spared = {"jaxfb": ROW | {"hbm_gb": 4.0, "step_s": 30.0}, "maxtext": ROW}
    result["rows"]["five, nothing ahead"] = spared  # it gives time for memory
    slower["jaxfb_rounded"] = ROW | {"step_s": 9.0}  # no part of what is compared with sums in float32
    facts = section.facts(result)
    assert (facts["spared_most"], facts["spared_time_most"]) == (4.0 / ROW["hbm_gb"], 30.0 / ROW["step_s"])
    assert facts["used_least"] == facts["used_most"] == 8.0 / ROW["step_s"]
    assert (facts["smaller"], facts["faster"], facts["count"], facts["most"]) == (1, 1, 2, 1.5)
    assert (facts["shipped_least"], facts["shipped_most"]) == (0.8, 3.0)
    assert facts["exposed_most"] == 0.25 and "12.00 GB" in section.claims(result)[2].ours
    assert (facts["rounded_count"], facts["rounded_most"]) == (1, 0.9)
    assert section.claims(result)[-1].what.endswith("three, bfloat16 sums")
    assert len(section.tables(result)[0].lines()) == 2 + 10 + 1


def test_bytes_of_each_axis_are_counted_once_and_stand_beside_what_the_layout_needs():
    """Of 8B cut over 64 chips each layer goes there twice and back once, in 16 microbatches; what goes along two axes
    belongs to the one over which parameters are cut first."""
    numbers, name = 8.03e9 * 63 / 64, "8B, v5p:4x4x4, fsdp 64"
    sent = {"fsdp all-gather": {"s": 2.0}, "fsdp+context all-reduce": {"s": 1.0}, "none copy": {"s": 9.0}}
    side = {"step_s": 1.0, "traffic": sent}
    sides = {"jaxfb": side, "jaxfb_rounded": side, "maxtext": side, "maxtext_best": side | {"step_s": 0.5}}
    found = beside_formula(name, sides)
    ours, theirs = found["jaxfb"]["fsdp"], found["maxtext_best"]["fsdp"]
    assert ours["sent_gb"] == theirs["sent_gb"] == 3 * 200
    assert 16 * (4 + 2 * 0.8) * numbers < 1e9 * ours["by_hand_gb"] < 16 * (4 + 4) * numbers
    assert 1e9 * (ours["by_hand_gb"] - theirs["by_hand_gb"]) == pytest.approx(16 * 2 * numbers, rel=1e-3)
    assert found["jaxfb_rounded"]["fsdp"]["by_hand_gb"] == theirs["by_hand_gb"]
