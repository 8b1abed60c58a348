"""Starter configs: installed with the package, found by name from any directory, copied by `jaxfb init`."""

import os
import re
from math import prod
from pathlib import Path

import pytest

from jaxfb.cli.commands import main
from jaxfb.config import DPOConfig, RLConfig, SFTConfig, load_config, smoke_overrides, starter_names
from jaxfb.config.load import kind_of_command
from jaxfb.config.root import Config
from jaxfb.data.conversations import read_conversations
from jaxfb.planner.topology import parse_topology
from jaxfb.planner.verdict import estimated
from jaxfb.refusal import Refused


@pytest.mark.parametrize("name", starter_names())
def test_a_starter_loads_by_name_from_an_empty_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(name).run.dir


@pytest.mark.parametrize("name", ["sft", "dpo", "fine_tune"])
def test_a_starter_and_its_sample_data_are_written_together(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name, "--out", "new"]) == 0
    out = capsys.readouterr().out
    assert f"cd new && jaxfb {'dpo' if name == 'dpo' else 'sft'} {name}.yaml" in out and "configs/" not in out
    config = load_config(tmp_path / "new" / f"{name}.yaml")
    section = config.preferences if name == "dpo" else config.conversations
    assert (tmp_path / "new" / section.path).is_file()


@pytest.mark.parametrize("name", ["sft", "dpo", "fine_tune"])
def test_a_starter_by_name_reads_the_installed_data_where_there_is_no_other(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = "preferences" if name == "dpo" else "conversations"
    installed = Path(getattr(load_config(name), section).path)
    assert installed.is_absolute() and installed.is_file()
    here = Path("examples", "data", installed.name)
    with pytest.raises(Refused, match=f"there is no file {here}; use {re.escape(str(installed))}"):
        read_conversations(here)
    assert main(["init", name]) == 0
    assert getattr(load_config(name), section).path == str(here)


def test_init_writes_a_config_with_the_data_that_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sft"]) == 0
    config = load_config("sft.yaml", command="sft")
    assert (tmp_path / config.conversations.path).is_file()
    assert main(["init", "sft"]) == 2
    assert "sft.yaml exists already" in capsys.readouterr().err


@pytest.mark.parametrize("blocked", ["new", "new/examples"])
def test_init_where_a_file_is_in_the_way_is_refused_and_leaves_nothing(
    blocked, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path(blocked).parent.mkdir(exist_ok=True)
    Path(blocked).write_text("")
    assert main(["init", "sft", "--out", "new"]) == 2
    error = capsys.readouterr().err
    assert f"[init] {blocked} is not a directory; use --out with another" in error and error.count("\n") == 1
    assert not Path("new/sft.yaml").exists()


def test_without_a_name_every_starter_is_listed_with_what_it_trains(capsys):
    assert main(["init"]) == 0
    title, *rows, last = capsys.readouterr().out.splitlines()
    assert [
        row.split()[0] for row in rows
    ] == starter_names() and last == "copy one with: jaxfb init quickstart"
    assert all(20 < len(row) <= 120 and len(row.split()) > 3 for row in rows), rows
    assert "  quickstart       a small transformer on the source of Python's standard library" in rows


def test_an_unknown_starter_is_refused_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quikstart"]) == 2
    assert "did you mean quickstart? choose one of 125m" in capsys.readouterr().err
    assert main(["train", "quikstart"]) == 2
    assert "did you mean the starter config quickstart?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_run_is_refused_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quick" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    assert main(["eval", "runs/quik"]) == 2
    assert "no file or run's directory runs/quik; did you mean runs/quick?" in capsys.readouterr().err
    assert main(["generate", "runs/x", "--prompt", "a"]) == 2
    assert "directory runs/x; in runs: quick; starter configs: 125m" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval"],
        ["generate", "--prompt", "a"],
        ["generate", "--prompt", "a", "--samples=2"],
        ["chat"],
        ["export-hf", "to"],
    ],
    ids=" ".join,
)
def test_a_config_whose_run_is_not_there_is_answered_by_the_command_that_trains_it(
    arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    verb, *more = arguments
    assert main([verb, "quickstart", *more]) == 2
    wanted = "jaxfb: [run] there is no run in runs/quickstart yet; train it first: jaxfb train quickstart\n"
    assert capsys.readouterr().err == wanted
    assert not list(tmp_path.iterdir())


def test_a_plan_of_what_begins_with_a_missing_run_names_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "fine_tune", "--topology", "cpu:1", "--no-compile"]) == 2
    assert capsys.readouterr().err.startswith("jaxfb: [start] there is no run runs/imported to start from; ")


