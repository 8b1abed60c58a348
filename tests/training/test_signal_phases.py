"""SIGTERM, once and twice, while a run reads rows, evaluates, saves, compiles or starts: exit code, message, state."""

import os
import signal
import threading
import time

import pytest
from marks import some_slow
from tiny import write_tiny

from jaxfb.checkpoint import store as checkpoint
from jaxfb.cli.commands import main
from jaxfb.training.job import interrupt
from jaxfb.training.pretraining import Pretraining
from jaxfb.training.session import Run

SHORT = {
    "model": {"num_layers": 1},
    "run": {"updates": 6},
    "lr": {"name": "constant"},
    "eval": {"every": 4, "batches": 1, "prompt": ""},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return {"cache_dir": str(tmp_path_factory.mktemp("data"))}


@pytest.fixture
def path(tmp_path, data):
    return write_tiny(tmp_path, **SHORT, data=data)


def steps(path):
    return checkpoint.CheckpointStore(path.parent / "run" / "checkpoints").steps()


def before(monkeypatch, owner, name, do, when=lambda *args: True):
    """Calls `do` before the first call of owner.name whose arguments `when` accepts."""
    real, left = getattr(owner, name), [do]

    def wrapped(*args):
        if left and when(*args):
            left.pop()()
        return real(*args)

    monkeypatch.setattr(owner, name, wrapped)


PHASES = {  # what is called in the phase, which call of it, and the update that is saved then
    "reading": (Pretraining, "read", lambda work, number: number == 2, 3),
    "evaluation": (Run, "evaluate", lambda run: True, 4),
    "saving": (checkpoint, "reach", lambda point: point == "save.writing", 2),
}


@pytest.mark.parametrize("phase", some_slow(PHASES, fast=("saving",)))
def test_a_signal_saves_after_the_update_in_progress_and_a_second_one_ends_at_once(
    phase, path, monkeypatch, capsys
):
    owner, name, when, saved = PHASES[phase]
    monkeypatch.setattr(interrupt, "ONE_SIGNAL", 0.02)
    left, codes = threading.Event(), []

    def leave(code):  # the process would be gone
        codes.append(code)
        left.set()

    def send_twice():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert not codes
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.wait(20)

    monkeypatch.setattr(interrupt, "leave", leave)
    before(monkeypatch, owner, name, send_twice, when)
    assert main(["train", str(path)]) == 75
    out, err = capsys.readouterr()
    assert codes == [128 + signal.SIGTERM] and "SIGTERM again: ended at once, without saving" in err
    assert f"SIGTERM: saved after update {saved} of 6; continue with: " in out
    assert steps(path)[-1] == saved


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_an_evaluation_after_which_no_save_is_due_saves(path, monkeypatch, capsys):
    before(monkeypatch, Run, "evaluate", terminate)
    assert main(["train", str(path), "checkpoint.every=100"]) == 75
    assert "SIGTERM: saved after update 4 of 6" in capsys.readouterr().out and steps(path) == [4]


@pytest.mark.slow
def test_a_signal_while_the_first_update_is_compiled_ends_the_run_there(path, monkeypatch, capsys):
    before(monkeypatch, Pretraining, "update", terminate)
    assert main(["train", str(path)]) == 75
    assert "SIGTERM in start-up: nothing was trained, so nothing is lost; nothing is saved yet" in (
        capsys.readouterr().out
    )
    assert steps(path) == []


def test_a_start_up_that_is_ended_names_no_checkpoint_that_it_found_damaged(path, monkeypatch, capsys):
    assert main(["train", str(path), "run.stop_at=4"]) == 75
    shown = capsys.readouterr().out.split("continue with: ")[1].split()
    assert shown[-2:] == [
        "--resume",
        "run.stop_at=null",
    ]  # the saved limit is reached, so it would be refused
    files = [file for file in (path.parent / "run").rglob("*") if file.is_file()]
    assert files and not any(file.stat().st_mode & 0o077 for file in files)  # what a run writes is private
    check = checkpoint.check_sums

    def check_sums(sums, loaded, step):
        check({name: "changed" if step == 4 else digits for name, digits in sums.items()}, loaded, step)

    monkeypatch.setattr(checkpoint, "check_sums", check_sums)
    before(monkeypatch, Pretraining, "update", terminate)
    assert main(["train", str(path), "--resume"]) == 75
    said = capsys.readouterr().out
    assert "resuming" in said and "after update 2 of 6" in said
    assert "nothing is lost; update 2 is saved: start the run again with --resume" in said
