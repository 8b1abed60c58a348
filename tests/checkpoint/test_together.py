"""Several processes read the same checkpoint: one that any of them cannot read is passed over by all."""

import errno
import os

import jax
import jax.numpy as jnp
import pytest

from jaxfb.checkpoint import store as checkpoint
from jaxfb.checkpoint import together
from jaxfb.checkpoint.obstacles import Unreadable
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.refusal import Missing, StorageError

STATE = {"w": jnp.arange(6.0)}


@pytest.fixture
def saved(tmp_path):
    with CheckpointStore(tmp_path / "c", keep=3) as store:
        for step in (1, 2, 3):
            store.save(step, STATE, {"step": step})
    return tmp_path / "c"


def other_process(monkeypatch, answers):
    """Lets this process be number 0 of two; answers: value that is gathered -> that of process 1."""
    monkeypatch.setattr(together, "gathered", lambda value: [value, answers(value)])


def test_a_step_that_another_process_cannot_read_is_passed_over_here_too(saved, monkeypatch, caplog):
    reasons = iter(["is damaged: it is cut", None])
    other_process(monkeypatch, lambda value: next(reasons))
    _, host = CheckpointStore(saved).restore(STATE)
    assert host == {"step": 2}
    assert "step 3 is damaged: it is cut (found by process 1)" in caplog.text


def test_the_others_are_told_of_a_step_that_this_process_cannot_read(saved, monkeypatch):
    (saved / "3" / "jaxfb" / "data.json").unlink()
    told = []
    other_process(monkeypatch, told.append)
    _, host = CheckpointStore(saved).restore(STATE)
    assert host == {"step": 2}
    assert told == ["is damaged: jaxfb/data.json is missing", None]


def test_a_step_that_one_process_does_not_see_is_no_candidate(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "gathered", lambda steps: [steps, [1, 2]])
    assert CheckpointStore(saved).restore(STATE)[1] == {"step": 2}


def test_a_given_step_that_only_this_process_does_not_see_is_told_to_the_others(saved, monkeypatch):
    told = []
    other_process(monkeypatch, told.append)
    with pytest.raises(Missing, match="no checkpoint of step 9"):
        CheckpointStore(saved).restore(STATE, step=9)
    assert len(told) == 1 and told[0]


def test_the_others_are_told_that_this_process_may_not_read_a_step(saved, monkeypatch):
    """And none of them goes on to an older one."""
    told = []
    other_process(monkeypatch, told.append)

    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", fail)
    with pytest.raises(Unreadable, match="Too many open files"):
        CheckpointStore(saved).restore(STATE)
    assert len(told) == 1 and "Too many open files" in told[0]["obstacle"]


def test_a_step_that_another_process_may_not_read_is_not_passed_over_here(saved, monkeypatch, caplog):
    other_process(monkeypatch, lambda value: {"obstacle": "Permission denied: x"})
    store = CheckpointStore(saved)
    with pytest.raises(Unreadable, match=r"Permission denied: x \(found by process 1\)"):
        store.restore(STATE)
    assert store.latest() == 3 and not caplog.text


def test_a_process_that_is_lost_while_they_agree_on_a_step_is_no_damage(saved, monkeypatch, caplog):
    """What a compiled function raises when it is called again is a plain ValueError."""

    def broken(_):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")

    monkeypatch.setattr(checkpoint, "gathered", lambda steps: [steps])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(together.multihost_utils, "process_allgather", broken)
    store = CheckpointStore(saved)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        store.restore(STATE)
    assert store.latest() == 3 and not caplog.text


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("Connection closed by peer"), MemoryError()])
@pytest.mark.parametrize("where", ["read", "compared"])
def test_a_lost_process_or_too_little_memory_is_no_damage(saved, monkeypatch, error, where, caplog):
    """Good checkpoints would be passed over, and the run begin at an older one, or be refused."""

    def fail(*_):
        raise error

    if where == "read":
        monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", fail)
    else:
        monkeypatch.setattr(checkpoint, "check_sums", fail)
    store = CheckpointStore(saved)
    with pytest.raises(type(error)):
        store.restore(STATE)
    assert store.latest() == 3 and not caplog.text


def test_what_one_process_reads_waits_for_no_other(saved, monkeypatch):
    """Orbax's own barriers wait, for minutes, for a process that found its part damaged."""
    asked, context = [], checkpoint.context
    monkeypatch.setattr(checkpoint, "context", lambda alone=False: asked.append(alone) or context(alone))
    CheckpointStore(saved).restore(STATE)
    assert asked == [True]
    assert context(alone=True).multiprocessing.active_processes == {jax.process_index()}


def test_an_error_of_another_process_alone_is_one_of_storage(monkeypatch):
    other_process(monkeypatch, lambda value: "is gone")
    with pytest.raises(StorageError, match=r"step 4 is gone \(found by process 1\)"):
        together.read_by_all(lambda: 1, 4, str)
