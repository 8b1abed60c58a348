"""A process whose part of a checkpoint cannot be written does not wait for the others, who wait for it."""

import errno
import logging
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint._src.futures import future, synchronization

import jaxfb
from jaxfb.checkpoint import abandoned
from jaxfb.checkpoint import store as checkpoint
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore
from jaxfb.checkpoint.write_errors import IN_BACKGROUND, WriteErrors, quiet_late_answers, wait_for

STATE = {"w": jax.random.normal(jax.random.key(0), (256, 256))}


class Endless:
    """A save of which other processes have not come to the end."""

    def __init__(self):
        self.ended = threading.Event()

    def result(self):
        self.ended.wait(60)  # then whoever waited for it has no error


@pytest.mark.filterwarnings("ignore")
def test_of_several_processes_one_that_cannot_write_ends_at_once(tmp_path, monkeypatch):
    """Orbax logs the error when it occurs, and raises it once all processes have come to the end of the save."""
    store = CheckpointStore(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # as a full disk would
    try:
        store.save(2, STATE, {})
        with pytest.raises(Exception, match="File too large"):
            wait_for(Endless().result, lambda: checkpoint.write_errors.of(store.directory))
        store._pending, whole = Endless(), store._pending
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(
            CannotWrite, match="(?i)step 2 could not be .*: file too large; complete steps: none$"
        ):
            store.wait()
        monkeypatch.undo()
        with pytest.raises(Exception, match="File too large"):
            whole.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    store.save(3, STATE, {})  # an error of before is not taken for one of this save
    assert checkpoint.write_errors.of(store.directory) is None
    store.close()
    assert store.steps() == [3]


def test_what_a_save_returns_or_raises_is_passed_on():
    wait_for(lambda: None, lambda: None)
    with pytest.raises(KeyError):
        wait_for(lambda: {}["x"], lambda: None)


def test_errors_are_those_of_the_directory_and_other_records_pass(tmp_path):
    errors = WriteErrors()

    def record(level, path, text, error=None):
        return logging.LogRecord("absl", level, path, 1, text, (), error and (OSError, error, None))

    told = f"operations in {IN_BACKGROUND}, directory: {tmp_path}/4.tmp"
    assert not errors.filter(record(logging.ERROR, "/orbax/x.py", told, OSError("full")))
    assert not errors.filter(record(logging.ERROR, "/orbax/x.py", "another", OSError("other")))
    assert errors.filter(record(logging.ERROR, "/grain/x.py", told, OSError("other")))
    assert errors.filter(record(logging.WARNING, "/orbax/x.py", told))
    assert not errors.filter(record(logging.WARNING, "/orbax/x.py", "Reached preemption sync point, step=3"))
    assert str(errors.of(tmp_path)) == "full" and errors.of(tmp_path / "elsewhere") is None
    errors.forget(tmp_path)
    assert errors.of(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("excepthook", lambda error: (RuntimeError, error, None)),
        ("unraisablehook", lambda error: (SimpleNamespace(exc_value=error),)),
    ],
)
def test_late_answers_of_the_storage_library_are_not_printed(monkeypatch, name, told):
    """Each array of a save that a full disk had ended printed a traceback, below the sentence of the run."""
    said = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, name, lambda *told: said.append(told))
    quiet_late_answers()
    quiet_late_answers()
    late, other = told(RuntimeError("Event loop is closed")), told(RuntimeError("another"))

    def hook():
        for one in (late, other):
            getattr(sys, name)(*one)

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    assert said == [other]
    hook()  # of the main thread it would be an error of the program
    assert said == [other, late, other]


class Refusing:
    """A save that has failed, and a writer that repeats its error when it is closed."""

    def result(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    close = result


def test_the_threads_of_a_failed_save_end(tmp_path, monkeypatch):
    """They waited for the signals of threads that had failed, for up to a week, and so did the end of the program."""
    written, stopped, threads = [], [], []

    def waiting(of_part=""):
        """A thread as Orbax starts it, of its latest operation or a part of that; it waits for a directory."""
        created = synchronization.HandlerAwaitableSignal.STEP_DIRECTORY_CREATION
        operation = synchronization.OperationIdGenerator.get_current_operation_id() + of_part
        threads.append(
            future._SignalingThread(
                target=lambda: written.append(operation),
                send_signals=[],
                receive_signals=[created],
                timeout_secs=60,
                operation_id=operation,
            )
        )
        threads[-1].loop = SimpleNamespace(call_soon_threadsafe=stopped.append)  # as once it writes
        threads[-1].main_task = SimpleNamespace(cancel=None)
        threads[-1].start()

    def begun(*_):
        synchronization.OperationIdGenerator.next_operation_id()
        waiting()
        waiting(of_part=".state")
        return Refusing()

    waiting()  # for a save of before, that of another store
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(checkpoint, "_begun_save", begun)
    store.save(2, STATE, {})
    synchronization.OperationIdGenerator.next_operation_id()
    waiting()  # for a save that began later
    with pytest.raises(CannotWrite, match="Too many open files"):
        store.wait()
    before, *of_the_save, after = threads
    for thread in of_the_save:
        threading.Thread.join(thread, 30)
    assert [thread.is_alive() for thread in threads] == [True, False, False, True] and not written
    assert not stopped  # TensorStore may wait for itself where a write is stopped
    for thread in (before, after):
        future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
        thread.join()
    assert written == [before._operation_id, after._operation_id]


@pytest.mark.filterwarnings("ignore")
def test_a_save_right_after_one_that_failed_is_written(tmp_path, monkeypatch):
    """What ended the threads of the one that failed ended those of the next as well, and its step was missing."""
    monkeypatch.setattr(abandoned, "LOOK", 0)

    def fails(leaves):
        raise jax.errors.JaxRuntimeError("a device is lost")

    with CheckpointStore(tmp_path, keep=9) as store:
        for step in (1, 2, 3):
            with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError):
                patch.setattr(checkpoint, "checksums", fails)
                store.save(step, STATE, {})
            store.save(step, STATE, {})
    assert store.steps() == [1, 2, 3]


