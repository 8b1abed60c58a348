"""`jaxfb bench`: benchmarks by name, the GPU's at a tiny size, and a page that says what the files say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quickly import flags

from jaxfb.cli.commands import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import performance  # noqa: E402
from page.plots import Panel, Picture  # noqa: E402


def test_benchmarks_are_listed_and_a_misspelt_one_refused(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "accumulation" in listed and "gpu " in listed and "docs/performance.md" in listed
    pieces = ("report", "abstract", "maxtext_step", "gpu_profile", "loop_of_jaxfb", "performance")
    names = [line.split()[0] for line in listed.splitlines()]
    assert names.pop() == "report" and not set(pieces) & set(names), names
    assert main(["bench", "acumulation"]) == 2
    assert "did you mean accumulation?" in capsys.readouterr().err


def test_the_committed_page_and_pictures_are_those_of_the_committed_results():
    """If this fails after a benchmark ran, or a sentence changed: `jaxfb bench report`."""
    text, pictures = performance.page(performance.load())
    assert performance.PAGE.read_text() == text
    assert [path.name for path, picture in pictures.items() if not picture.is_current(path)] == []
    assert set((ROOT / "docs" / "performance").iterdir()) == set(pictures)


def test_no_sentence_has_a_number_of_its_own():
    for section in performance.SECTIONS:
        said = re.sub(r"\{[^{}]*\}|1f1b|float32", "", section.title + section.text)
        assert not re.search(r"\d", said), section.benchmark


def test_a_result_without_a_section_is_shown_as_tables():
    result = {
        "benchmark": "some_thing",
        "settings": {"rows": 8, "model": {"vocab_size": 64, "num_layers": 1, "hidden_size": 32, "num_heads": 2,
                                          "mlp_size": 64, "dropout": 0.0, "qk_norm": True}},
        "machine": {"cpu": "X", "cores": 2, "devices": ["cpu"], "num_devices": 4, "jax": "0.10.2"},
        "temp_bytes": {"ours": 10_000_000, "theirs": 25_000_000},
        "by_size": {"1": {"ratio": {"best": 0.81234}, "seconds": [1, 2]}, "2": {"ratio": {"best": 0.5}, "note": "a|b"}},
        "seconds": [1.0, 2.0],
    }  # fmt: skip
    text, _ = performance.page({"some_thing.json": result})
    assert "## Some thing" in text and "| X | 2 | cpu | 0.10.2 |" in text
    assert "| ours | 10,000,000 |" in text and "| ratio, best | note |" in text
    assert "| 1 | 0.8123 |  |" in text and "| 2 | 0.5 | a/b |" in text
    assert "mlp_size 64, qk_norm True" in text and "dropout" not in text  # only what is not the default


def test_a_result_that_lacks_what_its_section_shows_is_shown_as_tables(capsys):
    results = {"pipeline_time.json": {"benchmark": "pipeline_time", "rows": {"1f1b 2": {"measured_ms": 3.5}}}}
    text, pictures = performance.page(results)
    assert "| 1f1b 2 | 3.5 |" in text and not pictures
    assert "pipeline_time.json lacks" in capsys.readouterr().out


def test_a_picture_is_drawn_anew_only_if_it_shows_something_else(tmp_path):
    pytest.importorskip("matplotlib")
    one, other = (Picture("p", "", (Panel("", "x", "y", {"1f1b": [(1, 2), (2, end)]}),)) for end in (3, 4))
    one.draw(tmp_path / "p.svg")
    first = (tmp_path / "p.svg").read_text()
    (tmp_path / "p.svg").unlink()
    one.draw(tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text() == first  # no date, no random names
    (tmp_path / "p.svg").write_text(first + "<!-- another matplotlib's -->")
    one.draw(tmp_path / "p.svg")
    assert "another" in (tmp_path / "p.svg").read_text()
    other.draw(tmp_path / "p.svg")
    assert other.is_current(tmp_path / "p.svg") and not one.is_current(tmp_path / "p.svg")


def bench_gpu(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags()}
    command = [sys.executable, "-m", "jaxfb.cli", "bench", "gpu", "--tiny", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.processes
def test_the_gpu_benchmark_keeps_each_number_and_goes_on_where_it_was(tmp_path):
    """All parts run with `jaxfb bench gpu --tiny`; here those that reach everything but the trainer."""
    results = ["--results", str(tmp_path)]
    first = bench_gpu("--part", "rate,microbatch,profile", *results)
    assert first.returncode == 0, first.stderr
    (path,) = tmp_path.glob("gpu_cpu_*.json")
    found = json.loads(path.read_text())
    assert found == json.loads(first.stdout) and found["rate"]["square"]["tflops"] > 0
    assert {"forward mlp: products", "backward head: elementwise"} <= set(found["profile"]["milliseconds"])
    losses = {row["loss"] for row in found["microbatch"].values()}
    assert (
        len(found["microbatch"]) == 2 and max(losses) - min(losses) < 0.02
    )  # the same rows, cut otherwise, in bfloat16

    late = bench_gpu("--part", "rate,microbatch,step", "--minutes", "0", *results)
    assert "left for the next run" in late.stderr
    after = json.loads(late.stdout)
    assert {part: after[part] for part in ("rate", "microbatch")} == {
        part: found[part] for part in ("rate", "microbatch")
    }
    assert after["step"] == {
        "remat selective": found["microbatch"]["4"]
    }  # taken over from where it was measured
    assert bench_gpu("--part", "speed").returncode == 2
