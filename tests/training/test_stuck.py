"""A process in which nothing moves ends by itself, with its stack and the place it was in."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from processes import ROOT

import jaxfb
from jaxfb.process.position import here
from jaxfb.training.job.signs import WORDS

SCRIPT = """
import ctypes, sys, time
from jaxfb.config.operation import HostsConfig
from jaxfb.process.position import here
from jaxfb.training.job import watch
from jaxfb.training.job.hosts import Hosts
watch.NATIVE_MARGIN, watch.GRACE = 0.5, 0.2

def hangs():
    here.enter("saving", 7)
    for _ in range(2 * moves):
        here.tick()
        time.sleep(0.5)
    wait()

moves, wait = int(sys.argv[1]), eval(sys.argv[2])
with Hosts(HostsConfig(stuck_after=2.0)) as hosts:
    hosts.advise(lambda: "update 6 is saved: start the run again with --resume")
    hangs()
"""


def run(moves, wait):
    command = [sys.executable, "-c", SCRIPT, str(moves), wait]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_one_process_that_hangs_ends_with_its_stack_and_a_sentence():
    done = run(4, "lambda: time.sleep(100)")  # for twice the limit it does move
    assert done.returncode == 76, done.stderr
    assert 'File "<string>"' in done.stderr and "in hangs" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("jaxfb: [hosts] nothing has moved for 2 s: process 0 of 1 (")
    assert "saving the state of update 7" in last and last.endswith(
        "update 6 is saved: start the run again with --resume"
    )


@pytest.mark.slow
def test_one_process_whose_python_does_not_run_at_all_ends_too():
    done = run(1, "lambda: ctypes.PyDLL(None).sleep(100)")  # keeps Python's lock
    assert done.returncode == 1 and "Timeout" in done.stderr and "in hangs" in done.stderr, done.stderr


SUSPENDED = """
import time
from jaxfb.config.operation import HostsConfig
from jaxfb.process.position import Position
from jaxfb.training.job.watch import Watch

class Store:
    values = {}

    def key_value_set(self, key, text, allow_overwrite=False):
        time.sleep(0.3)  # over a network
        self.values[key] = text

    def key_value_dir_get(self, prefix):
        return [(key, text) for key, text in self.values.items() if key.startswith(prefix)]

names = ["process 0 of 2", "process 1 of 2"]
watches = [Watch(Store(), "job", k, names, HostsConfig(lost_after=3.0), Position()) for k in (0, 1)]
for watch in watches:
    watch.start()
time.sleep(1)
print("ready", flush=True)
input()
print([watch.cause(2) for watch in watches], flush=True)
"""


def test_a_job_that_is_stopped_for_a_little_longer_than_its_limit_goes_on():
    """Below limits of 5 s such a stop was too short to be noticed, and long enough for all to count as lost."""
    command = [sys.executable, "-c", SUSPENDED]
    job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    job.send_signal(signal.SIGCONT)
    assert job.communicate("\n", timeout=60)[0] == "[None, None]\n"


LEFT_WAITING = """
import sys, threading, time
from types import SimpleNamespace
from jaxfb.training.job import watch
from jaxfb.training.job.hosts import Hosts
watch.LAST_THREADS = 0.5
hosts = Hosts.__new__(Hosts)
hosts.count = 2
hosts._fail(SimpleNamespace(fail=lambda *_: None), OSError("full"))
threading.Thread(target=time.sleep, args=[100]).start()
print("the main thread ends")
"""


def test_a_process_of_several_that_failed_does_not_wait_for_the_threads_of_a_save():
    """In a program, those of the storage library waited for the other processes for up to a week."""
    command = [sys.executable, "-c", LEFT_WAITING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "the main thread ends\n"), done.stderr


ENDED = """
import sys
from types import SimpleNamespace
import jax
from jaxfb.config.operation import HostsConfig
from jaxfb.training.job import watch
from jaxfb.training.job.hosts import Hosts

