"""What a run's functions fork: it ends by signals, which the run is not told of, and holds no lock."""

import subprocess
import sys

import pytest
from processes import ROOT

START = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
"""
SIGNALS = """
from jaxfb.training.job import interrupt
interrupt.ONE_SIGNAL = 0.0
with interrupt.Interrupt() as run:
    run.begun = True
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if not child:
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(1)
        time.sleep(0.3 * (number == signal.SIGINT))  # until it is where it catches that
        os.kill(child, number)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(0.2)
    print(run.signal, run._seen_by_thread.is_second(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)  # its own handlers and mask are as before
    print(run.signal)
"""
LOCK = """
from pathlib import Path
from jaxfb.training.persistence.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]) / "run")
lock.acquire()
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.write(writer, b"!")
    time.sleep(30)
    os._exit(1)
os.read(reader, 1)
again = RunLock(Path(sys.argv[1]) / "run")
try:
    again.acquire()
except ValueError as error:
    print(error)
os.close(lock._file)  # as SIGKILL does
again.acquire()
print("taken")
os.kill(child, signal.SIGKILL)
"""
BACK = """
from jaxfb.process.forks import end_if_forked
process = os.getpid()
for error in (None, SystemExit(), SystemExit(7), SystemExit("why"), ValueError("what it raised")):
    child = os.fork()
    end_if_forked(process, error)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_ends_by_signals_and_the_run_is_not_told_of_them():
    """A second SIGTERM that `multiprocessing` sent to a child ended the run at once, without saving."""
    assert run(SIGNALS).stdout.split() == ["-15", "-15", "130", "None", "False", "SIGTERM"]


def test_a_child_that_outlives_a_killed_run_does_not_keep_its_directory(tmp_path):
    refused, taken = run(LOCK, str(tmp_path)).stdout.splitlines()
    assert "is in use by process" in refused and taken == "taken"


def test_a_child_ends_by_signals_where_the_lock_was_closed_by_somebody_else():
    """The signals stayed blocked in it, so that `terminate` did not end it."""
    script = """
from jaxfb.process.forks import close_in_children
close_in_children(os.open("/dev/null", os.O_RDONLY))
os.closerange(3, 64)
child = os.fork()
if not child:
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
    assert run(script).stdout.split() == ["set()"]


def test_a_child_that_comes_back_from_a_reward_does_not_continue_the_run():
    done = run(BACK)
    assert done.stdout.split() == ["0", "0", "7", "1", "1"]
    assert "ValueError: what it raised" in done.stderr and "SystemExit" not in done.stderr


@pytest.mark.parametrize("leave, code", [("sys.exit(5)", 5), ("raise KeyboardInterrupt", 1)])
@pytest.mark.parametrize("name", ["reward", "is_correct"])
def test_a_judgement_is_that_of_this_process(name, leave, code):
    """A child that left a reward by `sys.exit` or Ctrl-C went on as the run did, and wrote into its directory."""
    script = f"""
from jaxfb.rl.tasks import Problem, Response, checked_correct, checked_reward
class Forks:
    def {name}(self, problem, response):
        child = os.fork()
        if not child:
            {leave}
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {code}
judged = {dict(reward="checked_reward", is_correct="checked_correct")[name]}
print(judged(Forks(), Problem("a", "b"), Response("b")))
"""
    assert run(script).stdout.split() == [{"reward": "1.0", "is_correct": "True"}[name]]


def test_a_child_that_comes_back_from_a_callback_or_from_reading_rows_ends():
    """It continued the run until it waited, for ever, for threads that it does not have."""
    script = """
from jaxfb.callbacks import callback, combine
from jaxfb.training.updates import Updates
def forks(*_):
    child = os.fork()
    if child:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    elif len(codes) % 2:
        raise ValueError("of the child")
codes = []
for _ in range(2):
    combine([callback(on_eval=forks)]).on_eval(1, {})
    Updates._or_save_first(None, forks)
print(codes)
"""
    assert run(script).stdout == "[0, 1, 0, 1]\n"


def run(script, *arguments):
    command = [sys.executable, "-c", START + script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
