"""A run on CPUs that the memory of the machine cannot hold is refused before anything is allocated."""

import re

import pytest
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.cli import commands as cli
from jaxfb.config import load_config
from jaxfb.planner import host_fit
from jaxfb.planner.host_fit import check_host
from jaxfb.planner.topology import parse_topology
from jaxfb.planner.verdict import plan
from jaxfb.training import machine

ON_ONE = ["mesh.data=8", "batch.rows=512"]


def refusal(monkeypatch, memory, name, *overrides):
    monkeypatch.setattr(host_fit, "host_memory", lambda: memory)
    with pytest.raises(ValueError, match=r"^\[memory\] the run needs") as refused:
        check_host(load_config(name, [*ON_ONE, *overrides]))
    return str(refused.value)


@pytest.mark.parametrize(
    "key, cut",
    [
        ("rows_per_microbatch", ["batch.rows_per_microbatch=16"]),
        ("num_microbatches", ["batch.rows_per_microbatch=null", "batch.num_microbatches=4"]),
    ],
)
def test_the_advice_is_a_change_that_fits(monkeypatch, key, cut):
    said = refusal(monkeypatch, int(100e9), "125m", *cut)
    assert re.search(r"needs [\d.]+ GB at the least, .* this machine has 100\.0 GB; use batch\.", said)
    change = re.search(r"; use (.*)$", said)[1].split()
    assert change[0].startswith(f"batch.{key}=")
    check_host(load_config("125m", [*ON_ONE, *cut, *change]))


def test_otherwise_it_is_the_largest_starter_config_that_fits(monkeypatch):
    said = refusal(monkeypatch, int(150e9), "1b")
    assert said.endswith("; use a smaller model, such as the starter config 125m")
    assert refusal(monkeypatch, 10**6, "quickstart", "batch.rows=16", "batch.rows_per_microbatch=1").endswith(
        "; use a smaller model"
    )


def test_nothing_is_said_where_there_is_room_and_a_line_where_it_is_used(monkeypatch, tmp_path):
    config, lines = load_config(write_tiny(tmp_path, mesh={"data": -1}), ["batch.rows=16"]), []
    check_host(config, lines.append)
    assert lines == []
    monkeypatch.setattr(host_fit, "free_memory", lambda: 1000)
    check_host(config, lines.append)
    assert len(lines) == 1 and "of this machine's" in lines[0] and lines[0].endswith("are free")


def test_what_is_not_known_is_not_refused(monkeypatch, tmp_path):
    config = load_config("125m", ON_ONE)
    monkeypatch.setattr(host_fit, "host_memory", lambda: None)
    check_host(config)
    monkeypatch.setattr(host_fit, "host_memory", lambda: 1)
    check_host(load_config("grpo_arithmetic"))
    check_host(load_config("125m", ["mesh.data=3"]))  # the trainer names the devices
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "nothing")
    assert machine.free_memory() is None


def test_the_commands_refuse_before_the_text_is_read(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(host_fit, "host_memory", lambda: 1000)
    monkeypatch.setattr(trainer, "make_work", lambda *arguments: pytest.fail("the text was read"))
    assert cli.main(["train", str(write_tiny(tmp_path)), "mesh.data=-1", "batch.rows=16"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxfb: [memory] the run needs ") and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["precision.compute_dtype=bfloat16"], ["parallel.remat=layer"]])
def test_the_compiler_for_cpus_counts_no_less(overrides):
    config = load_config("quickstart", ["mesh.data=1", *overrides])
    verdict = plan(config, parse_topology("cpu:1"))
    assert verdict.compiled.temporaries >= host_fit.TEMPORARIES * verdict.estimate.temporaries
