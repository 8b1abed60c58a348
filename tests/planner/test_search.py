"""A search keeps what it finds: stopped at any time its files are whole, and the next one does not begin anew."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from processes import PATIENCE

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.candidates import NOTHING, Fixed, candidates, label
from jaxfb.planner.compiled import Compiled, TooLarge
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.known import Known
from jaxfb.planner.search import Found, _as_candidate, by_formula, picked, search, table
from jaxfb.planner.verdict import estimated, plan
from jaxfb.refusal import Refused

SMALL = ["configs/1b.yaml", "--topology", "v5e:2x2", "--search", "--layouts", "2"]
SIZES = ["batch.rows=32", "model.num_layers=4"]
ANSWER = Compiled(1, 2, 3, 4, 0.1, 0.2, 5.0, 7.0, 8.0, 5.0, [])


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compiler; `.asked` are the layouts that it compiled, `.answers` what it says, in order,
    before it finds that everything fits."""

    class Compiler:
        asked, answers = [], []

        def __call__(self, config, topology, say):
            self.asked.append(config)
            result = self.answers.pop(0) if self.answers else ANSWER
            if isinstance(result, BaseException):
                raise result
            if isinstance(result, signal.Signals):
                os.kill(os.getpid(), result)
                time.sleep(PATIENCE)
            return result

    stand_in = Compiler()
    monkeypatch.setattr("jaxfb.planner.verdict.compile_for", stand_in)
    monkeypatch.setattr("jaxfb.planner.search.compiles_here", lambda *_: True)
    monkeypatch.setattr("jaxfb.planner.tpu.is_installed", lambda: True)
    return stand_in


