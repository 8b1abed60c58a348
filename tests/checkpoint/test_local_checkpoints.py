"""Checkpoints on the hosts' own disks: taken, written, found again after a kill, got from a neighbour after a loss."""

import errno
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from processes import finish, free_port, launch, logs
from tiny import write_tiny

import jaxfb
from jaxfb.checkpoint.manifest import named_leaves
from jaxfb.checkpoint.obstacles import Unreadable
from jaxfb.checkpoint.store import CannotWrite
from jaxfb.config.operation import LocalConfig
from jaxfb.metrics import read_jsonl
from jaxfb.parallel.totals import checksums
from jaxfb.training.persistence.local_tier import LocalTier, Name, chosen, shift
from jaxfb.training.persistence.snapshot import put_back, read, taken, write

EVERY = 3


def state_on(mesh, seed=0):
    """Leaves of several dtypes, cut and whole, with a random key."""
    rng, whole = np.random.default_rng(seed), NamedSharding(mesh, P())
    leaves = {
        "cut": (rng.normal(size=(8, 8)).astype(np.float32), NamedSharding(mesh, P("fsdp", "data"))),
        "half": (rng.normal(size=(4, 2)).astype(jnp.bfloat16), NamedSharding(mesh, P("data"))),
        "count": (np.int32(7 + seed), whole),
    }
    state = {name: jax.device_put(value, place) for name, (value, place) in leaves.items()}
    return {**state, "rng": jax.device_put(jax.random.key(seed), whole)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def mesh():
    return jaxfb.make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])


def sums(state):
    return checksums(named_leaves(state))


def test_what_is_put_back_is_the_same_bits_in_the_same_places(mesh, tmp_path):
    state = state_on(mesh)
    write(tmp_path / "file", taken(state, {"update": 3}))
    found, host = put_back(read(tmp_path / "file"), abstract(state))
    assert host == {"update": 3} and sums(found) == sums(state)
    for name in ("cut", "half", "count"):
        assert found[name].sharding == state[name].sharding and found[name].dtype == state[name].dtype
    assert jax.random.key_impl(found["rng"]) == jax.random.key_impl(state["rng"])


def test_arrays_in_the_memory_of_the_host_are_put_back_there(mesh, tmp_path):
    """A resume with optimizer.memory=host ended in a traceback, at each start again."""
    state = state_on(mesh)
    there = state["cut"].sharding.with_memory_kind("pinned_host")
    state["cut"] = jax.device_put(state["cut"], there)
    found, _ = put_back(taken(state, {}), abstract(state))
    assert found["cut"].sharding == there and found["count"].sharding == state["count"].sharding
    np.testing.assert_array_equal(found["cut"], state["cut"])


