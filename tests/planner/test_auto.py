"""`mesh: auto`: the planner's layout, printed and saved with the run, kept when the run goes on."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from tiny import write_tiny

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.config.sections import MeshConfig
from jaxfb.planner import parse_topology
from jaxfb.planner.auto import choose, choose_here, fixed_by
from jaxfb.planner.candidates import candidates, label
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import MARGIN
from jaxfb.training.open_mesh import with_mesh
from jaxfb.training.run_dir import RunDirectory

SMALL = ["mesh=auto", "model.num_layers=4", "batch.rows=32", "batch.rows_per_microbatch=4"]


def config(*more):
    return load_config("configs/1b.yaml", [*SMALL, *more])


def saved(tmp_path):
    return yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


def test_the_layout_is_the_fastest_that_fits_and_what_is_given_of_it_stays():
    given = config()
    v5e, gpu = parse_topology("v5e:2x2"), parse_topology("gpu:h100x8")
    found = [choose(given, topology) for topology in (v5e, gpu)]
    assert label(found[0].config) != label(found[1].config)
    for one, topology in zip(found, (v5e, gpu), strict=True):
        mesh, parallel = one.config.mesh, one.config.parallel
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.pipe == topology.num_devices
        assert (parallel.remat, one.config.batch.rows_per_microbatch) == (given.parallel.remat, 4)
        assert estimate(one.config, model_sizes(given), topology).total < 0.8 * topology.chip.memory
        assert label(one.config) in one.lines[1] and "rather than" in one.lines[2]


def test_less_memory_is_another_layout_and_too_little_is_told_with_enough_devices():
    given, v5e = config("parallel.remat=full"), parse_topology("v5e:2x2")
    whole = choose(given, v5e)
    needed = estimate(whole.config, model_sizes(given), v5e).total
    less = choose(given, v5e, available=0.9 * needed)
    assert estimate(less.config, model_sizes(given), v5e).total < 0.9 * needed
    with pytest.raises(ValueError, match=r"auto finds no layout .* needs .* GB .* use \d+ devices"):
        choose(given, v5e, available=1.2e9)


def test_a_slower_layout_is_taken_where_the_fastest_fits_more_closely_than_the_formula_can_tell():
    given, v5e = config("parallel.remat=full"), parse_topology("v5e:2x2")
    needed = lambda chosen: estimate(chosen.config, model_sizes(given), v5e).total  # noqa: E731
    fastest = choose(given, v5e)
    close = needed(fastest) / (1 - MARGIN / 2)
    chosen = choose(given, v5e, available=close)
    assert label(chosen.config) != label(fastest.config) and needed(chosen) <= (1 - MARGIN) * close


def test_simulated_devices_have_no_more_memory_where_there_are_more():
    given, simulated = config(), parse_topology("cpu:8")
    sizes, opened = model_sizes(given), replace(given, mesh=MeshConfig(data=1))
    counted = [estimate(one, sizes, simulated) for one in candidates(opened, sizes, 8, fixed_by(given))]
    smallest = min(one.total for one in counted) / 1e9
    with pytest.raises(
        ValueError, match=f"needs {smallest:.1f} GB of .* use a smaller model or shorter rows"
    ):
        choose(given, simulated, available=1e8)


@pytest.mark.parametrize("more, found", [(["schedule=1f1b"], ("1f1b", 1)), (["chunks=2"], (None, 2))])
def test_a_given_schedule_stays(more, found):
    for topology in ("v5e:2x2", "cpu:8"):
        one = choose(config(*more), parse_topology(topology), available=16e9).config
        assert one.mesh.pipe > 1 and one.chunks == found[1] and found[0] in (None, one.schedule)
    with pytest.raises(ValueError, match=f"no pipeline on 1 device .*leave out {more[0]}"):
        choose(config(*more), parse_topology("v5e:1x1"))


@pytest.mark.parametrize("length", [32, 128, 384])
def test_a_row_of_any_length_is_counted(length):
    """Also one that a TPU's attention kernel takes in one block, or not at all."""
    given = config(f"data.sequence_length={length}")
    assert choose(given, parse_topology("v5e:2x2")).config.data.sequence_length == length