hosts = Hosts.__new__(Hosts)
hosts.index, hosts.count, hosts.config, hosts._advice = 0, 2, HostsConfig(), watch.start_again
other = SimpleNamespace(fail=lambda *_: None, cause=lambda _: "process 1 of 2 is lost", kind=watch.FAILED)
error = eval(sys.argv[1])
try:
    raise error
except BaseException:
    hosts._fail(other, error)
    raise
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("jax.errors.JaxRuntimeError('UNKNOWN: Gloo AllGather failed: Connection closed by peer')", 76),
        ("SystemExit(3)", 3),
        ("SystemExit()", 0),
        ("SystemExit('a sentence')", 1),
        ("KeyError('layer')", 1),
    ],
)
def test_a_program_of_several_processes_ends_with_the_exit_code_of_what_has_ended_it(error, code):
    """It was 1 for all of them, also where another process was lost."""
    command = [sys.executable, "-c", ENDED, error]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("LostProcess: process 1 of 2 is lost; start the run again" in done.stderr) == (code == 76)


NOBODY_READS = """
import os, sys, threading, time
from jaxfb.config.operation import HostsConfig
from jaxfb.process.position import here
from jaxfb.training.job import interrupt, watch
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.interrupt import Interrupt
watch.GRACE, watch.BRIEFLY, watch.MOMENT, interrupt.ONE_SIGNAL = 0.2, 0.2, 0.2, 0.05

def fill():
    here.enter("logging", 7)
    print("ready", flush=True)
    while True:
        print("a line", file=sys.stderr, flush=True)  # short ones, so that there is no place for other short ones

with Interrupt() as caught, Hosts(HostsConfig(stuck_after=float(sys.argv[1]))):
    caught.begun = True
    fill()
"""


def with_a_full_pipe(stuck_after):
    """A process that waits for somebody to read its standard error."""
    command = [sys.executable, "-c", NOBODY_READS, str(stuck_after)]
    pipes = {name: subprocess.PIPE for name in ("stdout", "stderr")}
    job = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert job.stdout.readline() == "ready\n"
    return job


def ended(job):
    """Its exit code."""
    try:
        return job.wait(timeout=60)
    finally:
        job.kill()
        job.stdout.close(), job.stderr.close()


def test_a_process_whose_output_nobody_reads_ends_when_it_is_stuck():
    """The watch waited for the same reader, with Python's lock: not even a signal ended the process then."""
    assert ended(with_a_full_pipe(1.0)) == 76


def test_a_second_signal_ends_a_process_whose_output_nobody_reads():
    job = with_a_full_pipe(1000.0)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    assert ended(job) == 128 + signal.SIGTERM


def test_the_place_in_hooks_and_in_the_end_of_writers_is_known(tmp_path, monkeypatch):
    """They were "between two phases" for the watch, which names the place."""
    seen = {}

    def note(name):
        return lambda *_: seen.update({name: here.phase})

    writer = SimpleNamespace(write=note("write"), close=note("close"))
    monkeypatch.setitem(sys.modules, "noting", SimpleNamespace(make=lambda *_: writer))
    hooks = {name: note(name) for name in ("on_train_start", "on_eval", "on_save", "on_train_end")}
    jaxfb.Trainer(
        model=lambda params, rows, rng: jaxfb.Sum((rows["x"] * params["w"]).sum(), rows["x"].size),
        params={"w": np.ones(3, np.float32)},
        data={"x": np.ones((4, 3), np.float32)},
        optimizer=optax.sgd(0.1),
        evaluate=lambda params: {"loss": 1.0},
        callbacks=[jaxfb.callback(**hooks)],
        dir=tmp_path,
        rows=4,
        rows_per_microbatch=4,
        updates=2,
        mesh={"data": 1},
        log={"writers": ["noting:make"]},
    ).train()
    places = {name: WORDS[place] for name, place in seen.items()}
    assert places.pop("close") == "closing the writers of log.writers"
    assert set(places) == {*hooks, "write"} and all("callbacks" in place for place in places.values())