def test_every_flipped_bit_and_every_cut_is_noticed(mesh, tmp_path):
    path = tmp_path / "file"
    write(path, taken(state_on(mesh), {}))
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for at in [0, 7, 8, len(whole) - 1, *rng.integers(len(whole), size=60)]:
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(OSError, match="differs from what was written"):
            read(path)
    for size in (0, 5, 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(OSError, match="differs from what was written"):
            read(path)


def test_the_newest_sound_one_since_the_same_checkpoint_is_restored(mesh, tmp_path, caplog):
    tier = LocalTier(LocalConfig(1, str(tmp_path), keep=3), "run")
    for update in (1, 2, 3, 4):
        tier.save(update, 0, state_on(mesh, update), {"update": update})
    tier.wait()
    own = tmp_path / "run" / "process-0"
    assert sorted(path.name.partition("_")[0] for path in own.iterdir()) == ["2", "3", "4"]
    assert own.stat().st_mode & 0o777 == 0o700
    wanted = abstract(state_on(mesh))
    assert tier.restore(None, wanted) is None and tier.restore(5, wanted) is None
    update, state, host = tier.restore(0, wanted)
    assert (update, host) == (4, {"update": 4}) and sums(state) == sums(state_on(mesh, 4))
    (newest,) = (tmp_path / "run" / "process-0").glob("4_*")
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        assert tier.restore(0, wanted)[0] == 3
    assert "skipping a local checkpoint" in caplog.text
    other = jaxfb.make_mesh(data=4, devices=jax.devices()[:4])
    assert tier.restore(0, abstract(state_on(other))) is None
    tier.remove()
    assert not (tmp_path / "run").exists()


def test_the_latest_are_kept_where_the_clock_was_set_back(mesh, tmp_path):
    """The times of files would make those of before the newest, and what was just written would be removed."""
    tier = LocalTier(LocalConfig(1, str(tmp_path), keep=2), "run")
    own = tmp_path / "run" / "process-0"
    for update in (1, 2, 3, 4):
        tier.save(update, None, state_on(mesh, update), {})
        tier.wait()
        for path in own.glob(f"{update}_*"):
            os.utime(path, (2_000_000_000 - update, 2_000_000_000 - update))
    assert sorted(path.name.partition("_")[0] for path in own.iterdir()) == ["3", "4"]


def test_two_processes_of_a_host_may_remove_theirs_at_the_same_time(mesh, tmp_path, monkeypatch):
    tier = LocalTier(LocalConfig(1, str(tmp_path)), "run")
    tier.save(1, None, state_on(mesh), {})
    remove = os.rmdir

    def both(path, **more):
        remove(path, **more)
        if str(path) == str(tmp_path / "run"):
            remove(path)  # FileNotFoundError, as for the one that comes second

    monkeypatch.setattr(os, "rmdir", both)
    tier.remove()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_reported_and_the_run_goes_on(mesh, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tier = LocalTier(LocalConfig(1, str(tmp_path / "file")), "run")
    with caplog.at_level(logging.WARNING):
        tier.save(1, None, state_on(mesh), {})
        tier.wait()
    assert "no local checkpoint was written" in caplog.text


def test_a_disk_that_stays_full_is_reported_once_and_so_is_its_end(mesh, tmp_path, caplog):
    """It was a line for every local checkpoint, of which a long run has thousands."""
    place = tmp_path / "disk"
    place.write_text("")
    tier = LocalTier(LocalConfig(1, str(place)), "run")
    with caplog.at_level(logging.WARNING):
        for update in range(1, 6):
            if update == 4:
                place.unlink()
            tier.save(update, None, state_on(mesh), {})
            tier.wait()
    failed, again = [record.getMessage() for record in caplog.records]
    assert failed.endswith("Not a directory; later failures are not reported")
    assert again == f"[checkpoint] local checkpoints are written to {place}/run/process-0 again"


def test_nothing_is_left_of_a_file_that_the_disk_could_not_take_whole(mesh, tmp_path, monkeypatch):
    """What a failed save or a killed process left would fill the disk, or the memory of /dev/shm."""
    tier, real = LocalTier(LocalConfig(every=1, dir=str(tmp_path), keep=2), "run"), os.fsync

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    tier.save(1, None, state_on(mesh), {})
    tier.wait()
    assert not list(tmp_path.rglob("*_*"))
    monkeypatch.setattr(os, "fsync", real)
    (tmp_path / "run" / "process-0" / "7_-1_abc.tmp").write_bytes(b"of a killed process")
    tier.save(2, None, state_on(mesh), {})
    tier.wait()
    assert [path.name.partition("_")[0] for path in tmp_path.rglob("*_*")] == ["2"]


def test_the_newest_update_of_which_all_parts_are_there_is_chosen():
    a, b = "aa", "bb"
    three, four = ("1x", 3), ("1x", 4)
    assert chosen([a], [[]]) is None
    assert chosen([a, b], [[(three, a)], [(three, b)]]) == (three, [0, 1])
    killed_between_two_writes = [[(four, a), (three, a)], [(three, b)]]
    assert chosen([a, b], killed_between_two_writes) == (three, [0, 1])
    assert chosen([a, b], [[], [(three, b), (three, a)]]) == (three, [1, 1])  # the disk of process 0 is lost
    assert chosen([a, b], [[(three, a)], []]) is None
    assert chosen([a, a], [[(three, a)], []]) == (three, [0, 0])  # replicas


def test_parts_of_two_starts_are_not_put_together():
    """A disk that was away has parts of the same update that were computed before the config was changed."""
    a, b = "aa", "bb"
    old, new, later = ("1x", 6), ("2y", 6), ("1x", 8)
    assert chosen([a, b], [[(new, a)], [(old, b)]]) is None
    assert chosen([a, b], [[(new, a)], [(old, a), (old, b)]]) == (old, [1, 1])
    assert chosen([a, b], [[(new, a), (new, b)], [(later, a), (later, b)]]) == (new, [0, 0])


@pytest.mark.parametrize(
    "name", ["", "4", "4_-1", "x_-1_ab", "4_-1_ab_1_2", "4_-1_ab_x", "4_-1_ab.tmp", "4_-1__000001ab", "4_-1_"]
)
def test_files_of_other_names_are_left_alone(name, tmp_path):
    assert Name.of(tmp_path / "run" / name if name else tmp_path) is None


def test_every_start_writes_under_a_name_of_its_own(mesh, tmp_path):
    own, points = tmp_path / "run" / "process-0", []
    for seed in (1, 2):
        tier = LocalTier(LocalConfig(1, str(tmp_path), keep=2), "run")
        tier.save(3, None, state_on(mesh, seed), {})
        tier.wait()
        points.append({Name.of(path).point for path in own.iterdir()})
    (first,), (second,) = points[0], points[1] - points[0]
    assert first < second and points[1] == {first, second}
    assert sums(tier.restore(None, abstract(state_on(mesh)))[1]) == sums(state_on(mesh, 2))
    (newer,) = own.glob(f"*_{second[0]}")
    newer.rename(own / "_".join(newer.name.split("_")[:3]))  # as files were called before starts had names
    assert sums(tier.restore(None, abstract(state_on(mesh)))[1]) == sums(state_on(mesh, 1))


def test_copies_go_to_another_host_where_there_is_one():
    assert shift(["x"], ["a"]) is None
    assert shift(["x", "y"], ["a", "a"]) is None  # replicas are copies
    assert shift(["x", "x"], ["a", "b"]) == 1
    assert shift(["x", "x", "y", "y"], ["a", "b", "c", "d"]) == 2
    assert shift(["x", "y", "x", "y"], ["a", "b", "a", "b"]) == 1  # both replicas of "a" are on x


# a run


def loss_fn(params, microbatch, rng):
    error = microbatch["x"] @ params["w"] - microbatch["y"]
    return jaxfb.Sum((error**2).sum(), 1.0 * microbatch["x"].shape[0])


class Die(jaxfb.Callback):
    """Ends the process's run at once, as a kill does, when an update begins."""

    def __init__(self, update):
        self.update = update

    def on_step_start(self, step):
        if step == self.update:
            raise KeyboardInterrupt


def train(directory, local, updates=20, every=8, resume=False, fresh=False, callbacks=()):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    trainer = jaxfb.Trainer(
        model=loss_fn, params={"w": np.zeros(4, np.float32)}, data={"x": x, "y": x.sum(1)},
        optimizer=optax.adam(0.03), dir=str(directory), updates=updates, rows=8, rows_per_microbatch=2,
        mesh={"data": 2}, callbacks=list(callbacks),
        checkpoint={"every": every, "local": {"every": EVERY, "dir": str(local)}},
    )  # fmt: skip
    return trainer.train(resume=resume, fresh=fresh)


def losses(directory):
    records = read_jsonl(directory / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize(
    ("killed", "goes_on"),
    [
        (5, 3),
        pytest.param(8, 6, marks=pytest.mark.slow),
        pytest.param(9, 8, marks=pytest.mark.slow),
        pytest.param(15, 12, marks=pytest.mark.slow),
        pytest.param(18, 16, marks=pytest.mark.slow),
    ],
    ids=lambda at: str(at),
)
def test_a_killed_run_goes_on_from_the_newest_of_both_tiers(tmp_path, killed, goes_on, capsys):
    train(tmp_path / "whole", tmp_path / "disk")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(killed)])
    capsys.readouterr()
    train(tmp_path / "run", tmp_path / "disk", resume=True)
    assert f"after update {goes_on} of 20" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 20
    assert not any((tmp_path / "disk").iterdir())  # nothing stays behind a finished run


def test_a_run_that_is_made_shorter_than_its_local_checkpoint_ends_there(tmp_path, capsys):
    """It was refused, since there is no position in the data for an update beyond the last."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(11)])
    result = train(tmp_path / "run", tmp_path / "disk", updates=6, resume=True)
    assert (result.status, result.updates) == ("finished", 9)
    assert "was saved after update 9, beyond the 6 that run.updates gives" in capsys.readouterr().out
    train(tmp_path / "run", tmp_path / "disk", updates=11, resume=True)
    assert "after update 9 of 11" in capsys.readouterr().out
    assert sorted(losses(tmp_path / "run")) == list(range(1, 12))


def test_a_run_that_begins_anew_forgets_local_checkpoints(tmp_path, capsys):
    for fresh in (False, True):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(5)], fresh=fresh)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(2)])
    capsys.readouterr()
    train(tmp_path / "run", tmp_path / "disk", updates=4, resume=True)
    assert "starting at update 0" in capsys.readouterr().out


def test_checkpoints_that_were_removed_take_the_later_local_ones_with_them(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(11)])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    capsys.readouterr()
    train(tmp_path / "run", tmp_path / "disk", updates=14, resume=True)
    assert "after update 6 of" in capsys.readouterr().out  # of before the one that was removed


def damaged_after(newest, tmp_path, capsys):
    """Kills a run after it saved update `newest`, removes its arrays, and returns what the resumed run prints."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(newest + 1)])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(newest) / "state")
    capsys.readouterr()
    train(tmp_path / "run", tmp_path / "disk", resume=True)
    return capsys.readouterr().out


def test_those_before_a_damaged_checkpoint_count(tmp_path, capsys):
    """Its record was whole, so that they did not, and the run was refused: there is no checkpoint before it."""
    assert "after update 6 of 20" in damaged_after(8, tmp_path, capsys)


@pytest.mark.slow
def test_those_between_a_damaged_checkpoint_and_the_one_before_it_count(tmp_path, capsys):
    """The run went back to the one before it, and made the updates since then again."""
    train(tmp_path / "whole", tmp_path / "disk")
    assert "after update 15 of 20" in damaged_after(16, tmp_path, capsys)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_copy_of_a_run_leaves_the_local_checkpoints_to_the_other(tmp_path, capsys):
    """Both wrote to the same place: each continued from whatever the other had written there last."""
    run, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "disk", callbacks=[Die(15)])
    shutil.copytree(run, copy)
    capsys.readouterr()
    train(copy, tmp_path / "disk", updates=10, resume=True)
    assert f"{copy} is a copy of {run}: local checkpoints" in (said := capsys.readouterr().out)
    assert "after update 8 of 10" in said  # and its end removes none of the other's
    run.rename(moved)
    train(moved, tmp_path / "disk", updates=14, resume=True)
    assert "after update 12 of 14" in capsys.readouterr().out


