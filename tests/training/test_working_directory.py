"""A callback, or a function of the task, may leave the working directory, from which a run's relative paths start."""

import os

import pytest
from tiny import write_tiny

import jaxfb
from jaxfb.config import load_config
from jaxfb.metrics import read_jsonl
from jaxfb.trainer import train
from jaxfb.training.persistence.working_directory import WorkingDirectory


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_the_directory_that_was_left_is_returned_to(tmp_path, monkeypatch, is_gone):
    monkeypatch.chdir(tmp_path)
    working, said, elsewhere = WorkingDirectory(), [], tmp_path / "elsewhere"
    for _ in range(2):
        elsewhere.mkdir(exist_ok=True)
        os.chdir(elsewhere)
        if is_gone:
            elsewhere.rmdir()
        working.keep(said.append)
        assert os.getcwd() == str(tmp_path)
    (line,) = said
    assert f"changed back to {tmp_path}" in line and ("gone" if is_gone else str(elsewhere)) in line


def test_a_run_whose_callback_leaves_the_working_directory_is_saved_and_recorded_where_it_was(
    tmp_path, monkeypatch, capsys
):
    """Its directory counted as removed, and every update since the last checkpoint was lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = write_tiny(tmp_path, run={"updates": 4, "dir": "run"}, log={"every": 1}, eval={"prompt": ""})
    leave = jaxfb.callback(on_step_end=lambda step, metrics: os.chdir(tmp_path / "elsewhere"))
    result = train(load_config(path), callbacks=[leave])
    assert result.status == "finished" and os.getcwd() == str(tmp_path)
    assert (tmp_path / "run/checkpoints/4").is_dir() and (tmp_path / "run/summary.json").is_file()
    assert [one["step"] for one in read_jsonl(tmp_path / "run/metrics.jsonl") if "loss" in one] == [
        1,
        2,
        3,
        4,
    ]
    assert not any((tmp_path / "elsewhere").iterdir())
    assert capsys.readouterr().out.count("the working directory was changed") == 1