@pytest.fixture
def ctrl_c():
    """SIGINT raises, as in a terminal: processes in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(directory):
    return main(["plan", *SMALL, "--out", str(directory), *SIZES, "parallel.remat=full"])


def answered(directory):
    rows = json.loads((directory / "search.json").read_text())
    return [row["layout"] for row in rows if row["compiled"] or row["refused"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("ctrl_c")
def test_a_stopped_search_keeps_what_it_found_and_goes_on_from_there(compiler, tmp_path, capsys, number):
    compiler.answers[:] = [ANSWER, number]
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path) == 128 + number and signal.getsignal(signal.SIGTERM) == before
    printed = capsys.readouterr()
    assert "the same command continues from them" in printed.err
    # one layout is compiled, so both are compared by formula
    assert "(given)" in printed.out and "beside the given one, by formula: a step takes 0." in printed.out
    assert len(answered(tmp_path)) == 1 and load_config(tmp_path / "plan.yaml").batch.rows == 32

    assert run(tmp_path) == 0
    assert f"train with this layout: jaxfb train {tmp_path}/plan.yaml" in capsys.readouterr().out
    first, stopped, again, *more = compiler.asked
    assert stopped == again != first and first not in more
    assert len(answered(tmp_path)) == 2 + len(more)


@pytest.mark.usefixtures("ctrl_c", "compiler")
def test_a_search_stopped_before_it_knows_a_layout_promises_no_results(monkeypatch, tmp_path, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxfb.planner.search.by_formula", stopped)
    assert run(tmp_path / "plan") == 130
    assert "no layout is known yet, and nothing is written" in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


def test_where_nothing_fits_the_smallest_is_first(tmp_path, capsys):
    """80 layers are 5.1B parameters: 41 GB of them and of their sums alone, where a chip has 16.9."""
    command = ["plan", "configs/1b.yaml", "--topology", "v5e:1x1", "--search", "--no-compile"]
    assert main([*command, "--out", str(tmp_path), "batch.rows=16", "model.num_layers=80"]) == 1
    rows = json.loads((tmp_path / "search.json").read_text())
    needed = [row["needed"] for row in rows]
    assert needed == sorted(needed) and needed[0] > rows[0]["available"]
    out = capsys.readouterr().out
    assert "none of these layouts fits; the smallest is first" in out and "smallest layout on v5e:1x1" in out
    assert "use more devices, shorter rows, or a smaller model" in out
    assert (
        "estimated by formula: products take the chip's peak rate\n" in out
    )  # one device has no communication
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    "layout, fixed, refusal",
    [
        ("mesh.context=3", NOTHING, "mesh.context=3 does not divide 4 devices; use mesh.context=2"),
        ("batch.rows=1024", Fixed(rows=3), "1024 rows in microbatches of 3 rows .*; use batch.rows=1032"),
        ("batch.rows=1024", Fixed(microbatches=5), "1024 rows in 5 microbatches .*; use batch.rows=1040"),
    ],
)
def test_where_no_mesh_divides_the_advice_is_one_that_does(layout, fixed, refusal):
    config, topology = load_config("configs/8b.yaml", layout.split()), parse_topology("v5p:2x2x1")
    with pytest.raises(ValueError, match=refusal) as refused:
        by_formula(config, model_sizes(config), topology, fixed)
    advice = str(refused.value).split("use ")[1]
    better = load_config("configs/8b.yaml", [*layout.split(), advice])
    assert by_formula(better, model_sizes(better), topology, fixed)


@pytest.mark.usefixtures("compiler")
def test_a_context_axis_that_takes_the_rest_is_searched_as_the_given_layout_has_it(tmp_path):
    assert (
        main(
            ["plan", *SMALL, "--no-compile", "--out", str(tmp_path), *SIZES, "mesh.fsdp=2", "mesh.context=-1"]
        )
        == 0
    )
    rows = json.loads((tmp_path / "search.json").read_text())
    assert {row["mesh"]["context"] for row in rows} == {2}


def test_the_given_layout_is_compiled_first_and_compared_with_the_best(compiler, tmp_path, capsys):
    compiler.answers[:] = [replace(ANSWER, work_seconds=16.0)]
    assert run(tmp_path) == 0
    rows = json.loads((tmp_path / "search.json").read_text())
    assert [row["layout"] for row in rows if row["given"]] == [label(compiler.asked[0])]
    out = capsys.readouterr().out
    assert "(given)" in out
    assert (
        "given one: a step takes 0.50 times as long, 8 s in place of 16 s, and 0.0 GB in place of 0.0 GB"
        in out
    )


@pytest.mark.parametrize(
    "layout, topology",
    [
        ("parallel.fsdp_gather=step mesh.fsdp=1", "v5e:1x1"),
        ("batch.rows_per_microbatch=null batch.num_microbatches=2 mesh.fsdp=4", "v5e:2x2"),
        ("mesh.pipe=4 mesh.fsdp=1 batch.rows_per_microbatch=16 parallel.remat=selective", "v5e:2x2"),
    ],
)
def test_the_given_layout_is_known_among_the_candidates_by_whatever_words(layout, topology):
    """Otherwise it would be listed and compiled twice."""
    config, machine = load_config(SMALL[0], [*SIZES, *layout.split()]), parse_topology(topology)
    own = replace(config, mesh=replace(config.mesh, **estimated(config, machine).mesh))
    given = Found(own, estimated(own, machine), given=True)
    assert _as_candidate(given) in list(candidates(own, model_sizes(own), machine.num_devices))


@pytest.mark.slow
def test_the_given_layout_is_in_the_table_however_slow_it_is():
    config, topology = load_config(SMALL[0], [*SIZES, "parallel.remat=full"]), parse_topology(SMALL[2])
    found = search(config, topology, layouts=24, compiled=0)
    place = next(place for place, one in enumerate(found) if one.given)
    assert place >= 2
    assert [line.endswith("(given)") for line in table(found, most=2).splitlines()] == [False] * 3 + [True]


@pytest.mark.parametrize("topology, offloads", [("v5e:2x4", True), ("cpu:8", False)])
def test_inputs_go_to_the_host_where_that_is_another_memory(topology, offloads):
    config = load_config("configs/8b.yaml", ["mesh.fsdp=8", "mesh.dp=1", "batch.rows=256"])
    counted = by_formula(config, model_sizes(config), parse_topology(topology), NOTHING)
    assert any(one.parallel.remat == "offload" for _, one in counted) == offloads


def test_more_rows_with_inputs_on_the_host_beat_fewer_without_where_memory_is_short():
    config = load_config("configs/8b.yaml", ["mesh.fsdp=16"])
    sizes, topology = model_sizes(config), parse_topology("v5e:4x4")
    counted = by_formula(config, sizes, topology, NOTHING)
    best, *_ = picked([pair for pair in counted if pair[1].mesh.pipe == 1], sizes, topology, 1)
    assert (best.parallel.remat, best.batch.rows_per_microbatch) == ("offload", 4)


def kind_of(config):
    return config.mesh.pipe, config.mesh.tensor, config.parallel.remat


def test_a_slower_layout_of_a_kind_is_listed_if_it_is_smaller():
    config, topology = load_config("configs/8b.yaml", ["mesh.fsdp=16"]), parse_topology("v5p:2x2x4")
    sizes = model_sizes(config)
    found = picked(by_formula(config, sizes, topology, NOTHING), sizes, topology, 40)
    sizes_by_kind = {}
    for one in found:
        if "+" not in one.parallel.remat:
            sizes_by_kind.setdefault(kind_of(one), []).append(estimate(one, sizes, topology))
    assert sum(len(each) > 1 for each in sizes_by_kind.values()) >= 3
    for each in sizes_by_kind.values():
        assert [one.seconds for one in each] == sorted(one.seconds for one in each)
        assert all(after.total < 0.96 * before.total for before, after in pairwise(each))


def test_the_smallest_of_those_as_fast_as_the_fastest_is_compiled_first(compiler):
    config, topology = load_config("configs/8b.yaml", ["mesh.fsdp=16"]), parse_topology("v5p:2x2x4")
    kept = []
    search(config, topology, layouts=12, compiled=2, keep=kept.append)
    of_formula = [one for one in kept[0] if not one.given]
    kind = kind_of(of_formula[0].config)
    fastest, *slower = [one for one in of_formula if kind_of(one.config) == kind]
    alike = [one for one in slower if one.verdict.step_seconds < 1.01 * fastest.verdict.step_seconds]
    _, first, second = compiler.asked  # the given one before them
    assert alike and first == min(alike, key=lambda one: one.verdict.needed).config
    assert kind_of(second) != kind


def test_a_layout_that_cannot_be_there_is_no_reason_not_to_search(compiler, tmp_path, capsys):
    assert main(["plan", *SMALL, "--out", str(tmp_path), *SIZES, "mesh.fsdp=3"]) == 0
    assert "the given layout is left out: " in capsys.readouterr().err
    assert not any(row["given"] for row in json.loads((tmp_path / "search.json").read_text()))


def test_one_layout_that_the_compiler_refuses_does_not_end_the_search(compiler, tmp_path, capsys):
    crash = RuntimeError("the compiler ended with code -9")
    compiler.answers[:] = [crash, TooLarge(2e10, 1.6e10, "Ran out")]
    assert run(tmp_path) == 0
    assert "left out: the compiler ended with code -9" in capsys.readouterr().err
    rows = json.loads((tmp_path / "search.json").read_text())
    crashed, too_large, *_ = compiler.asked
    assert label(crashed) not in [row["layout"] for row in rows]
    assert label(too_large) == rows[-1]["layout"] and not rows[-1]["fits"]


def test_a_refusal_of_every_layout_ends_the_search(compiler, tmp_path, capsys):
    """Such as that of a compiler option, which no layout changes: it is not asked again for each of them."""
    compiler.asked.clear()
    compiler.answers[:] = [Refused("compiler_options: no such option; leave it out") for _ in range(9)]
    assert run(tmp_path) == 2 and len(compiler.asked) == 2
    assert "no such option; leave it out" in capsys.readouterr().err.splitlines()[-1]
    compiler.answers[:] = [RuntimeError(f"crash {number}") for number in range(9)]
    assert run(tmp_path) == 2
    assert "refused every layout that it was asked about, the last since crash" in capsys.readouterr().err


def test_a_verdict_is_known_again_for_the_same_question_alone(tmp_path, monkeypatch):
    path, topology = tmp_path / "known.jsonl", parse_topology("v5e:2x2")
    config = load_config("configs/1b.yaml", ["model.num_layers=2", "mesh.fsdp=4", "batch.rows=32"])
    verdict = plan(config, topology, compiles=False)
    Known(path).add(config, verdict)
    for answer in (ANSWER, TooLarge(2.0, 1.0, "Ran out")):
        Known(path).add(config, replace(verdict, compiled=answer))
        assert Known(path).get(config, topology) == replace(verdict, compiled=answer)
    with path.open("a") as file:
        file.write('{"key": "cut o')
    assert Known(path).get(config, topology) is not None
    assert Known(path).get(config, parse_topology("v5e:2x4")) is None
    assert Known(path).get(replace(config, batch=replace(config.batch, rows=64)), topology) is None
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--flag=true")
    assert Known(path).get(config, topology) is None


def test_the_compilers_process_ends_with_the_one_that_started_it():
    child = "import threading, time; from jaxfb.planner import compiled; "
    child += "threading.Thread(target=compiled._end_with_parent, daemon=True).start(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, env=os.environ)
    process.stdin.close()
    assert process.wait(timeout=PATIENCE) == 1


@pytest.mark.slow
def test_the_state_goes_to_the_host_where_no_layout_fits_otherwise():
    config, said = load_config("configs/8b.yaml", ["batch.rows=64"]), []
    roomy, tight = (parse_topology(name) for name in ("v5p:2x2x2", "v5e:2x4"))
    # in all of its 16.9 GB a layout would fit with the layers' inputs on the host
    tight = replace(tight, chip=replace(tight.chip, memory=16e9))
    assert all(
        one.config.optimizer.memory == "device" for one in search(config, roomy, layouts=2, compiled=0)
    )
    found = search(config, tight, layouts=2, compiled=0, say=said.append)
    fitting = [one for one in found if one.verdict.fits]
    assert len(fitting) == 2 and all(one.config.optimizer.memory == "host" for one in fitting)
    assert "state on the host" in label(found[0].config) and "in the host's memory" in said[-1]