def test_a_run_reached_by_a_link_is_no_copy(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", tmp_path / "disk", callbacks=[Die(5)])
    (tmp_path / "link").symlink_to(tmp_path / "run")
    capsys.readouterr()
    train(tmp_path / "link", tmp_path / "disk", updates=4, resume=True)
    assert "after update 3 of 4" in capsys.readouterr().out


def test_those_of_another_mesh_are_not_passed_over_in_silence(mesh, tmp_path, caplog):
    """A resume on another mesh went back to the run directory's checkpoint without a word."""
    tier, other = (
        LocalTier(LocalConfig(1, str(tmp_path)), "run"),
        jaxfb.make_mesh(fsdp=4, devices=jax.devices()[:4]),
    )
    tier.save(7, 4, state_on(mesh), {})
    tier.wait()
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(other, P())), state_on(mesh)
    )
    assert tier.restore(4, placed) is None
    assert "up to update 7, are not used: the arrays were cut" in caplog.text
    caplog.clear()
    assert tier.restore(8, placed) is None and not caplog.text  # the run directory has a newer one


@pytest.mark.parametrize("what", ["directory", "file"])
def test_local_checkpoints_that_may_not_be_read_end_the_run(mesh, tmp_path, monkeypatch, what):
    """As those of another user: they counted as missing or damaged, and their updates were lost without need."""
    state, tier = state_on(mesh), LocalTier(LocalConfig(1, str(tmp_path)), "run")
    tier.save(2, None, state, {})
    tier.wait()
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "x"))

    def deny(*_):
        raise denied

    if what == "directory":
        monkeypatch.setattr(os, "scandir", deny)
    else:
        monkeypatch.setattr("jaxfb.training.persistence.local_tier.read", deny)
    with pytest.raises(
        Unreadable, match="local checkpoints .* cannot be read: Permission denied: .*/x; correct that"
    ):
        tier.restore(None, abstract(state))
    monkeypatch.undo()
    assert tier.restore(None, abstract(state))[0] == 2


