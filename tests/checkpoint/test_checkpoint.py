"""A checkpoint comes back as the same bits, on any mesh, or says in one sentence why not."""

import errno
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PATIENCE, free_port

from jaxfb.checkpoint import step_directories
from jaxfb.checkpoint import store as checkpoint
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore
from jaxfb.refusal import Missing, StorageError


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


REPLICATED = P()


def make_state(mesh, spec=REPLICATED, seed=0):
    """A tree with the kinds of leaves a train state has; w is [16, 8] under `spec`."""
    key = jax.random.key(seed)
    state = {
        "params": {"w": jax.random.normal(key, (16, 8), jnp.float32), "b": jnp.ones(3, jnp.bfloat16)},
        "moments": (jnp.full((16, 8), 1 / 3, jnp.float32), jnp.zeros((), jnp.int32)),
        "rng": jax.random.split(key, 4),
    }
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, spec if x.ndim == 2 else P()), state)
    return jax.device_put(state, shardings)


def bits(tree):
    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree)]


def test_reshard_is_bitwise_and_survives_donation(tmp_path):
    state = make_state(mesh_of(data=8), P("data"))
    expected, host = bits(state), {"position": {"next_index": 7}, "metrics": {"eval/loss": 2.5}, "lr": 1e-3}
    with CheckpointStore(tmp_path / "c") as store:
        store.save(20, state, host)
        jax.tree.map(lambda x: x.delete(), state)  # what donation to the next step does
        store.wait()
        wanted = make_state(mesh_of(fsdp=4, tensor=2), P("fsdp", "tensor"), seed=1)
        restored, restored_host = store.restore(wanted)
    assert bits(restored) == expected
    assert restored_host == host
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    assert restored["params"]["w"].sharding == wanted["params"]["w"].sharding
    assert jax.random.bits(restored["rng"][0]) == jax.random.bits(jax.random.split(jax.random.key(0), 4)[0])


def test_a_clock_that_is_set_forward_during_a_save_ends_nothing(tmp_path, monkeypatch):
    """As after a suspended machine: Orbax counted an hour, and the run ended as one whose disk takes no more."""
    hours = itertools.count()
    clock = types.SimpleNamespace(time=lambda: time.time() + 3600 * next(hours), sleep=time.sleep)
    monkeypatch.setattr("orbax.checkpoint._src.futures.future.time", clock)
    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state(mesh_of(data=2)), {})
        store.wait()
        assert store.steps() == [1]


def test_what_is_being_saved_can_be_restored_at_once(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {"rows": 8})
        restored, host = store.restore(state)
    assert bits(restored) == bits(state) and host == {"rows": 8}


def test_another_optimizer_is_told_how_to_take_the_parameters_alone(tmp_path):
    params = {"w": jnp.ones((4, 2))}
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"params": params, "opt_state": {"mu": params}}, {})
        with pytest.raises(
            ValueError, match=r'the optimizer saved with it, or .* restore\(\{"params": ...\}, partial=True\)'
        ):
            store.restore({"params": params, "opt_state": {"trace": params}})
        with pytest.raises(ValueError, match="use the config saved with it, or another run directory"):
            store.restore({"params": {"v": jnp.ones(3)}, "opt_state": {"mu": params}})
        restored, _ = store.restore({"params": params}, partial=True)
    assert bits(restored["params"]) == bits(params)


def test_keeps_newest_and_best(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path, keep=2) as store:
        assert store.latest() is None and store.best() is None
        for step, loss in [(0, 3.0), (10, 1.0), (20, float("nan")), (30, None), (40, 2.0)]:
            store.save(step, state, {"metrics": {} if loss is None else {"eval/loss": loss}})
        store.wait()
        assert store.steps() == [10, 30, 40]
        assert (store.latest(), store.best()) == (40, 10)
        with pytest.raises(ValueError, match="step 40 is already saved"):
            store.save(40, state, {})
        with pytest.raises(FileNotFoundError, match="step 20 .*complete steps: 10, 30, 40"):
            store.restore(state, step=20)


