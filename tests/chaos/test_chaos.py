"""The trials of `jaxfb chaos`: what they compare, and a few of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from quickly import flags

from jaxfb.chaos import command, runs, trials
from jaxfb.chaos.jobs import RL, TRAIN
from jaxfb.chaos.runs import Ended, Laboratory, differences
from jaxfb.chaos.trials import Outcome, Trial, flip_one_bit
from jaxfb.cli.commands import main
from jaxfb.process.fault_points import POINTS, reach

ROOT = Path(__file__).parents[2]


def ended(directory, sums=None, losses=(3.0, 2.0, 1.0), steps=None, last=3):
    """A run's end: one checkpoint with those checksums, and a record for each loss."""
    record = directory / "checkpoints" / str(last) / "jaxfb" / "data.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"sums": sums or {"w": "00", "b": "11"}}))
    steps = steps or range(1, len(losses) + 1)
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in zip(steps, losses, strict=True)]
    text = "\n".join(map(json.dumps, [*lines, {"step": 3, "eval/loss": 1.0}]))
    (directory / "metrics.jsonl").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("save.nope", "JAXFB_KILL_AT must be one of .*, got 'save.nope'; did you mean 'save.done'"),
        ("save:often", "JAXFB_KILL_AT=save:often must end with a count; use save:1"),
        ("save:0", "must end with a count"),
    ],
)
def test_a_point_that_does_not_exist_is_refused(monkeypatch, wanted, told):
    monkeypatch.setenv("JAXFB_KILL_AT", wanted)
    with pytest.raises(ValueError, match=told):
        reach("start")


def test_equal_ends_have_no_differences(tmp_path):
    assert differences(ended(tmp_path / "a"), ended(tmp_path / "b")) == []


@pytest.mark.parametrize(
    ("change", "found"),
    (
        ({"sums": {"w": "01", "b": "11"}}, ["w of the last checkpoint"]),
        ({"last": 2}, ["the last checkpoint is of update 2, not 3"]),
        ({"losses": (3.0, 2.0, 1.5)}, ["numbers of update 3"]),
        ({"losses": (3.0, 2.0, 2.0, 1.0), "steps": (1, 2, 2, 3)}, ["update 2 is recorded 2 times"]),
        ({"losses": (3.0, 1.0), "steps": (1, 3)}, ["update 2 is not recorded", "numbers of update 2"]),
    ),
)
def test_every_difference_is_named(tmp_path, change, found):
    assert differences(ended(tmp_path / "a"), ended(tmp_path / "b", **change)) == found


