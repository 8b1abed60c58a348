"""What is saved can be gone on from: no poison, no state of failed updates, and no lost work where a disk is full."""

import errno
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.callbacks import callback
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.metrics import JsonlWriter, read_jsonl
from jaxfb.training.guard import NonFiniteAbort, unsound_leaves
from jaxfb.training.persistence import disk
from jaxfb.training.pretraining import Pretraining
from jaxfb.training.run_dir import RunDirectory

SHORT = {
    "model": {"num_layers": 1},
    "run": {"updates": 8, "max_nonfinite": 2},
    "lr": {"name": "constant"},
    "eval": {"every": None, "prompt": ""},
    "checkpoint": {"every": 2, "keep": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return {"cache_dir": str(tmp_path_factory.mktemp("data"))}


@pytest.fixture
def config(tmp_path, data):
    return load_config(write_tiny(tmp_path, **SHORT, data=data))


def saved(config):
    """The updates of all complete checkpoints."""
    return CheckpointStore(RunDirectory.of(config).checkpoints).steps()


class Poison(trainer.Callback):
    """Puts a nan into the state before one update."""

    def __init__(self, step, put):
        self.step, self.put = step, put

    def on_train_start(self, run):
        self.run = run

    def before_update(self, step, batch):
        if step == self.step:
            self.put(self.run.state)


def into_parameters(state):
    state.params["norm"]["scale"] *= np.nan


def into_moments(state):
    state.opt_state.inner.nu["norm"]["scale"] *= np.nan


@pytest.mark.slow
@pytest.mark.parametrize("put", [into_parameters, into_moments])
def test_poison_is_never_saved_and_what_was_good_stays(config, capsys, put):
    """After update 5, with a checkpoint due at 6, 8, ...: update 4 is the last that is saved."""
    with pytest.raises(NonFiniteAbort) as given_up:
        trainer.train(config, callbacks=[Poison(6, put)])
    said = str(given_up.value)
    assert "not finite in " in said
    assert "nothing was saved since update 4, whose state is finite" in said and "--resume" in said
    assert saved(config) == [2, 4]
    assert main(["train", str(RunDirectory.of(config).path), "--resume"]) == 0
    assert saved(config) == [6, 8]


def test_poison_before_the_first_checkpoint_saves_nothing(config):
    with pytest.raises(NonFiniteAbort, match="nothing is saved: lower optimizer.learning_rate"):
        trainer.train(config, callbacks=[Poison(1, into_parameters)])
    assert saved(config) == []


def test_a_loss_that_is_not_finite_is_a_failed_update(config, monkeypatch):
    """Its gradients are finite; nothing is saved until an update is applied again."""
    update, steps = Pretraining.update, []

    def infinite(work, number, batch):
        metrics, more = update(work, number, batch)
        return (metrics if number != 3 else fails(metrics)), more

    monkeypatch.setattr(Pretraining, "update", infinite)
    trainer.train(config, callbacks=[callback(on_save=lambda step, directory: steps.append(step))])
    assert steps == [2, 5, 6, 8]


def fails(metrics):
    """These numbers as of an update whose loss was infinite."""
    flags = replace(metrics.nonfinite, loss=jnp.bool_(True))
    return replace(metrics, loss=jnp.float32(np.inf), skipped=jnp.bool_(True), nonfinite=flags)


@pytest.mark.slow
def test_a_signal_while_updates_fail_tells_that_nothing_was_saved(config, capsys):
    stop = callback(
        on_step_end=lambda step, record: os.kill(os.getpid(), signal.SIGINT) if step == 6 else None
    )
    result = trainer.train(config, callbacks=[Poison(6, into_parameters), stop])
    assert result.status == "interrupted" and saved(config) == [2, 4]
    said = capsys.readouterr().out
    assert "is not saved, since the latest updates failed; update 4 is saved; continue with:" in said


@pytest.mark.slow
def test_a_run_whose_last_updates_failed_is_not_finished(config):
    with pytest.raises(
        NonFiniteAbort,
        match="the last updates of the run, 1 of them, were not finite; nothing was saved since",
    ):
        trainer.train(config, callbacks=[Poison(8, into_parameters)])
    assert saved(config) == [4, 6] and not RunDirectory.of(config).summary.exists()


class Late(Poison):
    """Puts it there when the numbers of that update have arrived, right before the state is saved."""

    def before_update(self, step, batch):
        pass

    def on_step_end(self, step, record):
        super().before_update(step, record)


@pytest.mark.slow
def test_a_state_that_turns_bad_behind_the_last_update_is_found_when_it_is_saved(config):
    with pytest.raises(
        NonFiniteAbort, match=r"the state after update 6 is not finite in .*\['norm'\]\['scale'\]"
    ):
        trainer.train(config, callbacks=[Late(6, into_parameters)])
    assert saved(config) == [2, 4]


@pytest.mark.slow
def test_a_checkpoint_with_a_nan_is_not_resumed(config, capsys):
    trainer.train(config)
    store = CheckpointStore(RunDirectory.of(config).checkpoints, keep=9, keep_best=None)
    setup = trainer.make_setup(config)
    state, host = store.restore(setup.train_step(setup.plan.train).abstract_state(setup.init_params))
    into_parameters(state)
    store.save(9, state, {**host, "update": 9, "data": {**host["data"], "consumed_rows": 9 * 8}})
    store.close()
    assert main(["train", str(RunDirectory.of(config).path), "--resume", "run.updates=20"]) == 2
    said = capsys.readouterr().err
    assert (
        "update 9 of" in said and "is not finite in" in said and "continue from an earlier one (6, 8)" in said
    )


def test_single_numbers_may_be_infinite_and_integers_are_no_matter():
    state = {
        "best": jnp.float32(np.inf),
        "count": jnp.int32(3),
        "w": jnp.ones(3),
        "v": jnp.array([1, np.inf, 2]),
    }
    assert unsound_leaves(state) == ["['v']"]
    assert unsound_leaves({"best": jnp.float32(np.nan)}) == ["['best']"]
    assert unsound_leaves({"count": jnp.int32(3)}) == []


@pytest.mark.slow
def test_a_full_disk_under_the_metrics_saves_first(config, capsys, monkeypatch):
    write, run = JsonlWriter.write, RunDirectory.of(config)

    def full(self, step, record):
        if step >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, step, record)

    monkeypatch.setattr(JsonlWriter, "write", full)
    assert main(["train", str(run.path.parent / "tiny.yaml")]) == 74
    said = capsys.readouterr().err
    assert "metrics.jsonl cannot be written: No space left on device; saved after update" in said
    assert len(said.splitlines()) == 1 and saved(config)[-1] in (5, 6)
    monkeypatch.undo()
    assert main(["train", str(run.path), "--resume"]) == 0
    assert [record["step"] for record in read_jsonl(run.metrics) if "loss" in record][-1] == 8


@pytest.mark.slow
def test_a_full_disk_under_the_checkpoints_is_one_sentence(config, capsys, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    real = ocp.training.Checkpointer.save_checkpointables_async

    def full(self, step, *args, **kwargs):
        if step >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, step, *args, **kwargs)

    monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", full)
    assert main(["train", str(RunDirectory.of(config).path.parent / "tiny.yaml")]) == 74
    said = capsys.readouterr().err
    assert "step 4 could not be written to" in said and "No space left on device; complete steps: 2" in said
    assert len(said.splitlines()) == 1
    with pytest.raises(CannotWrite):
        with CheckpointStore(RunDirectory.of(config).checkpoints) as store:
            store.save(5, {"w": jnp.ones(3)}, {})


def test_a_disk_without_space_for_a_checkpoint_ends_the_run_before_it_computes(config, capsys, monkeypatch):
    monkeypatch.setattr(disk, "free_space", lambda path: 1000)
    assert main(["train", str(RunDirectory.of(config).path.parent / "tiny.yaml")]) == 74
    said = capsys.readouterr()
    assert "one checkpoint takes " in said.err and "has 0.0 MB free; free some space" in said.err
    assert "1/8" not in said.out and len(said.err.splitlines()) == 1


def test_space_that_a_run_will_need_is_counted(tmp_path, monkeypatch):
    said, checkpoints = [], tmp_path / "checkpoints"
    monkeypatch.setattr(disk, "free_space", lambda path: 35)
    assert "one checkpoint takes" in disk.lack_of_space(checkpoints, 36, 2, said.append) and said == []
    assert disk.lack_of_space(checkpoints, 12, 2, said.append) is None and "3 more checkpoints" in said.pop()
    for step in ("3", "4"):
        (checkpoints / step).mkdir(parents=True)
    assert disk.lack_of_space(checkpoints, 35, 2, said.append) is None and said == []
    monkeypatch.setattr(disk, "free_space", lambda path: None)
    assert disk.lack_of_space(checkpoints, 36, 2, said.append) is None
    assert disk.bytes_of({"w": jnp.ones((4, 2), jnp.float32), "key": jax.random.key(0)}) == 40


def test_what_a_killed_save_has_left_makes_space_for_the_next(tmp_path, monkeypatch):
    """On a nearly full disk each start again was refused, for the space that the killed save's own files took."""
    checkpoints = tmp_path / "checkpoints"
    unfinished, whole = checkpoints / "8.orbax-checkpoint-tmp", checkpoints / "4"
    for path in (unfinished, whole):
        path.mkdir(parents=True)
        (path / "array").write_bytes(b"x" * 30)
    monkeypatch.setattr(disk, "free_space", lambda path: 100 if not unfinished.exists() else 70)
    assert disk.lack_of_space(checkpoints, 90, 2, lambda text: None) is None
    assert (whole / "array").exists() and not unfinished.exists()


def test_a_disk_without_inodes_for_a_checkpoint_ends_the_run_before_its_first_update(
    config, tmp_path, capsys, monkeypatch
):
    def left(count, limited=1):
        """`os.statvfs` of a disk on which so many files can be made; limited=0: of one that sets no limit."""
        blocks = {"f_blocks": 2**30, "f_bfree": 2**30, "f_bavail": 2**30, "f_frsize": 4096}
        found = SimpleNamespace(f_files=limited, f_favail=count, **blocks)
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    left(24)
    assert main(["train", str(tmp_path / "tiny.yaml")]) == 74
    said = capsys.readouterr().err
    assert (
        "one checkpoint takes up to 25 files, but the disk of " in said and "has inodes for 24 more" in said
    )
    assert len(said.splitlines()) == 1 and saved(config) == []
    for count, limited in ((25, 1), (0, 0)):
        left(count, limited)
        assert disk.lack_of_space(tmp_path / "checkpoints", 1, 2, lambda text: None) is None


def test_a_checkpoint_takes_no_more_files_than_are_looked_for(tmp_path):
    state = {f"leaf{at}": jnp.ones([at + 1]) for at in range(8)}
    with CheckpointStore(tmp_path, asynchronous=False) as store:
        store.save(1, state, {})
    assert 10 < len(list((tmp_path / "1").rglob("*"))) + 1 <= disk.FILES + disk.FILES_OF_A_PROCESS


@pytest.mark.slow
def test_a_token_that_cannot_be_read_ends_the_run_saved(tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(1, 100, 20_000).astype(np.uint16)
    tokens[::20] = 0
    (tmp_path / "t.bin").write_bytes(tokens.tobytes())
    (tmp_path / "t.json").write_text('{"vocab_size": 100, "eos_id": 0}')
    path = write_tiny(
        tmp_path,
        **SHORT,
        data={"source": "tokens", "path": str(tmp_path / "t.bin"), "tokenizer": "bpe", "max_bytes": None},
    )
    config = load_config(path)

    def edit(step, batch):
        if step == 2:
            with (tmp_path / "t.bin").open("r+b") as file:  # in place: it is mapped, and must not shrink
                file.write(np.full(20_000, 60_000, np.uint16).tobytes())

    with pytest.raises(
        ValueError, match=r"t.bin contains token 60000 at .*, in row \d+; .*; saved after update \d+ of 8"
    ):
        trainer.train(config, callbacks=[callback(before_update=edit)])
    assert saved(config)[-1] >= 2