@pytest.mark.parametrize(
    "metric, best_is, best",
    [("eval/accuracy", None, 10), ("eval/reward", "highest", 10), ("eval/accuracy", "lowest", 20)],
)
def test_keeps_the_one_with_the_best_value_the_highest_or_the_lowest(tmp_path, metric, best_is, best):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path, keep=1, keep_best=metric, best_is=best_is) as store:
        for step, value in [(0, 0.1), (10, 0.9), (20, 0.0), (30, 0.5)]:
            store.save(step, state, {"metrics": {metric: value}})
        store.wait()
        assert store.steps() == [best, 30] and store.best() == best


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path, keep=3) as store:
        store.save(0, state, {"metrics": {"eval/loss": float("nan")}})
        store.wait()
        assert store.best() is None
        store.save(10, state, {"metrics": {"eval/loss": 3.0}})
        store.wait()
        assert store.best() == 10


def test_refuses_what_orbax_would_cast(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        other = {**state, "params": {"w": state["params"]["w"].astype(jnp.bfloat16), "c": jnp.zeros(2)}}
        with pytest.raises(ValueError) as refusal:
            store.restore(other)
        params, _ = store.restore({"params": state["params"]}, partial=True)
    text = str(refusal.value)
    assert "params.w: float32[16, 8] in the checkpoint, bfloat16[16, 8] in this run" in text
    assert "params.c: not in the checkpoint" in text and "params.b: only in the checkpoint" in text
    assert bits(params) == bits(state["params"])


def test_a_save_without_checksums_is_none(tmp_path, monkeypatch):
    """They are computed while the arrays are being written; where that fails, the save ends and has no name."""
    state = make_state(mesh_of(data=1))

    def fails(leaves):
        raise jax.errors.JaxRuntimeError("a device is lost")

    with CheckpointStore(tmp_path) as store:
        monkeypatch.setattr(checkpoint, "checksums", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match="a device is lost"):
            store.save(1, state, {})
        monkeypatch.undo()
        assert store.steps() == []
        store.save(2, state, {})
        store.wait()
        assert store.steps() == [2]


def test_what_a_failed_save_still_writes_does_not_stop_the_next(tmp_path, monkeypatch, caplog):
    """Its threads may create files in the directory that is being removed; they end soon."""
    kind = type(epath.Path(tmp_path))
    remove, refusals = kind.rmtree, [OSError(errno.ENOTEMPTY, "Directory not empty")] * 2

    def busy(path, missing_ok=False):
        if refusals:
            raise refusals.pop()
        remove(path, missing_ok)

    monkeypatch.setattr(kind, "rmtree", busy)
    monkeypatch.setattr(step_directories, "PAUSE", 0)
    (left := tmp_path / "1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with CheckpointStore(tmp_path) as store, caplog.at_level(logging.WARNING, "jaxfb"):
        store.save(1, make_state(mesh_of(data=1)), {})
        store.wait()
        assert (store.steps(), left.parent.exists(), caplog.text) == ([1], False, "")
        left.mkdir(parents=True)
        refusals += [OSError(errno.EBUSY, "Device or resource busy")] * step_directories.REMOVALS
        step_directories.remove_unfinished(store.directory)
        assert "cannot be removed: [Errno 16]" in caplog.text


@pytest.mark.filterwarnings("ignore")  # orbax leaves coroutines behind when a file is torn
def test_falls_back_over_damage_and_goes_on(tmp_path, caplog):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        for step in (10, 20):
            store.save(step, state, {"step": step})
    for file in (tmp_path / "20" / "state").rglob("*"):  # arrays torn, manifest intact
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:10])
    (tmp_path / "30").mkdir()
    (tmp_path / "40.orbax-checkpoint-tmp").mkdir()

    with CheckpointStore(tmp_path) as store, caplog.at_level(logging.WARNING, "jaxfb"):
        assert store.latest() == 20
        _, host = store.restore(state)
        assert host == {"step": 10}
        assert "step 30 is damaged: jaxfb/data.json is missing" in caplog.text
        assert "step 20 is damaged: a file of its arrays" in caplog.text
        store.save(20, state, {"step": 20})
        store.wait()
        assert store.restore(state)[1] == {"step": 20}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"10", "20", "20.damaged", "30.damaged"}