def test_one_bit_flips_and_no_other(tmp_path):
    for name, size in (("a", 5), ("b", 3), ("empty", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    places = {flip_one_bit(tmp_path, np.random.default_rng(seed)) for seed in range(20)}
    flipped = b"".join((tmp_path / name).read_bytes() for name in "ab")
    assert 10 < len(places) <= 20 and 0 < sum(byte.bit_count() for byte in flipped) <= 20


def test_kills_cover_every_point_of_every_job():
    names = [trial.name for trial in trials.kills(100)]
    assert len(names) == len(set(names)) == 100 and len(list(trials.kills(1000))) == 1000
    for point in POINTS:
        assert f"kill rl {point}:1" in names
        assert "rollout" in point or f"kill train {point}:1" in names
        assert "rollout" in point or any(name.startswith(f"kill two {point}:1 of ") for name in names)
    assert {name[-1] for name in names if "two" in name} == {"0", "1"}
    assert {f"kill rl {point}:1" for point in ("rollout", "rollout.done")} <= set(names[: len(POINTS)])


def test_a_call_continues_where_another_was_interrupted():
    names = [trial.name for trial in command.chosen(6, 1, True, 1, skip=4)]
    assert names[:3] == [*[trial.name for trial in trials.kills(6)][4:], "flip 0"]
    assert [trial.name for trial in command.chosen(2, 0, False, 1, skip=3)] == []


def test_a_job_has_a_laboratory_of_its_own(tmp_path):
    laboratory = Laboratory(tmp_path, ("run.updates=3",))
    assert laboratory.of(TRAIN) is laboratory and laboratory.of(RL) is laboratory.of(RL)
    assert laboratory.of(RL).path("x") == tmp_path / "rl" / "x"


def test_once_a_process_was_killed_the_others_get_a_while_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "AFTER_A_KILL", 0.2)
    waits = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    dies = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    logs = [tmp_path / "0", tmp_path / "1"]
    assert runs.finished([waits, dies], [os.environ, os.environ], logs, 600.0) == (-9, -9)
    assert runs.finished([dies[:2] + ["pass"]], [os.environ], logs[:1], 600.0) == (0,)


FINISHED = """
import os, signal, sys
from pathlib import Path
from jaxfb.chaos import runs
from jaxfb.process.signals import terminated_like_ctrl_c
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
with terminated_like_ctrl_c():
    runs.finished([[sys.executable, "-c", sys.argv[1], *sys.argv[2:]]], [os.environ], [Path(sys.argv[3])], 600.0)
"""
FOLLOWS = """
import os, signal, sys, time
from jaxfb.process.launcher import end_with_launcher
signal.signal(signal.SIGHUP, signal.SIG_DFL)
end_with_launcher()
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_run_is_left_where_the_command_that_started_it_ends(tmp_path, number):
    """It trained on in a directory that was removed."""
    os.mkfifo(tmp_path / "alive")
    line = [sys.executable, "-c", FINISHED, FOLLOWS, str(tmp_path / "alive"), str(tmp_path / "log")]
    command = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    (tmp_path / "alive").read_text()  # the child has begun
    command.send_signal(number)
    command.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while _lives_with(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives_with(tmp_path)


def _lives_with(argument):
    """Whether a process has the argument in its command line."""
    lines = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdecimal())
    return any(str(argument).encode() in _bytes(line) for line in lines)


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_every_point_is_reached_somewhere_in_the_code():
    code = "".join(
        path.read_text() for path in (ROOT / "jaxfb").rglob("*.py") if path.name != "fault_points.py"
    )
    assert all(f'reach("{point}")' in code for point in POINTS if point != "save.renaming")
    assert "watch_renames(" in code


def test_a_problem_is_printed_and_counted(tmp_path):
    lines = []
    wanted = [
        Trial("good", lambda _: Outcome("good", ())),
        Trial("bad", lambda _: Outcome("bad", ("lost a row",))),
    ]
    outcomes = command.run_trials(wanted, Laboratory(tmp_path), lines.append)
    assert [bool(outcome.problems) for outcome in outcomes] == [False, True]
    assert "ok" in lines[0] and "lost a row" in lines[1]


def test_an_override_that_is_refused_ends_the_command_before_any_trial(monkeypatch, capsys):
    """Each trial had it as a problem, or the command ended with a traceback."""
    refused = Ended((2,), "some\nmore\njaxfb: [config] unknown key nonsense\n")
    monkeypatch.setattr(Laboratory, "run", lambda self, name, **more: refused)
    assert main(["chaos", "nonsense=3"]) == 2
    said = capsys.readouterr()
    assert said.err == "jaxfb: [chaos] the run without a fault is refused: [config] unknown key nonsense\n"
    assert not said.out


@pytest.mark.parametrize(("updates", "given", "code"), [(9, [], 2), (9, ["--no-faults"], 0), (10, [], 0)])
def test_runs_that_end_before_a_fault_are_refused_with_a_length_that_is_enough(
    updates, given, code, monkeypatch, capsys
):
    """A fault that was never reached counted as one that was not noticed."""
    monkeypatch.setattr(Laboratory, "run", lambda self, name, **more: Ended((0,), ""))
    monkeypatch.setattr(command, "last_sums", lambda run: (updates, {}))
    monkeypatch.setattr(command, "run_trials", lambda *_: [])
    assert main(["chaos", "--kills", "1", f"run.updates={updates}", *given]) == code
    said = "the runs have 9 updates, too few for the faults inside a process"
    found = capsys.readouterr().err
    assert (said in found and found.endswith("use run.updates=10 or more, or --no-faults\n")) == (code == 2)


def test_no_fault_is_put_right_by_a_repetition_that_the_overrides_ask_for(tmp_path, monkeypatch):
    """With guard.verify_every=3 the nan of update 6 was computed away, and counted as a nan that nobody notices."""
    asked = {}

    def run(self, name, fault="", more=()):
        asked[fault] = [one.partition("=")[2] for one in more if one.startswith("guard.verify_every=")]
        return Ended((0,), "")

    monkeypatch.setattr(Laboratory, "run", run)
    for trial in (*trials.faults(), *trials.faults_of_copies()):
        trial.run(Laboratory(tmp_path, ("guard.verify_every=3",)))
    twice = {"wrong_once": ["1"], "wrong_again_and_again": ["1"]}
    assert asked == dict.fromkeys(asked, ["null"]) | twice and len(asked) == 5


def test_a_directory_of_the_users_is_not_broken(tmp_path, monkeypatch, capsys):
    """A run that was saved there was continued with nan in its parameters."""
    assert main(["chaos", "run.dir=runs/mine"]) == 2
    assert "[chaos] run.dir=runs/mine: its runs, which it breaks," in capsys.readouterr().err
    lines = []
    monkeypatch.setattr(runs, "finished", lambda commands, *_: lines.extend(commands) or (0,))
    for path in (tmp_path / "other.0.log", tmp_path / "other.1.log"):
        path.touch()
    Laboratory(tmp_path, ("run={dir: runs/mine}",)).run("other")
    places = [text for text in lines[0] if text.startswith("run")]
    assert places[-1] == f"run.dir={tmp_path / 'other'}"


@pytest.mark.slow
@pytest.mark.processes
def test_a_few_trials_of_each_kind(tmp_path, monkeypatch):
    jax.devices()  # of this process and its later tests: they are made once, by the flags of that moment
    monkeypatch.setenv("XLA_FLAGS", flags())
    monkeypatch.setenv("JAX_ENABLE_X64", "1")  # as in this process
    laboratory = Laboratory(tmp_path)
    wanted = [trials.kill("save.renaming", 2), trials.kill("restore.done", 1)]
    wanted += [
        trials.kill("rollout.done", 3, RL)
    ]  # two processes: tests/training/test_hosts_end_to_end.py, and `make soak`
    wanted += [trials.flipped_bit(seed) for seed in range(6)]
    wanted += [trial for trial in trials.faults() if "wrong_once" in trial.name]
    outcomes = command.run_trials(wanted, laboratory)
    assert [outcome.problems for outcome in outcomes] == [()] * len(wanted)
    assert not any("not reached" in outcome.note for outcome in outcomes)
