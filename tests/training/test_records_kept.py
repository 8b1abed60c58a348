"""Every update has one record in metrics.jsonl, also where the file could not be written for a while."""

import errno
import json
import os

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
