"""The GPU benchmark where there is none: how it starts its processes, what it concludes, and what its section says."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu  # noqa: E402
import gpu_profile  # noqa: E402
import loops  # noqa: E402
from loop_of_jaxfb import Run  # noqa: E402
from page.gpu import SECTIONS  # noqa: E402
from report import RESULTS  # noqa: E402

from jaxfb.config.schema import build  # noqa: E402
from jaxfb.models.config import TransformerConfig  # noqa: E402


@pytest.mark.parametrize(
    "before, flags, wanted",
    [(None, "", None), (" ", "", None), (None, "--a=1", "--a=1"), ("--b=2", "--a=1", "--b=2 --a=1")],
)
def test_xla_is_given_no_blank_flags(monkeypatch, before, flags, wanted):
    """It would take them for the name of a file, and end."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    assert gpu.environment_with(flags).get("XLA_FLAGS") == wanted


def test_a_job_is_read_as_it_was_written(tmp_path):
    model = TransformerConfig(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, mlp_size=48)
    loops.Job(model, num_microbatches=2, rows_per_microbatch=1, length=16).write(tmp_path)
    assert build(TransformerConfig, json.loads((tmp_path / "job.json").read_text())["model"]) == model
    run = Run(tmp_path, packed=False)
    assert run.update(run.batches[0]) == pytest.approx(math.log(64), rel=0.05)


def test_the_best_of_each_side_is_of_what_ran():
    row = {"first_loss": 2.0, "last_loss": 1.0}
    rows = {
        "jaxfb, 4 rows": row | {"tokens_per_second": 30.0},
        "accelerate, 4 rows": row | {"tokens_per_second": 20.0},
        "accelerate compiled, 4 rows": row | {"tokens_per_second": 24.0, "last_loss": 1.01},
        "accelerate, 8 rows": {"result": "does not fit"},
    }
    found = loops.verdict(rows)
    assert found["ratio"] == 1.25 and found["loss_difference"] == pytest.approx(0.01, rel=0.02)
    assert "result" in loops.verdict({"jaxfb, 4 rows": rows["jaxfb, 4 rows"]})


def test_the_section_shows_every_setting_once():
    (section,) = SECTIONS
    result = json.loads(sorted(RESULTS.glob("gpu_gpu_*.json"))[-1].read_text())
    updates = section.tables(result)[0].lines()
    shown = f"{result['step']['remat selective']['mfu_of_measured_rate']:.3f}"
    assert sum(shown in line for line in updates) == 1, "it is in several parts of the results"
    assert section.facts(result)["ratio"] >= 1.25 and section.facts(result)["mfu"] >= 0.6
    assert "stopped it for 18.4 s;" in section.facts(result)["trainer"]
    row = {**result["training"]["jaxfb train"], "seconds_saving": [9.0, 2.25]}
    assert (
        "stopped it for 9.0 s, 2.2 s;"
        in section.facts({**result, "training": {"jaxfb train": row}})["trainer"]
    )
    for none in ({}, {"jaxfb train": {"result": "failed"}}):
        assert "not measured" in section.facts({**result, "training": none})["trainer"]
    (claim,) = section.claims(result)
    assert claim.ratio == pytest.approx(1 / section.facts(result)["ratio"])


def test_a_kernel_of_experts_is_a_product_in_the_profile():
    text = '%c = custom-call(), metadata={op_name="jit(run)/transpose(jvp(mlp))/cond/grouped_product/pallas_call"}'
    assert gpu_profile.label("pallas_call.1", text) == "backward mlp: products"
    assert (
        gpu_profile.label("fusion.1", text.replace("grouped_product/pallas_call", "mul"))
        == "backward mlp: elementwise"
    )


def test_without_an_accelerator_nothing_is_measured(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    monkeypatch.setattr(gpu, "use_compile_cache", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--part", "rate"])
    with pytest.raises(SystemExit, match="no accelerator here; .* jaxfb bench gpu --tiny"):
        gpu.main()
