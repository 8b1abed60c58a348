"""A process in which nothing moves ends by itself, with its stack and the place it was in."""

import subprocess
import sys

import pytest
from processes import ROOT

SCRIPT = """
import ctypes, sys, time
from jaxfb.config.operation import HostsConfig
from jaxfb.process.position import here
from jaxfb.training import watch
from jaxfb.training.hosts import Hosts
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
