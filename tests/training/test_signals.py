"""Signals in every phase: start-up, training, and while a process of the job is stopped."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref

import pytest
from processes import ROOT, finish, logs, start, wait_for
from tiny import write_tiny

import jaxfb
from jaxfb.callbacks import callback
from jaxfb.config import load_config
from jaxfb.training import loop
from jaxfb.training.job import interrupt
from jaxfb.training.job.interrupt import Interrupt, Stopped

FIRST_LINE = """
import os, signal, sys
from jaxfb.cli import commands, training
training._ended = lambda config, options: os.kill(os.getpid(), signal.SIGTERM) or 0
sys.exit(commands.main(["train", sys.argv[1]]))
"""


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_before_there_is_anything_to_save_ends_the_run_there(tmp_path, number, capsys):
    config = load_config(write_tiny(tmp_path))
    before = [signal.getsignal(each) for each in Interrupt.SIGNALS]
    result = jaxfb.train(config, callbacks=[callback(on_train_start=lambda run: send(number))])
    assert (result.status, result.updates) == ("interrupted", 0)
    assert f"{number.name} in start-up: nothing was trained" in capsys.readouterr().out
    assert [signal.getsignal(each) for each in Interrupt.SIGNALS] == before


def test_what_a_signal_interrupts_in_start_up_is_not_freed(tmp_path):
    """The process crashed (SIGSEGV) where that was a program that jax had half built."""
    kept = []

    def make_work(config, hosts):
        half_built = Interrupt()  # any object
        kept.append(weakref.ref(half_built))
        raise Stopped("SIGTERM")

    assert loop.run(make_work, load_config(write_tiny(tmp_path)), loop.Start()).status == "interrupted"
    gc.collect()
    assert kept[0]() is not None


def test_a_signal_before_jax_is_imported_ends_the_command(tmp_path):
    command = [sys.executable, "-c", FIRST_LINE, str(write_tiny(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 75 and "SIGTERM in start-up" in done.stderr, done.stderr


def test_a_second_interrupt_is_a_keyboard_interrupt_and_a_repeated_one_is_not(monkeypatch):
    monkeypatch.setattr(interrupt, "ONE_SIGNAL", 0.05)
    with Interrupt() as caught:
        caught.begun = True
        send(signal.SIGINT), send(signal.SIGINT)
        assert caught.is_due(1) and caught.signal == "SIGINT"
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_of_several_processes_each_names_the_signal_that_it_was_sent(monkeypatch):
    """After Ctrl-C the run told of a SIGTERM, which is how jax's service finds the update to end after."""
    monkeypatch.setattr(
        interrupt.multihost_utils, "reached_preemption_sync_point", lambda update: update == 2
    )
    monkeypatch.setattr(Interrupt, "_announce", lambda self: None)
    for number, name in ((signal.SIGINT, "SIGINT"), (None, "SIGTERM")):
        with Interrupt() as caught:
            caught.begun = caught._several = True
            if number:
                send(number)
                while caught._sent is None:
                    time.sleep(0.01)
            assert not caught.is_due(1)
            assert caught.is_due(2) and caught.signal == name


@pytest.fixture
def hangup_by_default():
    """The tests themselves may run under nohup, which ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_by_default")
def test_a_closed_terminal_saves_however_often_it_signals(monkeypatch):
    monkeypatch.setattr(interrupt, "ONE_SIGNAL", 0.05)
    ended = []
    monkeypatch.setattr(Interrupt, "_end_now", lambda self, number: ended.append(number))
    with Interrupt() as caught:
        caught.begun = True
        send(signal.SIGHUP)
        time.sleep(0.1)
        send(signal.SIGHUP)
        time.sleep(0.1)
        assert caught.is_due(1) and caught.signal == "SIGHUP" and not ended


def test_a_hangup_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as caught:
            caught.begun = True
            send(signal.SIGHUP)
            assert not caught.is_due(1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_stops_a_start_up_in_python():
    with Interrupt(), pytest.raises(Stopped, match="SIGTERM"):
        send(signal.SIGTERM)


@pytest.mark.slow
def test_a_second_signal_ends_a_process_that_computes_for_ever_outside_of_python():
    """The main thread never runs Python's own handler then."""
    script = """
import ctypes, os, signal, threading, time
from jaxfb.training.job import interrupt
interrupt.ONE_SIGNAL = 0.05
def twice():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
with interrupt.Interrupt() as caught:
    caught.begun = True
    threading.Thread(target=twice).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread gets it, so that this is not woken
    ctypes.CDLL(None).poll(None, 0, 60_000)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM and "SIGTERM again: ended at once" in done.stderr, done


def job(tmp_path, *arguments):
    """Two processes that train without end, once a checkpoint is there."""
    write_tiny(tmp_path, mesh={"data": 2}, run={"updates": 100_000}, eval={"every": None, "prompt": ""})
    jobs = start(tmp_path, 2, 1, *arguments)
    wait_for(tmp_path / "run" / "checkpoints" / "4", jobs)
    return jobs


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_other_with_a_sentence(tmp_path, stopped):
    jobs = job(tmp_path, "hosts.lost_after=5")
    jobs[stopped].send_signal(signal.SIGSTOP)
    code = finish([jobs[1 - stopped]])
    jobs[stopped].kill()
    said = logs(tmp_path, 2)[1 - stopped]
    assert code == [76], said
    assert re.search(rf"jaxfb: \[hosts\] process {stopped} of 2 .* for 5 s .*--resume\n$", said), said
    assert "Fatal" not in said and "SIGABRT" not in said


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_signal_ends_a_process_whose_job_is_stuck(tmp_path):
    jobs = job(tmp_path)
    jobs[1].send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    for _ in range(2):
        jobs[0].send_signal(signal.SIGTERM)
        time.sleep(interrupt.ONE_SIGNAL + 0.5)
    code = finish([jobs[0]])
    jobs[1].kill()
    said = logs(tmp_path, 2)[0]
    assert code == [128 + signal.SIGTERM] and "SIGTERM again: ended at once" in said, said
