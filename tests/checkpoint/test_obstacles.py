"""A checkpoint that a process may not read, or cannot since too many files are open, is not taken for a damaged one."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxfb
from jaxfb.checkpoint import obstacles, saved_steps
from jaxfb.checkpoint import store as checkpoint
from jaxfb.checkpoint.manifest import Mismatch, sealed
from jaxfb.checkpoint.obstacles import Unreadable
from jaxfb.checkpoint.saved_steps import FORMAT
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore

STATE = {f"w{number}": jax.random.normal(jax.random.key(number), (64, 64)) for number in range(20)}


@pytest.fixture
def saved(tmp_path):
    with CheckpointStore(tmp_path / "c", keep=5) as store:
        for step in (1, 2, 3):
            store.save(step, STATE, {"step": step})
    return tmp_path / "c"


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_too_many_open_files_are_no_damage(saved, caplog):
    store, limit = CheckpointStore(saved), resource.getrlimit(resource.RLIMIT_NOFILE)
    store.restore(STATE)  # which opens what stays open
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(limit[0]) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], limit[1]))  # what earlier tests closed leaves gaps
    try:
        with pytest.raises(Unreadable, match=f"step 3 of {saved} cannot be read.*Too many open files"):
            store.restore(STATE)
        assert store.latest() == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert "skipping" not in caplog.text
    assert store.restore(STATE)[1] == {"step": 3}


def test_a_save_that_may_open_no_file_is_named_though_nothing_else_can_be_read(saved, monkeypatch):
    def too_many(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with CheckpointStore(saved, keep=5) as store:
        monkeypatch.setattr(checkpoint, "_begun_save", too_many)
        monkeypatch.setattr(saved_steps, "steps_in", too_many)
        with pytest.raises(
            CannotWrite, match="step 4 could not .*: Too many open files; complete steps: not known"
        ):
            store._writer = checkpoint.ocp.training.Checkpointer(saved)
            store.save(4, STATE, {})
        monkeypatch.undo()
        assert store.steps() == [1, 2, 3]


def test_nor_are_those_that_the_storage_library_could_not_open(saved, monkeypatch):
    """It raises a ValueError of its own, here with a cause as Orbax passes it on."""

    def fail(*_):
        try:
            raise ValueError("RESOURCE_EXHAUSTED: Error reading: Failed to open: x [os_error_code='24']")
        except ValueError as error:
            raise KeyError("incompatible handler") from error

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", fail)
    with pytest.raises(Unreadable, match="step 3 .*Too many open files"):
        CheckpointStore(saved).restore(STATE)


def test_a_record_that_may_not_be_read_is_not_set_aside(saved, monkeypatch):
    """Nor is its step skipped over by what looks for the newest one, or lists the steps."""
    store, read_text = CheckpointStore(saved, keep=5), type(CheckpointStore(saved).directory).read_text

    def denied(path, *more):
        if path.parent.parent.name == "3":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_text(path, *more)

    monkeypatch.setattr(type(store.directory), "read_text", denied)
    assert store.latest() == 3 and store.steps() == [1, 2, 3]
    for read in (store.host, lambda: store.restore(STATE), lambda: store.host(3)):
        with pytest.raises(Unreadable, match=r"Permission denied: .*3/jaxfb/data.json"):
            read()
    store.save(4, STATE, {})
    store.close()
    assert names(saved) == ["1", "2", "3", "4"]


def test_a_step_of_a_newer_format_is_refused_and_stays_where_it_is(saved):
    """It was passed over as damaged, and set aside, by an older jaxfb that continued the run of a newer one."""
    path = saved / "3" / "jaxfb" / "data.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "format": FORMAT + 1})))
    store = CheckpointStore(saved, keep=5)
    assert store.latest() == 3
    for read in (store.host, lambda: store.restore(STATE)):
        with pytest.raises(
            Mismatch, match=f"step 3 .* has format {FORMAT + 1}, which a newer jaxfb has written"
        ):
            read()
    store.save(4, STATE, {})
    store.close()
    assert names(saved) == ["1", "2", "3", "4"]


def test_another_number_in_a_record_is_damage(saved):
    path = saved / "3" / "jaxfb" / "data.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 6'))
    assert CheckpointStore(saved).restore(STATE)[1] == {"step": 2}


DENIED = """
import os, sys
from pathlib import Path
from jaxfb.checkpoint.obstacles import unreadable
print(unreadable(Path(sys.argv[1]), ValueError("a library's words")))
"""


@pytest.mark.parametrize("path", [".", "state", "state/d", "jaxfb/data.json"])
def test_what_may_not_be_read_is_found_whatever_a_library_tells(tmp_path, path):
    """Orbax takes what it may not look into for missing. Permissions do not hold for root, unless it gives that up."""
    step = tmp_path / "3"
    for name in ("state/d/x", "jaxfb/data.json"):
        (step / name).parent.mkdir(parents=True)
        (step / name).touch()
    command = [sys.executable, "-c", DENIED, str(step)]
    if os.geteuid() == 0:
        rights = "--{}=-dac_override,-dac_read_search"
        command = ["setpriv", *map(rights.format, ("bounding-set", "inh-caps")), *command]
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxfb.__file__).parent.parent)}
    (step / path).chmod(0)
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no setpriv")
    finally:
        (step / path).chmod(0o700)
    assert f"Permission denied: {step / path}" in ended.stdout, ended.stderr


def test_damage_is_no_obstacle(tmp_path):
    """Neither a file that is missing, nor a disk that fails while it is read."""
    (tmp_path / "3").mkdir()
    for error in (
        OSError(errno.EIO, "Input/output error"),
        FileNotFoundError(errno.ENOENT, "x"),
        ValueError("x"),
    ):
        assert obstacles.unreadable(tmp_path / "3", error) is None
    assert obstacles.unreadable(tmp_path / "3", OSError(errno.ESTALE, "Stale file handle"))