class Remove(jaxfb.Callback):
    def __init__(self, directory):
        self.directory = directory

    def on_step_start(self, step):
        if step == 7:
            shutil.rmtree(self.directory)


def test_a_run_whose_directory_is_removed_ends_with_a_sentence(tmp_path):
    directory = tmp_path / "run"
    with pytest.raises(CannotWrite, match="was removed or replaced while the run was in progress"):
        train(directory, tmp_path / "disk", callbacks=[Remove(directory)])
    assert not (directory / "checkpoints").exists()


@pytest.mark.parametrize("local", [{"every": 0, "dir": "x"}, {"every": 1, "dir": " "}, {"every": 1}])
def test_impossible_settings_are_refused(tmp_path, local):
    from jaxfb.config import load_config

    with pytest.raises(ValueError, match=r"checkpoint\.local"):
        load_config(write_tiny(tmp_path, checkpoint={"local": local}))


# two processes


def write_job(directory, **run):
    sections = {
        "mesh": {"data": 1, "fsdp": 4},
        "run": {"updates": 9, **run},
        "eval": {"every": None, "prompt": ""},
        "checkpoint": {"every": None, "local": {"every": 2, "dir": "$DISK"}},
        "hosts": {"lost_after": 5},
    }
    write_tiny(directory, **sections)