def tear(step):
    """Cuts the arrays of a step short; its record stays whole."""
    for file in (step / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])


@pytest.mark.filterwarnings("ignore")  # orbax leaves coroutines behind when a file is torn
def test_a_step_that_takes_the_number_of_a_damaged_one_counts(tmp_path):
    """It was taken for the damaged one: no step of its store, and set aside, whole, after the next save that failed."""
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
        store.save(2, state, {})
    tear(tmp_path / "2")
    with CheckpointStore(tmp_path) as store:
        store.restore(state)
        store.save(2, state, {})
        store.wait()
        assert store.steps() == [1, 2]
        store._abandon_writer()  # as after a save that failed
        store.save(3, state, {})
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "2.damaged", "3"}


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_can_be_read_after_all_counts_again(tmp_path):
    """A disk failed for a moment; the step that the run had continued from was set aside by the next save."""
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save(step, state, {"step": step})
        store.wait()
        (tmp_path / "2" / "state").rename(tmp_path / "away")
        assert store.restore(state)[1] == {"step": 1}
        (tmp_path / "away").rename(tmp_path / "2" / "state")
        assert store.restore(state)[1] == {"step": 2}
        assert store.latest() == 2
        store.save(3, state, {})
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("step", [5, 6])
def test_damage_that_is_found_between_two_saves_is_set_aside(tmp_path, step):
    """The open writer counted it as the newest step, and refused to save it again, or a step below it."""
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path, keep=2) as store:
        for earlier in (2, 4, 6):
            store.save(earlier, state, {"step": earlier})
        store.wait()
        tear(tmp_path / "6")
        assert store.restore(state)[1] == {"step": 4}
        store.save(step, state, {"step": step})
    assert store.steps() == [4, step]
    assert (tmp_path / "6.damaged").is_dir()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "file, told",
    [
        ("jaxfb/data.json", "jaxfb/data.json is cut short or unreadable"),
        ("state/_METADATA", "state/_METADATA is cut short or unreadable"),
        ("state/manifest.ocdbt", "a file of its arrays (state/) is cut short or unreadable"),
        ("state/array_metadatas/process_0", "state/array_metadatas/process_0 is cut short or unreadable"),
    ],
)
def test_damage_is_told_by_its_file(tmp_path, file, told):
    state = {"w": jnp.ones((40, 100))}
    with CheckpointStore(tmp_path) as store:
        store.save(5, state, {})
    path = tmp_path / "5" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(Missing) as refusal:
        CheckpointStore(tmp_path).restore(state)
    first, reason = str(refusal.value).splitlines()
    assert first.endswith("copy a whole one back, or train again with --fresh")
    assert reason == f"  step 5 is damaged: {told}"
    with pytest.raises(StorageError) as of_the_step:  # the words of a library came
        CheckpointStore(tmp_path).restore(state, 5)
    assert str(of_the_step.value) == f"[checkpoint] step 5 of {tmp_path} is damaged: {told}"


@pytest.mark.filterwarnings("ignore")
def test_a_failed_write_is_raised_and_the_next_one_works(tmp_path):
    state = {"w": jax.random.normal(jax.random.key(0), (256, 256))}
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # as a full disk would
        try:
            store.save(2, state, {})
            with pytest.raises(
                CannotWrite, match="(?i)step 2 could not be .*: file too large; complete steps: 1$"
            ):
                store.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert store.latest() == 1
        with pytest.raises(ValueError, match="JSON"):
            store.save(2, state, {"mesh": object()})
        store.save(2, state, {})
        store.wait()
        assert store.latest() == 2 and bits(store.restore(state)[0]) == bits(state)


