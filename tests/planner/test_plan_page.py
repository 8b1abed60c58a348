"""The page of a plan: numbers with units that fit them, what does not divide, and changes with which it would fit."""

import re
from dataclasses import replace

import pytest

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.planner import parse_topology, search
from jaxfb.planner.compiled import Compiled, TooLarge
from jaxfb.planner.program_cost.hlo_cost import Traffic
from jaxfb.planner.text import page
from jaxfb.planner.too_large import would_fit
from jaxfb.planner.verdict import estimated

CONFIG = load_config("8b", ["batch.rows_per_microbatch=4"])
V5E = parse_topology("v5e:4x4")


@pytest.fixture(scope="module")
def verdict():
    """What does not fit by formula."""
    return estimated(CONFIG, V5E)


def test_a_tiny_model_takes_milliseconds_on_one_device(capsys):
    assert main(["plan", "quickstart", "--topology", "gpu:h100x1", "--no-compile"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"at best 0\.\d*[1-9]\d* ms a step: .* ms work, 0.000 ms exposed communication\n", printed
    )
    assert "gpu:h100x1: 1 GPU\n" in printed


def test_parameters_are_millions_below_a_billion(capsys):
    assert main(["plan", "125m", "--topology", "v5e:1x1", "--no-compile", "batch.rows=8"]) == 0
    printed = capsys.readouterr().out
    assert "  123M parameters, one device\n" in printed and "v5e:1x1: 1 chip\n" in printed
    assert "  8 rows = 1 microbatch of 8 rows on each replica" in printed


def test_layouts_of_one_row_are_called_so():
    config = load_config("125m", ["batch.rows_per_microbatch=1"])
    assert ", 1 row" in search.label(config) and "1 rows" not in search.label(config)


def test_an_axis_that_does_not_divide_the_parameters_is_named(capsys):
    command = ["plan", "8b", "--topology", "gpu:h200x80", "--no-compile", "batch.rows=960", "mesh.fsdp=80"]
    assert main(command) == 0
    said = (
        "  fsdp 80 leaves 100% of the parameters whole on every GPU; choose sizes that divide the model's\n"
    )
    assert said in capsys.readouterr().out
    assert "parameters whole" not in page("8b", estimated(CONFIG, V5E))


def test_what_does_not_fit_is_answered_by_changes_with_which_it_would(capsys):
    assert main(["plan", "8b", "--topology", "v5e:4x4", "--no-compile", "batch.rows_per_microbatch=4"]) == 1
    offered = capsys.readouterr().out.partition("\nwhat would fit, by the same formula:\n")[2]
    changes = re.findall(r"^  ((?:[\w.]+=\w+ ?)+): ([\d.]+) GB$", offered, re.M)
    assert 1 <= len(changes) <= 3 and len(changes) == offered.count("\n")
    for change, gigabytes in changes:
        then = estimated(load_config("8b", ["batch.rows_per_microbatch=4", *change.split()]), V5E)
        assert then.fits and then.needed == pytest.approx(float(gigabytes) * 1e9, rel=0.001)


def test_what_the_compiler_counts_more_is_added_to_the_changes(verdict):
    refused = replace(verdict, compiled=TooLarge(1.2 * verdict.needed, 16.9e9, "Ran out of memory"))
    first, *changes = would_fit(CONFIG, refused).splitlines()
    assert first == "what would fit, by 1.20 times the formula, as the compiler counts here:"
    plain = would_fit(CONFIG, verdict).splitlines()[1:]
    for line in changes:
        assert float(line.split()[-2]) < 0.9 * 16.9 and line not in plain


def test_a_program_that_the_compiler_finds_too_large_has_its_column(verdict):
    refused = replace(verdict, compiled=TooLarge(25e9, 16.9e9, "Ran out of memory"))
    lines = page("8b", refused).splitlines()
    head = next(line for line in lines if line.startswith("memory a chip"))
    total = next(line for line in lines if line.startswith("  total"))
    assert head.split()[-2:] == ["formula", "compiler"] and total.endswith("25.00 GB")
    assert f"{verdict.needed / 1e9:.2f} GB" in total


def test_communication_that_is_wholly_exposed_is_overlapped_by_nothing(verdict):
    traffic = Traffic(count=1, bytes=1e9, seconds=0.1, exposed_seconds=0.1 + 1e-9)
    row = {"axes": "fsdp", "kind": "all-gather", **vars(traffic)}
    compiled = Compiled(1, 1, 0, 0, 1.0, 1.0, 1e12, 1e9, 1.0, 1.0, [row])
    text = page("8b", replace(verdict, compiled=compiled))
    assert re.search(r"fsdp +all-gather .* 0%\n", text) and "-0%" not in text


def test_progress_of_the_compiler_is_rare_where_nobody_watches(monkeypatch):
    from jaxfb.planner import compiled

    assert compiled.seconds_between_reports() == 60  # pytest's standard error is no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert compiled.seconds_between_reports() == 10
