"""A command whose threads do not end."""

import subprocess
import sys

import pytest
from processes import ROOT

SCRIPT = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jaxfb.process import last_threads
last_threads.PATIENCE = 0.2
if sys.argv[1] == "pool":
    ThreadPoolExecutor(1, "upload").submit(time.sleep, 60)
elif sys.argv[1] == "thread":
    threading.Thread(target=time.sleep, args=[60], name="upload").start()
last_threads.name_last_threads(75, eval(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", ["thread", "pool"])
def test_threads_that_do_not_end_are_named_and_then_left(kind):
    """The process stayed for ever, without a word."""
    done = run(kind, "0.2")
    assert done.returncode == 75
    assert "its process has not ended, since these of its threads have not: 'upload" in done.stderr
    assert done.stderr.endswith("SIGTERM ends it, or it is ended after 0.2 s (hosts.stuck_after)\n")


def test_a_process_without_such_threads_ends_as_usual():
    done = run("none", "0.2")
    assert (done.returncode, done.stderr) == (0, "")


def run(kind, limit):
    command = [sys.executable, "-c", SCRIPT, kind, limit]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