SAVE_FOREVER = """
import sys, jax, jax.numpy as jnp
from jaxfb.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
for step in range(1, 10_000):
    store.save(step, {"w": jnp.full((512, 512), step, jnp.float32), "step": jnp.int32(step)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.processes
def test_kill_during_an_asynchronous_save(tmp_path):
    """SIGKILL right after `save(n)` returned: n - 1 was acknowledged, so n - 1 or n comes back, whole."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        for line in child.stdout:
            if int(line) == 6:
                time.sleep(0.005)
                break
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    wanted = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with CheckpointStore(tmp_path, keep=2) as store:
        state, host = store.restore(wanted)
        step = int(state["step"])
        assert step >= 5 and host == {"step": step}
        np.testing.assert_array_equal(state["w"], np.full((512, 512), step, np.float32))
        store.save(step + 1, state, {"step": step + 1})
    assert not list(tmp_path.glob("*tmp*"))


TWO_PROCESSES = """
import glob, os, sys, jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
shape = (8, 1000)  # smaller parts are not in files of their own
values = np.arange(8000, dtype=np.float32).reshape(shape)
def on(sizes, names, spec):
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, spec)
w = jax.make_array_from_callback(shape, on((4,), ("data",), P("data")), lambda index: values[index])
store = CheckpointStore(sys.argv[3], keep=1)
for step in (1, 2):
    store.save(step, {"w": w}, {"step": step})
store.wait()
if jax.process_index() == 0:
    assert store.steps() == [2] and store.host() == {"step": 2}  # one process may look alone
elsewhere = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on((2, 2), ("a", "b"), P(("b", "a"))))
restored, host = store.restore({"w": elsewhere})
assert host == {"step": 2}
assert all((np.asarray(s.data) == values[s.index]).all() for s in restored["w"].addressable_shards)
store.close()
with CheckpointStore(sys.argv[3], keep=2) as store:
    store.save(3, {"w": w}, {"step": 3})
    store.wait()
    if jax.process_index() == 0:
        of_process_1 = glob.glob(f"{sys.argv[3]}/3/state/ocdbt.process_1/d/*")
        os.truncate(max(of_process_1, key=os.path.getsize), 1)
    multihost_utils.sync_global_devices("cut")
    _, host = store.restore({"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=w.sharding)})
    assert host == {"step": 2}  # on process 0 too, which reads its own part of step 3
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes(tmp_path):
    """Each process holds half of the array; a damaged step is set aside by one of them, and one of which only one half
    can be read is passed over by both, without a deadlock."""
    (tmp_path / "7").mkdir()
    port = str(free_port())
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    children = [
        subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(rank), port, str(tmp_path)], env=env)
        for rank in (0, 1)
    ]
    try:
        assert [child.wait(timeout=PATIENCE) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "7.damaged"]


@pytest.mark.filterwarnings("ignore")  # orbax leaves coroutines behind when a file is torn
def test_a_flipped_bit_is_found_and_the_step_before_is_restored(tmp_path):
    """In whatever file of the step: it is passed over, or what comes back has the bits that were saved."""
    state = make_state(mesh_of(data=2), P("data"))
    older = make_state(mesh_of(data=2), P("data"), seed=1)
    with CheckpointStore(tmp_path / "c") as store:
        store.save(10, older, {"step": 10})
        store.save(20, state, {"step": 20})
    right, before = bits(state), bits(older)
    passed_over, rng = 0, np.random.default_rng(0)
    files = sorted(path for path in (tmp_path / "c" / "20").rglob("*") if path.is_file())
    for file in files:
        whole = file.read_bytes()
        for position in rng.integers(0, len(whole), 3) if whole else ():
            flipped = bytearray(whole)
            flipped[position] ^= 1 << int(rng.integers(8))
            file.write_bytes(flipped)
            restored, host = CheckpointStore(tmp_path / "c").restore(make_state(mesh_of(data=2)))
            passed_over += host["step"] == 10
            assert (host["step"], bits(restored)) in ((20, right), (10, before)), (file, position)
        file.write_bytes(whole)
    assert passed_over > 5
    shutil.rmtree(tmp_path / "c" / "20" / "state")
    shutil.copytree(
        tmp_path / "c" / "10" / "state", tmp_path / "c" / "20" / "state"
    )  # sound, but for its sums
    with pytest.raises(OSError, match="step 20 differs from what was saved, in "):
        CheckpointStore(tmp_path / "c").restore(make_state(mesh_of(data=2)), step=20)


def test_a_step_under_the_name_of_another_is_no_step(tmp_path):
    """The run continued from the older step, and could not save what it then computed."""
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path / "c") as store:
        store.save(10, state, {"rows": 80})
        store.save(20, state, {"rows": 160})
    for copied in (20, 999):
        shutil.rmtree(tmp_path / "c" / str(copied), ignore_errors=True)
        shutil.copytree(tmp_path / "c" / "10", tmp_path / "c" / str(copied))
    with CheckpointStore(tmp_path / "c") as store:
        assert store.steps() == [10] and store.restore(state)[1] == {"rows": 80}
        with pytest.raises(OSError, match="step 999 is a copy of step 10"):
            store.restore(state, step=999)
        store.save(20, state, {"rows": 160})
    assert CheckpointStore(tmp_path / "c").steps() == [10, 20]


def test_a_step_that_is_complete_is_not_described_as_unwritten(tmp_path):
    """So it was where an older step of another user's could not be removed after it."""
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "c/5")
    with CheckpointStore(tmp_path / "c") as store:
        store.save(10, make_state(mesh_of(data=1)), {})
        store.wait()
        assert "step 10 is complete in " in (told := str(store._cannot_write(10, denied))), told
        assert told.endswith("such as to remove an older one: Permission denied: c/5; complete steps: 10"), (
            told
        )
        assert str(store._cannot_write(11, denied)).endswith("/c: Permission denied; complete steps: 10")


