"""`jaxfb plan` from the shell: the answer first, JSON on request, refusals in a sentence, and the search's files."""

import json
import re
from importlib.util import find_spec

import pytest

from jaxfb.cli.commands import main
from jaxfb.config import config_from_dict, load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.candidates import candidates
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import plan
from jaxfb.schedules import KINDS

ONE_LAYER = "model.num_layers=2 mesh.dp=2 mesh.fsdp=1 mesh.tp=1 data.tokenizer=bytes batch.rows=8".split()


def test_an_estimate_answers_in_one_sentence_with_what_it_rests_on(capsys):
    command = ["plan", "configs/8b.yaml", "--topology", "v5e:4x4", "--no-compile"]
    assert main([*command, "batch.rows_per_microbatch=4"]) == 1
    page = capsys.readouterr().out
    assert "DOES NOT FIT: " in page and "of 16.91 GB a chip (estimated)" in page and "GB too much" in page
    assert "\n\n\n" not in page and "estimated by formula: products take" in page
    assert "optimizer state              4.02 GB" in page and "8.03B parameters, fsdp 16" in page
    assert main([*command, "batch.rows_per_microbatch=4", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main([*command, "mesh.tp=8", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["fits"] and verdict["mesh"]["tensor"] == 8 and 0 < verdict["mfu"] < 1
    assert verdict["estimate"]["parameters"] * 16 == pytest.approx(4 * verdict["num_params"], rel=0.001)


@pytest.mark.slow
@pytest.mark.slow
def test_the_compiler_answers_for_simulated_devices_in_a_process_of_its_own():
    verdict = plan(load_config("configs/mesh8.yaml", ONE_LAYER), parse_topology("cpu:2"))
    assert verdict.compiled.arguments == pytest.approx(verdict.estimate.arguments, rel=0.01)
    # by hand attention is causal, and in the program whole blocks of it are not left out
    assert 1 < verdict.compiled.flops / verdict.model_flops < 1.2
    assert {row["axes"] for row in verdict.compiled.traffic} == {"data"}
    assert verdict.fits is None and verdict.compiled.compile_seconds > 0


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["configs/8b.yaml", "--topology", "v9:4x4"], "did you mean v4:4x4"),
        (
            ["configs/8b.yaml", "--topology", "v5e:4x4", "mesh.fsdp=7"],
            "a mesh of fsdp 7 cannot be made of 16 devices; use mesh.fsdp=8",
        ),
        (
            ["configs/8b.yaml", "--topology", "v5e:4x4", "model.vocab_size=null"],
            "add model.vocab_size=128256",
        ),
        (["configs/mesh8.yaml", "--topology", "cpu:8", "--search"], "has neither; use v5e:4x4"),
        (["configs/mesh8.yaml", "--topology", "v5e:2x2", "mesh.tp=1"], "pip install 'jaxfb\\[plan\\]'"),
        (["8b", "--topology", "v6e:4x4", "--search"], "pip install 'jaxfb\\[plan\\]'.*or add --no-compile"),
        (["8b", "--topology", "v6e:4x4", "--search", "--layouts", "0"], "at least 1; use --layouts 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr("jaxfb.planner.tpu.is_installed", lambda: False)
    assert main(["plan", *arguments]) == 2
    printed, error = capsys.readouterr()
    assert re.search(sentence, error) and error.count("\n") == 1 and not printed


def of_ones_own():
    names = {"model": "toy:model", "params": "toy:params", "data": "toy:rows"}
    batch = {"rows": 8, "rows_per_microbatch": 1}
    return config_from_dict({**names, "batch": batch, "run": {"dir": "runs/toy", "updates": 1}})


@pytest.mark.parametrize(
    ("config", "topology", "message"),
    [
        (
            of_ones_own,
            "cpu:8",
            "toy:model is a model of your own: plan works for the built-in transformer alone",
        ),
        (
            lambda: "configs/mesh8.yaml",
            "cpu:8",
            r"config must be a config, such as load_config\(path\) returns",
        ),
        (lambda: load_config("configs/mesh8.yaml"), None, "topology must be such as parse_topology"),
    ],
    ids=["own", "a path", "a name"],
)
def test_a_program_that_plans_something_else_is_told_what_is_taken(config, topology, message):
    given = config(), "cpu:8" if topology is None else parse_topology(topology)
    with pytest.raises(ValueError, match=message):
        plan(*given, compiles=False)
    with pytest.raises(ValueError, match="topology must be a string"):
        parse_topology(None)


def test_candidates_divide_and_train_the_same():
    config = load_config("configs/8b.yaml")
    found = list(candidates(config, model_sizes(config), 64))
    assert len(found) > 500
    for one in found:
        mesh = one.mesh
        assert mesh.pipe * mesh.data * mesh.fsdp * mesh.tensor == 64
        assert one.batch.rows == config.batch.rows and one.model == config.model
        assert config.batch.rows % (mesh.data * mesh.fsdp * one.batch.rows_per_microbatch) == 0
        assert (one.schedule is None) == (mesh.pipe == 1) and config.model.num_layers % (
            mesh.pipe * one.chunks
        ) == 0
    sensible = {name for name, kind in KINDS.items() if not (kind.baseline or kind.pieces)}
    assert {one.schedule for one in found} == {None, *sensible}


def test_search_writes_the_fastest_layout_that_fits(tmp_path, capsys):
    command = [
        "plan",
        "configs/1b.yaml",
        "--topology",
        "v5e:2x2",
        "--search",
        "--no-compile",
        "--layouts",
        "3",
    ]
    assert main([*command, "--out", str(tmp_path), "batch.rows=32", "model.num_layers=4"]) == 0
    rows = json.loads((tmp_path / "search.json").read_text())
    fitting = [row["step_seconds"] for row in rows if row["fits"]]
    assert rows[0]["fits"] and fitting == sorted(fitting)
    assert len(fitting) in (3, 4)  # the given layout may be among the three fastest
    best = load_config(tmp_path / "plan.yaml")
    assert vars(best.mesh) == rows[0]["mesh"] and best.batch.rows == 32
    assert (tmp_path / "memory.png").exists() == (find_spec("matplotlib") is not None)
