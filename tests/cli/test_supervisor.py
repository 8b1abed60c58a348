"""`jaxfb launch`: which endings are final, which are started again, and what the user reads."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxfb.cli.options import parse
from jaxfb.cli.supervisor import Supervisor, config_of, job_command

# a process that ends with the codes of a file, one a start: "0", "76", "-9" (kills itself), "sleep"; before its run
# has begun where it is "early:76"
CHILD = """
import os, pathlib, signal, sys, time
from jaxfb.process.launcher import tell_begun
directory, index = pathlib.Path(sys.argv[1]), sys.argv[2]
plan = (directory / f"plan{index}").read_text().split()
log = directory / f"log{index}"
start = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    file.write(" ".join(sys.argv[3:]) + os.linesep)
early, _, word = plan[start].rpartition(":")
if not early:
    tell_begun()
if word == "sleep":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    (directory / f"asleep{index}").touch()
    time.sleep(60)
if word == "-9":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(word))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs processes whose exit codes at each start are given; returns (code, sentences, starts of process 0)."""
    monkeypatch.setattr("jaxfb.cli.supervisor.FIRST_WAIT", 0.01)

    def run(*plans, restarts=3, healthy=300.0, ending=300.0):
        for index, plan in enumerate(plans):
            (tmp_path / f"plan{index}").write_text(plan)

        def command(index, processes, coordinator, restarted):
            assert (coordinator is not None) == (processes > 1)
            words = ["--resume"] if restarted else []
            return [sys.executable, "-c", CHILD, str(tmp_path), str(index), *words], {}

        said = []
        how = {"stopping": 0.5, "ending": ending, "report": said.append}
        code = Supervisor(command, len(plans), restarts, healthy, **how).run()
        return code, said, (tmp_path / "log0").read_text().splitlines()

    return run


@pytest.mark.parametrize("code", [0, 2, 74, 75, 78])
def test_final_endings_are_not_started_again(job, code):
    assert job(str(code)) == (code, [], [""])


@pytest.mark.parametrize(
    "lost, words", [("76", "lost (exit code 76)"), ("-9", "killed by SIGKILL"), ("1", "exit code 1")]
)
def test_a_lost_or_crashed_job_goes_on(job, lost, words):
    code, said, starts = job(f"{lost} 0")
    assert code == 0 and starts == ["", "--resume"]
    assert len(said) == 1 and words in said[0] and "restart 1 of 3" in said[0]


def test_it_gives_up_after_so_many_restarts_in_a_row(job):
    code, said, starts = job("76 76 76 76 76", restarts=2)
    assert code == 76 and len(starts) == 3 and said[-1].endswith("3 times in a row; giving up")


def test_a_job_that_crashes_for_a_day_is_still_started_again(monkeypatch):
    """2**1024 is no float: after 17 hours the launcher itself crashed."""
    said = []
    job = Supervisor(lambda *_: ([], {}), restarts=1100, report=said.append)
    monkeypatch.setattr(job, "_run_once", lambda begun: 76)
    monkeypatch.setattr(job, "_sleep", lambda seconds: None)
    assert job.run() == 76
    assert len(said) == 1101 and "in 60 s (restart 1100 of 1100)" in said[-2]


def test_a_signal_without_a_name_is_told_by_its_number(monkeypatch):
    said = []
    code = Supervisor(lambda *_: (["sh", "-c", "kill -40 $$"], {}), restarts=0, report=said.append).run()
    assert code == 168 and "killed by signal 40" in said[0]


def test_a_launcher_whose_output_nobody_reads_starts_the_job_again_all_the_same(tmp_path, monkeypatch):
    """As after `| tee log`, where tee is gone."""
    monkeypatch.setattr("jaxfb.cli.supervisor.FIRST_WAIT", 0.01)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", broken)
        line = ["sh", "-c", f"echo >> {tmp_path}/starts; exit 76"]
        assert Supervisor(lambda *_: (line, {}), restarts=2).run() == 76
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    assert (tmp_path / "starts").read_text() == "\n" * 3


def test_a_config_that_was_changed_between_two_starts_is_named(tmp_path, monkeypatch):
    """Each start reads it, so that an edit for the next run led the job elsewhere without a word."""
    monkeypatch.setattr("jaxfb.cli.supervisor.FIRST_WAIT", 0.01)
    config, said = tmp_path / "own.yaml", []
    config.write_text("run: {}")
    line = [
        "sh",
        "-c",
        f"echo >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) = 2 ] && echo >> {config}; exit 76",
    ]
    assert config_of(["train", "--resume", str(config), "run.dir=a"]) == config
    assert config_of(["train", "quickstart"]) is None
    Supervisor(lambda *_: (line, {}), restarts=3, report=said.append, config=config).run()
    (named,) = [
        number for number, text in enumerate(said) if "own.yaml was changed since the last start" in text
    ]
    assert "restart 2 of 3" in said[named - 1]


def test_a_start_that_ran_long_enough_counts_restarts_from_zero(job):
    code, said, starts = job("76 76 76 76 0", restarts=1, healthy=0.0)
    assert code == 0 and len(starts) == 5


def test_a_job_that_ended_before_its_run_had_begun_is_started_as_at_first(job):
    """With --resume instead of --fresh it continued the run that was to be moved aside, or found it finished."""
    code, said, starts = job("early:-9 early:76 -9 0")
    assert code == 0 and starts == ["", "", "", "--resume"]
    assert ["--resume" in text for text in said] == [False, False, True]


def test_a_run_that_one_process_has_begun_is_continued_whatever_ends_the_next_starts(job):
    assert job("early:76 early:76 0", "76 early:76 0")[2] == ["", "--resume", "--resume"]


def test_one_lost_process_ends_and_restarts_all(job, tmp_path):
    code, said, starts = job("sleep 0", "-9 0")
    assert code == 0 and len(starts) == 2
    assert (tmp_path / "log1").read_text().splitlines() == ["", "--resume"]
    assert "killed by SIGKILL" in said[0]


def test_a_process_that_hangs_at_its_end_is_not_waited_for_without_limit(job):
    """The other had ended with 0, and the launcher waited for ever."""
    code, said, starts = job("0 0", "sleep 0", ending=0.2)
    assert code == 0 and starts == ["", "--resume"]
    assert said[0].startswith(
        "jaxfb: [launch] process 1 of 2 has not ended 0.2 s after another, which was done"
    )
    assert "the job was lost (exit code 76); starting again with --resume" in said[1]


def test_a_refusal_of_one_process_ends_the_job(job):
    code, said, starts = job("76 0", "2 0")
    assert code == 2 and said == [] and len(starts) == 1


def test_a_signal_reaches_the_processes_and_ends_the_job(job, tmp_path):
    def interrupt():
        while not (tmp_path / "asleep0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    assert job("sleep 0", restarts=3)[0] == 75


def test_a_job_that_is_killed_again_and_again_ends_with_the_code_that_a_shell_has(job):
    code, said, _ = job("-9 -9", restarts=1)
    assert code == 128 + signal.SIGKILL and "killed by SIGKILL, 2 times in a row" in said[-1]


def sleeper(index, processes, coordinator, restarted):
    """The command of a process that does not catch signals, as before Python has started."""
    return [
        sys.executable,
        "-S",
        "-c",
        "import signal, time; signal.signal(15, signal.SIG_DFL); time.sleep(60)",
    ], {}


@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_a_signal_while_the_processes_are_being_started_ends_all_of_them(before):
    """The process that was started after the signal ran on, and the code was that of no documented ending."""

    def command(index, *place):
        if index == before:
            os.kill(os.getpid(), signal.SIGTERM)
        return sleeper(index, *place)

    began = time.monotonic()
    assert Supervisor(command, 2, stopping=30.0).run() == 75
    assert time.monotonic() - began < 5


def test_a_process_that_cannot_be_started_leaves_no_other_running(monkeypatch):
    """The others ran on without the launcher; a lack that passes, such as of processes, is worth another try."""
    monkeypatch.setattr("jaxfb.cli.supervisor.FIRST_WAIT", 0.01)
    said, started, popen = [], [], subprocess.Popen

    def second_fails(line, **more):
        if len(started) % 2:
            started.append(None)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen(line, **more))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    assert Supervisor(sleeper, 2, restarts=1, report=said.append).run() == 76
    assert len(started) == 4 and all(child.poll() is not None for child in started[::2])
    assert said[0] == "jaxfb: [launch] process 1 of 2 could not be started: Resource temporarily unavailable"


def signalled(line, *numbers):
    """The code and sentences of a job that is sent signals; its process writes its id to the file $1 before."""
    said, ended = [], threading.Event()
    (reader, writer), own = os.pipe(), os.getpid()

    def send():
        child = int(os.read(reader, 100))
        for number in numbers:
            time.sleep(0.3)
            os.kill(own, number)
        if not ended.wait(30):
            os.kill(child, signal.SIGKILL)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        script = ["sh", "-c", line, "sh", f"/proc/{own}/fd/{writer}"]
        return Supervisor(lambda *_: (script, {}), report=said.append).run(), said
    finally:
        ended.set()
        thread.join()
        os.close(reader), os.close(writer)


def test_a_signal_reaches_a_process_that_is_stopped():
    """The launcher waited for it for ever, after a second signal too."""
    assert signalled("trap 'exit 75' TERM; echo $$ > $1; kill -STOP $$", signal.SIGTERM) == (75, [])


def test_a_process_that_no_signal_ends_is_killed_after_the_second(monkeypatch):
    """The launcher waited for it for ever, as where a library keeps Python from running."""
    for name in ("ONE_SIGNAL", "AFTER_A_SECOND_SIGNAL"):
        monkeypatch.setattr(f"jaxfb.cli.supervisor.{name}", 0.1)
    code, said = signalled("trap '' TERM; echo $$ > $1; exec sleep 60", signal.SIGTERM, signal.SIGTERM)
    late = "process 0 of 1 has not ended 0.1 s after a second SIGTERM; it is killed"
    assert (code, said) == (76, [f"jaxfb: [launch] {late}"])


def test_a_restart_resumes_and_does_not_begin_afresh():
    command = job_command(["train", "config.yaml", "--fresh"], python="python")
    first, environment = command(1, 2, "127.0.0.1:1234", False)
    assert first == ["python", "-m", "jaxfb.cli", "train", "config.yaml", "--fresh"]
    assert environment == {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert command(0, 1, None, True) == (
        ["python", "-m", "jaxfb.cli", "train", "config.yaml", "--resume"],
        {},
    )


@pytest.mark.parametrize(
    "given, continued",
    [("--fre", "--resume"), ("--res", "--res"), ("--smoke", "--smoke"), ("--sm", "--sm")],
)
def test_a_restart_is_accepted_by_the_command_whatever_short_forms_it_was_given(given, continued):
    """`--fre --resume` was refused, and so was `--smoke --resume`, whose run cannot be continued."""
    line, _ = job_command(["train", "quickstart", given])(0, 1, None, True)
    assert line[3:] == ["train", "quickstart", continued]
    parse(line[3:])


LAUNCHER = """
import sys
from jaxfb.cli.options import parse
from jaxfb.cli.supervisor import Supervisor
line = [sys.executable, "-c", *sys.argv[1:]]
Supervisor(lambda index, *_: ([*line, str(index)], {}), 2).run()
"""
FOLLOWER = """
import pathlib, signal, sys, time
from jaxfb.process.launcher import end_with_launcher, tell_begun
place = pathlib.Path(sys.argv[1]) / sys.argv[2]
def end(number, frame):
    place.write_text(signal.Signals(number).name)
    sys.exit()
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, end)
end_with_launcher()
tell_begun()  # which the launcher has not read when it is killed
place.touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    "before, name", [("", "SIGHUP"), ("trap '' HUP; ", "SIGTERM")], ids=["shell", "nohup"]
)
def test_the_processes_of_a_launcher_that_is_killed_end_as_at_a_closed_terminal(tmp_path, before, name):
    """They ran on, watched by nobody, and kept the directory locked for the job that was started instead."""
    command = [
        "sh",
        "-c",
        f'{before}exec "$@"',
        "sh",
        sys.executable,
        "-c",
        LAUNCHER,
        FOLLOWER,
        str(tmp_path),
    ]
    # the tests may run under nohup, of which a shell cannot free what it starts
    heard = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731
    launcher = subprocess.Popen(command, preexec_fn=heard)
    places = [tmp_path / index for index in "01"]
    _until(lambda: all(place.exists() for place in places))
    launcher.kill()
    launcher.wait()
    _until(lambda: all(place.read_text() == name for place in places))


def _until(there, seconds=60):
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)