def test_an_old_step_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch, caplog):
    """Each save ended with it, though the new step was complete: such as where another program reads the old one."""
    state, remove = make_state(mesh_of(data=1)), shutil.rmtree

    def busy(path, *args, **more):
        if str(path) == str(tmp_path / "c" / "1"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove(path, *args, **more)

    monkeypatch.setattr(shutil, "rmtree", busy)
    with CheckpointStore(tmp_path / "c", keep=1) as store:
        for step in (1, 2, 3, 4):
            store.save(step, state, {})
    told = f"step 1, which is no longer kept, cannot be removed: Directory not empty: {tmp_path}/c/1"
    assert caplog.text.count("cannot be removed") == caplog.text.count(told) == 1
    assert store.latest() == 4 and set(store.steps()) <= {1, 4}


@pytest.mark.parametrize("devices", [1, 2])
def test_keys_are_restored_to_where_they_can_be_put_again(tmp_path, devices):
    mesh = mesh_of(data=devices)
    keys = {"one": jax.random.key(3), "some": jax.random.split(jax.random.key(4), 4)}
    placed = {
        name: jax.device_put(key, NamedSharding(mesh, P(*["data"] * key.ndim))) for name, key in keys.items()
    }
    with CheckpointStore(tmp_path) as store:
        store.save(1, placed, {})
        store.wait()
        state, _ = store.restore(placed)
    for name, key in state.items():
        assert bits(jax.device_put(key, key.sharding)) == bits(keys[name])


def test_a_changed_record_is_no_record(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path / "c") as store:
        store.save(10, state, {"step": 10, "rows": 80})
        store.save(20, state, {"step": 20, "rows": 160})
    record = tmp_path / "c" / "20" / "jaxfb" / "data.json"
    record.write_text(record.read_text().replace("160", "161"))
    store = CheckpointStore(tmp_path / "c")
    assert store.steps() == [10] and store.restore(state)[1] == {"step": 10, "rows": 80}


def test_a_checkpoint_of_the_format_without_checksums_is_restored(tmp_path):
    state = make_state(mesh_of(data=1))
    with CheckpointStore(tmp_path) as store:
        store.save(10, state, {"step": 10})
    record = tmp_path / "10" / "jaxfb" / "data.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({"format": 1, "leaves": values["leaves"], "host": values["host"]}))
    restored, host = CheckpointStore(tmp_path).restore(state)
    assert bits(restored) == bits(state) and host == {"step": 10}
    record.write_text(json.dumps({**values, "format": 3}))
    assert CheckpointStore(tmp_path).steps() == []