def test_post_training_has_no_open_mesh():
    with pytest.raises(ValueError, match="mesh=auto is for `jaxfb train` .* such as mesh.data=-1"):
        load_config("sft", ["mesh=auto"])


def test_with_fewer_rows_than_devices_the_sequence_is_cut():
    few = config("batch.rows=1", "batch.rows_per_microbatch=1", "model.num_kv_heads=1", "model.num_layers=3")
    assert choose(few, parse_topology("gpu:h100x8")).config.mesh.context > 1


def test_fsdp_has_a_size_that_cuts_the_parameters():
    """24 divides no width of the model: parameters would be whole on each of 24 devices."""
    given = config("batch.rows=24", "batch.rows_per_microbatch=1")
    sizes = {one.mesh.fsdp for one in candidates(given, model_sizes(given), 24)}
    assert max(sizes) == 8 and all(given.model.hidden_size % size == 0 for size in sizes)


@pytest.mark.parametrize("overrides", [["mesh=auto", "mesh.fsdp=2"], ["mesh=anything"]])
def test_the_word_stands_alone(overrides):
    with pytest.raises(ValueError, match="leave one of the two out|the word auto"):
        load_config("quickstart", overrides)


def test_unknown_devices_and_given_stages_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="layers_per_stage=\\(3, 1\\) is for given ones"):
        choose(config("parallel.layers_per_stage=[3,1]"), parse_topology("v5e:2x2"))
    unknown = [SimpleNamespace(platform="gpu", device_kind="Tesla T4")] * 8
    monkeypatch.setattr("jaxfb.planner.auto.jax.devices", lambda: unknown)
    with pytest.raises(ValueError, match="not of Tesla T4; give sizes, such as mesh.fsdp=8"):
        choose_here(config())


def test_a_plan_takes_it(capsys):
    assert main(["plan", "configs/1b.yaml", *SMALL, "--topology", "v5e:2x2", "--no-compile"]) == 0
    printed = capsys.readouterr()
    assert "mesh: auto on v5e:2x2" in printed.err and "FITS" in printed.out


def test_a_run_saves_its_layout_and_keeps_it(tmp_path, capsys):
    short = {"eval": {"every": None, "batches": 1, "prompt": ""}, "lr": {"warmup": 0}}
    path = write_tiny(tmp_path, batch={"rows": 16}, run={"updates": 1}, **short)
    values = yaml.safe_load(path.read_text()) | {"mesh": "auto"}
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path)]) == 0
    assert "what sends least:\n  data 8" in capsys.readouterr().out
    made = saved(tmp_path)
    assert made["mesh"]["data"] == 8 and made["batch"]["rows_per_microbatch"] == 2

    again, run = load_config(path), RunDirectory(tmp_path / "run")
    for mesh, line, data in (
        ({"data": 4, "fsdp": 2}, "mesh: auto, as the run began: data 4 x fsdp 2", 4),
        ({"data": 4}, "mesh: auto: the run began on 4 devices as data 4, here are 8", 8),
    ):
        (run.path / "config.yaml").write_text(yaml.safe_dump(made | {"mesh": mesh}))
        first = OneProcess()
        assert with_mesh(again, first, run).mesh.data == data and first.said[0] == line
        other = OneProcess(first.decided)  # as a process that hears from the first
        assert with_mesh(again, other, None) == with_mesh(again, OneProcess(), run)


class OneProcess:
    """Of several: the first decides, what it decides is text between them."""

    def __init__(self, decided=None):
        self.decided, self.said = decided, []

    def first(self, function):
        self.decided = self.decided or json.dumps(function())
        return json.loads(self.decided)

    def say(self, line):
        self.said.append(line)
