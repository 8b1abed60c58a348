"""`jaxfb bench`: benchmarks by name, the GPU's at a tiny size, and a page whose numbers are those of the files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfb.cli import main

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_benchmarks_are_listed_and_a_misspelt_one_refused(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "accumulation" in listed and "gpu " in listed and "docs/performance.md" in listed
    assert main(["bench", "acumulation"]) == 2
    assert "did you mean accumulation?" in capsys.readouterr().err


def test_the_page_shows_a_files_numbers_as_tables(tmp_path, monkeypatch):
    import performance

    result = {
        "benchmark": "some_thing",
        "settings": {"rows": 8, "model": {"width": 32}},
        "machine": {"cpu": "X", "cores": 2, "devices": ["cpu"], "num_devices": 4, "jax": "0.10.2"},
        "temp_bytes": {"ours": 10_000_000, "theirs": 25_000_000},
        "by_size": {"1": {"ratio": 0.81234, "seconds": [1, 2]}, "2": {"ratio": 0.5, "note": "a|b"}},
        "seconds": [1.0, 2.0],
    }
    (tmp_path / "some_thing.json").write_text(json.dumps(result))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    monkeypatch.setattr(performance, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(performance, "ROOT", tmp_path)
    performance.main()
    page = (tmp_path / "performance.md").read_text()
    assert (
        "## some thing (cpu, jax 0.10.2)" in page
        and "X, 2 cores, 4 x cpu, jax 0.10.2" in page
        and "model.width 32" in page
    )
    assert "| ours | 10,000,000 |" in page and "| 1 | 0.8123 |  |" in page and "| 2 | 0.5 | a/b |" in page


@pytest.mark.processes
def test_the_gpu_benchmark_runs_at_a_tiny_size():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxfb.cli", "bench", "gpu", "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["matmul_tflops"] > 0 and set(found["context"]) == {"64", "128"}
    losses = {row["loss"] for row in found["microbatch_size"].values()}
    assert max(losses) - min(losses) < 0.02  # the same rows, cut otherwise, in bfloat16