def two(directory, monkeypatch, *arguments, dies=None):
    """Both processes of a job, each with a disk of its own; process 1 dies at that point."""
    jobs, place = [], ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2]
    for index in (0, 1):
        monkeypatch.setenv("DISK", str(directory / f"disk{index}"))
        if dies and index:
            monkeypatch.setenv("JAXFB_KILL_AT", dies)
        jobs.append(launch(directory, index, 2, "train", *arguments, *place, "--process-id", index))
    monkeypatch.delenv("JAXFB_KILL_AT", raising=False)
    return finish(jobs)


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_go_on_from_their_disks_though_one_is_lost(tmp_path, monkeypatch):
    """The parameters are cut over both, so that process 0 gets what it lost from the copy that process 1 has."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
        write_job(directory)
    assert two(whole, monkeypatch) == [0, 0], logs(whole, 2)
    assert two(killed, monkeypatch, dies="update:8") == [76, -9], logs(killed, 2)
    assert "may be on the hosts' own disks" in logs(killed, 2)[0]
    shutil.rmtree(killed / "disk0")
    assert two(killed, monkeypatch, "--resume") == [0, 0], logs(killed, 2)
    assert "after update 6 of 9" in logs(killed, 2)[0]
    assert losses(killed / "run") == losses(whole / "run") and len(losses(whole / "run")) == 9
