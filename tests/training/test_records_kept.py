"""Every update has one record in metrics.jsonl, also where the file could not be written for a while."""

import errno
import json
import os
from pathlib import Path

import pytest
from tiny import write_tiny

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.metrics import JsonlWriter, read_jsonl
from jaxfb.training.run_dir import RunDirectory

WRITER = """
class Broken:
    def write(self, step, record):
        if step >= 2:
            raise ValueError("bad value")

    def close(self):
        raise RuntimeError("flush failed")

def make(directory, config, resume):
    return Broken()
"""


@pytest.fixture
def config(tmp_path):
    settings = {"run": {"updates": 5}, "lr": {"name": "constant"}, "eval": {"every": 2, "prompt": ""}}
    return write_tiny(tmp_path, **settings, model={"num_layers": 1}, log={"every": 1})


def recorded(run):
    """The updates of the records of training, and of those of an evaluation."""
    records = read_jsonl(run.metrics)
    return [[record["step"] for record in records if name in record] for name in ("loss", "eval/loss")]


@pytest.mark.parametrize(
    "first, number, remedy", [(2, errno.EIO, ""), (5, errno.ENOSPC, "free some space, then ")], ids=["2", "5"]
)
def test_records_that_could_not_be_written_are_there_once_the_run_has_continued(
    config, capsys, monkeypatch, first, number, remedy
):
    append, run = JsonlWriter._append, RunDirectory.of(load_config(config))

    def full(self, line):
        if json.loads(line)["step"] >= first:
            append(self, line[:7])
            raise OSError(number, os.strerror(number))
        append(self, line)

    monkeypatch.setattr(JsonlWriter, "_append", full)
    assert main(["train", str(config)]) == 74
    said = capsys.readouterr().err
    assert f"metrics.jsonl cannot be written: {os.strerror(number)}; saved after update" in said
    assert f"; {remedy}continue with: " in said and len(said.splitlines()) == 1
    assert recorded(run)[0] == list(range(1, first))
    monkeypatch.undo()
    assert main(["train", str(run.path), "--resume"]) == 0
    assert recorded(run) == [[1, 2, 3, 4, 5], [2, 4, 5]] and run.summary.is_file()
    assert main(["train", str(run.path), "--resume"]) == 0 and "is finished" in capsys.readouterr().out


def test_a_broken_writer_does_not_end_a_run(config, tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_writer.py").write_text(WRITER)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", str(config), "log.writers=[broken_writer:make]"]) == 0
    run = RunDirectory.of(load_config(config))
    assert recorded(run) == [[1, 2, 3, 4, 5], [2, 4, 5]] and run.summary.is_file()
    said = capsys.readouterr().out
    assert said.count("the writer 'broken_writer:make' failed at step 2 (ValueError: bad value") == 2


@pytest.mark.parametrize("file", ["summary.json", "loss.png"])
def test_the_last_files_that_a_full_disk_did_not_take_are_written_by_a_resume(
    config, capsys, monkeypatch, file
):
    """Without its summary the run counted as finished, with exit code 0, and nothing ever wrote it."""
    run, replace = RunDirectory.of(load_config(config)), os.replace

    def full(*arguments, **_):
        if file == "loss.png" or Path(arguments[1]).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(*arguments)

    broken = "os.replace" if file == "summary.json" else "jaxfb.training.reporting.report.plot_losses"
    with monkeypatch.context() as patch:
        patch.setattr(broken, full)
        assert main(["train", str(config)]) == 74
    said = capsys.readouterr().err
    assert (
        "cannot be written: No space left on device; saved after update 5 of 5; free some space, then" in said
    )
    assert (
        f"write what is missing with: jaxfb train {run.path} --resume" in said and len(said.splitlines()) == 1
    )
    assert not run.summary.exists() and not list(run.path.glob("*.tmp"))
    before = recorded(run)
    assert main(["train", str(run.path), "--resume"]) == 0
    assert json.loads(run.summary.read_text())["updates"] == 5 and run.picture.exists()
    assert recorded(run) == before and before[0] == [1, 2, 3, 4, 5]
    assert main(["train", str(run.path), "--resume"]) == 0 and "is finished" in capsys.readouterr().out


def test_a_run_ends_well_where_matplotlib_cannot_draw(config, capsys, monkeypatch):
    """The backend of MPLBACKEND is no backend, or a user's matplotlibrc asks for latex, which is not installed."""

    def draw(*_):
        raise ValueError("Key backend: 'nonsense' is not a valid value\nfor backend")

    monkeypatch.setattr("jaxfb.training.reporting.report.plot_losses", draw)
    assert main(["train", str(config)]) == 0
    run = RunDirectory.of(load_config(config))
    assert json.loads(run.summary.read_text())["updates"] == 5 and not run.picture.exists()
    said = capsys.readouterr().out
    assert "matplotlib failed (ValueError: Key backend: 'nonsense' is not a valid value for backend)" in said