def test_a_file_in_the_working_directory_comes_before_a_starter_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    with pytest.raises(
        ValueError, match="quickstart is not a run's directory, for there is no quickstart/config.yaml"
    ):
        load_config("quickstart")


@pytest.mark.parametrize("name", starter_names())
def test_smoke_overrides_make_any_starter_short(name):
    command = {SFTConfig: "sft", DPOConfig: "dpo", RLConfig: "rl"}.get(type(load_config(name)), "train")
    config = load_config(name, smoke_overrides(kind_of_command(command)), command)
    updates = (
        config.run.updates
        if isinstance(config, Config)
        else getattr(config, "batch", config).__dict__.get("updates", 4)
    )
    assert updates == 4 and config.lr.warmup == 0 and config.checkpoint.every is None


PRETRAINING = [name for name in starter_names() if isinstance(load_config(name), Config)]


@pytest.mark.parametrize("name", PRETRAINING)
def test_a_smoke_run_of_any_starter_has_a_legal_step(name):
    """Also the learning rate, whose course may have a tail that is longer than the few updates."""
    config = load_config(name, smoke_overrides(Config))
    assert estimated(config, parse_topology(f"cpu:{devices_of(config)}")).rows == config.batch.rows


def devices_of(config):
    """As few devices as the mesh may have."""
    return prod(size for size in vars(config.mesh).values() if size > 0)


@pytest.mark.slow
@pytest.mark.processes
def test_a_smoke_run_that_was_lost_is_not_called_a_success(monkeypatch, capsys):
    monkeypatch.setattr("jaxfb.cli.training._ended", lambda config, options: 76)
    assert main(["train", "quickstart", "--smoke"]) == 76
    assert "--smoke: the run did not end as it should" in capsys.readouterr().out


@pytest.mark.slow
def test_a_smoke_run_keeps_no_files(tmp_path, monkeypatch, capsys):
    import yaml
    from tiny import TINY

    monkeypatch.chdir(tmp_path)
    data = {**TINY["data"], "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({**TINY, "data": data, "run": {"updates": 1000, "dir": "kept"}})
    )
    assert main(["train", "tiny.yaml", "--smoke"]) == 0
    out = capsys.readouterr().out
    assert "4/4  loss" in out and "--smoke: the run worked. Its directory is removed now" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tiny.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_smoke_run_leaves_no_cache_and_names_nothing_that_is_gone(there, tmp_path, monkeypatch, capsys):
    """A cache that is there already is used, since it spares the next run reading the text again."""
    import yaml
    from tiny import TINY

    monkeypatch.chdir(tmp_path)
    for name in ("JAXFB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    data = {name: value for name, value in TINY["data"].items() if name != "cache_dir"}
    values = {**TINY, "data": data, "run": {"updates": 1000, "dir": "kept"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    if there:
        (tmp_path / ".cache" / "jaxfb-data").mkdir(parents=True)
    assert main(["train", "tiny.yaml", "--smoke"]) == 0
    out = capsys.readouterr().out
    assert "4 updates in" in out
    assert not any(words in out for words in ("try it", "everything is in", "metrics.jsonl", "--resume"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tiny.yaml", *([".cache"] if there else [])}
    assert bool(there) == any((tmp_path / ".cache").glob("jaxfb-data/*"))
    assert "JAXFB_CACHE" not in os.environ
    assert main(["train", "tiny.yaml", "--smoke", "run.stop_at=2"]) == 75
    out = capsys.readouterr().out
    assert "ended after update 2 of 4" in out and "the run was stopped" in out
    assert "continue with" not in out and "--resume" not in out