@pytest.mark.filterwarnings("ignore")
def test_a_save_waits_for_what_a_failed_one_of_that_step_is_still_writing(tmp_path, monkeypatch):
    """The failed one made its directories again after they were removed, and the next found them in the way."""
    begun = threading.Event()

    def slowly(path, *arguments, made=os.makedirs, **named):
        if Path(path).name == "array_metadatas":  # of the failed save, in the directory of the step
            begun.set()
            time.sleep(0.2)
        elif begun.is_set():  # of the next save, later
            time.sleep(0.4)
        made(path, *arguments, **named)

    def fails(leaves):
        begun.wait(60)
        raise jax.errors.JaxRuntimeError("a device is lost")

    monkeypatch.setattr(os, "makedirs", slowly)
    with CheckpointStore(tmp_path) as store:
        with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError):
            patch.setattr(checkpoint, "checksums", fails)
            store.save(1, STATE, {})
        store.save(1, STATE, {})
    assert store.steps() == [1]


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests if it were raised again."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [Interrupted, MemoryError, ValueError])
def test_what_interrupts_the_beginning_of_a_save_is_not_raised_by_the_next(tmp_path, monkeypatch, error):
    """Orbax raised the error, Ctrl-C as well, again at the next save, whose step was then missing."""

    def fails(leaves):
        raise error

    with CheckpointStore(tmp_path) as store:
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(checkpoint, "checksums", fails)
            store.save(1, STATE, {})
        store.save(1, STATE, {})
    assert store.steps() == [1]


class Cancelled:
    """A save that ended without an error and without a checkpoint, as one whose thread was cancelled."""

    def result(self):
        pass


def test_a_save_that_ended_without_a_checkpoint_is_reported(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(checkpoint, "_begun_save", lambda *_: Cancelled())
    store.save(2, STATE, {})
    with pytest.raises(CannotWrite, match="step 2 could not be written .* cancelled; complete steps: none$"):
        store.wait()


@pytest.mark.parametrize("ends_with_an_error", [True, False])
def test_a_directory_that_was_removed_during_a_save_is_named_as_the_cause(
    ends_with_an_error, tmp_path, monkeypatch
):
    class Removes(Cancelled):
        def result(self):
            shutil.rmtree(tmp_path / "checkpoints")
            if ends_with_an_error:
                os.listdir(tmp_path / "checkpoints")

    store = CheckpointStore(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    monkeypatch.setattr(checkpoint, "_begun_save", lambda *_: Removes())
    store.save(2, STATE, {})
    with pytest.raises(CannotWrite, match="checkpoints: the directory is not there any more, as .* removed"):
        store.wait()


def test_a_record_for_which_no_thread_waits_hides_no_error():
    class Writer:
        """Its save has failed before the checksums are there, and with it the wait for the record."""

        def save_checkpointables_async(self, step, values, metrics):
            values[checkpoint.RECORD].cancel()
            return Cancelled()

    assert isinstance(checkpoint._begun_save(Writer(), 2, STATE, {}, None), Cancelled)


def test_the_error_of_the_last_save_is_not_hidden_by_that_of_closing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(checkpoint, "_begun_save", lambda *_: Refusing())
    store.save(2, STATE, {})
    store._writer.close()
    store._writer = Refusing()
    with pytest.raises(CannotWrite, match="step 2 could not be written .*: Too many open files"):
        store.close()


def test_what_has_ended_a_run_is_not_replaced_by_a_save_that_failed(tmp_path, monkeypatch, caplog):
    """An error of a hook, or Ctrl-C, ended a command with the exit code of the full disk and not a word of it."""

    class Hook(jaxfb.Callback):
        def on_save(self, step, directory):
            raise KeyError("of the hook")

    monkeypatch.setattr(checkpoint, "_begun_save", lambda *_: Refusing())
    trainer = jaxfb.Trainer(
        model=lambda params, microbatch, rng: jaxfb.Sum(
            (microbatch["x"] @ params["w"]).sum(), len(microbatch["x"])
        ),
        params={"w": np.ones(3, np.float32)},
        data={"x": np.ones((4, 3), np.float32)},
        optimizer=optax.sgd(0.1),
        dir=tmp_path / "run",
        rows=1,
        rows_per_microbatch=1,
        updates=2,
        mesh={"data": 1},
        callbacks=[Hook()],
    )
    with pytest.raises(KeyError, match="of the hook"):
        trainer.train()
    assert "step 2 could not be written" in caplog.text
