"""Who may write into a run directory, what a resumed run may change, and that a refusal leaves every file alone."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import yaml
from marks import some_slow
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.callbacks import callback
from jaxfb.checkpoint.store import CannotWrite, CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import ConfigError, load_config
from jaxfb.metrics import read_jsonl
from jaxfb.planner import host_fit
from jaxfb.process.launcher import Connection
from jaxfb.training.ending import where_it_lies
from jaxfb.training.parameters import newest_params
from jaxfb.training.persistence.run_lock import OpenDirectory, RunLock
from jaxfb.training.reporting.continuing import after_a_loss, after_a_loss_of, where_from
from jaxfb.training.run_dir import RunDirectory

SHORT = {"run": {"updates": 4}, "lr": {"name": "constant"}, "eval": {"every": None, "prompt": ""}}
HOLD = """
import sys, time
from pathlib import Path
from jaxfb.training.persistence.run_lock import OpenDirectory, RunLock
with RunLock(Path(sys.argv[1])) as lock:
    lock.acquire()
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run that was stopped after 2 of its 4 updates."""
    directory = tmp_path_factory.mktemp("stopped")
    path = write_tiny(directory, **SHORT, checkpoint={"every": 2})
    stop = callback(on_save=lambda step, directory: os.kill(os.getpid(), signal.SIGINT))
    assert trainer.train(load_config(path), callbacks=[stop]).updates == 2
    return path


@pytest.fixture
def stopped(template, tmp_path):
    """The run that was stopped, elsewhere; its directory."""
    return Path(shutil.copytree(template.parent / "run", tmp_path / "run"))


def files(directory):
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in directory.rglob("*")
        if path.is_file()
    }


def refused(capsys, *arguments):
    """The one sentence of a command that is refused."""
    assert main(["train", *map(str, arguments)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("model.rope_theta=2.0", "has model.rope_theta=10000.0 (now 2.0), which would give its parameters"),
        ("model.norm_eps=0.1", "has model.norm_eps=1e-05 (now 0.1)"),
        ("run.seed=1", "has run.seed=0 (now 1)"),
        ("data.seed=1", "belongs to rows with seed=0, these have seed=1"),
        ("batch.rows=4", "resuming would train on other rows"),
        ("model.hidden_size=32", "has model.hidden_size=16 (now 32)"),
        ("log.writers=[wandb, tensorboard]", "needs the package"),
    ],
)
def test_a_refused_resume_changes_no_file(stopped, capsys, monkeypatch, override, sentence):
    for package in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    before = files(stopped)
    assert main(["train", str(stopped), "--resume", override]) == 2
    assert sentence in capsys.readouterr().err
    assert files(stopped) == before


@pytest.mark.parametrize("flag", some_slow(["--fresh", "--resume"], ["--fresh"]))
def test_an_update_that_memory_cannot_hold_leaves_the_directory_as_it_was(flag, stopped, capsys, monkeypatch):
    (stopped / "notes").mkdir()
    (stopped / "notes" / "mine.txt").write_text("mine")
    before = {name: contents for name, (_, contents) in files(stopped).items()}
    monkeypatch.setattr(host_fit, "free_memory", lambda: 1)
    monkeypatch.setattr(host_fit, "free_swap", lambda: 0)
    assert main(["train", str(stopped), flag, "batch.rows_per_microbatch=4"]) == 2
    assert "[memory] the compiled update needs" in capsys.readouterr().err
    assert {name: contents for name, (_, contents) in files(stopped).items()} == before
    assert [path.name for path in stopped.parent.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_flag_that_would_not_help_is_not_offered(stopped, capsys):
    assert "--allow-changes" in refused(capsys, stopped, "--resume", "model.rope_theta=2.0")
    assert "--allow-changes" not in refused(capsys, stopped, "--resume", "model.hidden_size=32")
    assert main(["train", str(stopped), "--resume", "model.hidden_size=32", "--allow-changes"]) == 2
    assert "does not fit this run" in capsys.readouterr().err


@pytest.mark.slow
def test_an_evaluation_reads_parameters_and_tokens_as_the_run_did(stopped, tmp_path, capsys):
    def refuses(*overrides):
        assert main(["eval", str(stopped), *overrides]) == 2
        return capsys.readouterr().err

    assert main(["eval", str(stopped), "eval.batches=1", "model.loss_chunk=7"]) == 0
    assert "[eval] the run was trained with model.rope_theta=10000.0 (now 2.0)" in refuses(
        "model.rope_theta=2.0"
    )
    (tmp_path / "other.txt").write_text(" ".join(f"word{k}" for k in range(3000)))
    other = [
        "data.source=text",
        f"data.path={tmp_path / 'other.txt'}",
        "data.max_bytes=null",
        "data.tokenizer=bpe",
    ]
    said = refuses(*other, "data.vocab_size=300")
    assert (
        f"a tokenizer trained on this text differs from the run's; use data.tokenizer={stopped / 'tokenizer.json'}"
        in said
    )
    assert main(["eval", str(stopped), *other[:-1], f"data.tokenizer={stopped / 'tokenizer.json'}"]) == 0


def test_an_imported_model_is_not_resumed(stopped, capsys):
    shutil.rmtree(stopped / "checkpoints")
    with CheckpointStore(stopped / "checkpoints") as store:
        store.save(0, {"params": {"w": jnp.zeros(3)}}, {"update": 0, "imported": "llama"})
    assert "contains an imported model that was not trained yet" in refused(capsys, stopped, "--resume")


def test_records_are_not_erased_where_the_checkpoints_are_gone(stopped, tmp_path, capsys):
    """A disk that is not mounted, or `checkpoints` moved elsewhere, must not make --resume begin at update 0."""
    (stopped / "checkpoints").rename(tmp_path / "elsewhere")
    before = files(stopped)
    assert before[".saved"]
    for how in (["--resume"], ["--resume", "run.updates=9"], []):
        said = refused(capsys, stopped, *how)
        assert "put its checkpoints back, start over with --fresh" in said, said
    (stopped / "checkpoints").symlink_to(tmp_path / "not_mounted")
    for how in (["--resume"], []):
        assert f"is a symbolic link to {tmp_path / 'not_mounted'}, which is not" in refused(
            capsys, stopped, *how
        )
    assert files(stopped) == before


def test_a_run_that_was_never_saved_may_begin_again(stopped):
    """It was killed before its first checkpoint; a finished one has lost its checkpoints even so."""
    directory = RunDirectory(stopped)
    shutil.rmtree(stopped / "checkpoints")
    (stopped / ".saved").unlink()
    assert not directory.note_saved()
    directory.refuse_lost()
    directory.refuse_unless_free()
    directory.summary.write_text("{}")
    with pytest.raises(ValueError, match="has no checkpoint any more"):
        directory.refuse_lost()


def test_other_head_counts_of_equal_shapes_are_refused(template, tmp_path, capsys):
    """Two heads of 8 and one of 16 have the same projections."""
    run = Path(shutil.copytree(template.parent / "run", tmp_path / "run"))
    one_head = ["model.num_heads=1", "model.num_kv_heads=1", "model.head_size=16"]
    assert main(["train", str(run), "--resume", *one_head]) == 2
    said = capsys.readouterr().err
    assert "model.num_heads=2 (now 1)" in said and "model.head_size=8 (now 16)" in said


@pytest.mark.slow
def test_what_may_change_is_printed_and_the_old_config_is_kept(stopped, capsys):
    was = yaml.safe_load((stopped / "config.yaml").read_text())
    changes = ["optimizer.learning_rate=0.005", "lr.name=cosine", "run.updates=5"]
    assert main(["train", str(stopped), "--resume", *changes]) == 0
    said = capsys.readouterr().out
    assert "changed since update 2:" in said
    for line in (
        "optimizer.learning_rate: 0.01 -> 0.005",
        "lr.name: constant -> cosine",
        "run.updates: 4 -> 5",
    ):
        assert f"\n  {line}\n" in said
    assert "learning rate of the next update: " in said and "by the saved config 0.01" in said
    assert yaml.safe_load((stopped / "config.until-2.yaml").read_text()) == was
    assert yaml.safe_load((stopped / "config.yaml").read_text())["run"]["updates"] == 5
    assert [record["step"] for record in read_jsonl(stopped / "metrics.jsonl") if "loss" in record] == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.slow
def test_other_meaning_is_accepted_where_it_is_asked_for(stopped, capsys):
    assert (
        main(["train", str(stopped), "--resume", "--allow-changes", "model.rope_theta=2.0", "data.seed=7"])
        == 0
    )
    said = capsys.readouterr().out
    assert "model.rope_theta: 10000.0 -> 2.0" in said and "data.seed: 0 -> 7" in said


@pytest.mark.slow
def test_a_moved_run_goes_on_where_it_lies(template, stopped, capsys):
    before = files(template.parent / "run")
    assert main(["train", str(stopped), "--resume"]) == 0
    assert f"resuming {stopped} after update 2 of 4" in capsys.readouterr().out
    assert RunDirectory(stopped).newest_update() == 4
    assert load_config(stopped).run.dir == str(stopped)
    assert files(template.parent / "run") == before
    assert main(["train", str(stopped)]) == 0  # finished, and known to be by its new name
    assert f"{stopped} is finished: 4 updates" in capsys.readouterr().out


def test_a_run_whose_place_another_run_takes_leaves_that_alone(template, stopped, tmp_path):
    """It went on in the other's directory: its records, its checkpoints and its summary were mixed with the other's."""
    other = Path(shutil.copytree(template.parent / "run", tmp_path / "other"))
    (other / ".lock").write_text("of a run that is in progress there")
    before = files(other)

    def replace(step):
        if step > 3:
            return
        stopped.rename(tmp_path / "away")
        other.rename(stopped)

    with pytest.raises(CannotWrite, match="was removed or replaced while the run was in progress"):
        trainer.train(load_config(stopped), resume=True, callbacks=[callback(on_step_start=replace)])
    assert files(stopped) == before


@pytest.mark.parametrize(("held", "now", "replaced"), [
    ("mine", "mine", False),  # a file system that has numbered its directories anew
    ("mine", "another's", True),
    ("mine", None, True),
    (None, "another's", False),  # a file system without locks
])  # fmt: skip
def test_a_directory_with_the_lock_file_of_a_run_is_that_run_s(tmp_path, held, now, replaced):
    def make(text):
        (tmp_path / "run").mkdir()
        if text is not None:
            (tmp_path / "run" / ".lock").write_text(text)

    make(held)
    opened = OpenDirectory(tmp_path / "run")
    assert not opened.is_replaced()
    (tmp_path / "run").rename(tmp_path / "away")
    assert opened.is_replaced() == (held is not None)
    make(now)
    assert opened.is_replaced() == replaced
    opened.close()


def test_one_run_writes_at_a_time(stopped, tmp_path, capsys):
    before = files(stopped)
    with RunLock(stopped) as first:
        first.acquire()
        for how in (["--resume"], ["--fresh"], []):
            said = refused(capsys, stopped, *how)
            assert f"[run] dir={stopped} is in use by process {os.getpid()} on " in said, said
    assert files(stopped) == before
    with RunLock(stopped) as again:
        again.acquire()
    assert not (stopped / ".lock").exists()


@pytest.mark.processes
def test_the_lock_ends_with_its_process(tmp_path):
    run = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "locked\n"
        with RunLock(run) as lock, pytest.raises(ValueError, match=f"in use by process {child.pid} on "):
            lock.acquire()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert (run / ".lock").exists()
    with RunLock(run) as lock:
        lock.acquire()


def test_a_lock_that_was_removed_while_somebody_waited_is_none(tmp_path, monkeypatch):
    """B opens the file, A removes it and ends, B locks what is no longer there: B must begin again."""
    first, second = RunLock(tmp_path / "run"), RunLock(tmp_path / "run")
    first.acquire()
    lock, tries = RunLock._lock, []

    def late(self, file):
        tries.append(file)
        if len(tries) == 1:
            first.release()
        return lock(self, file)

    monkeypatch.setattr(RunLock, "_lock", late)
    second.acquire()
    assert len(tries) == 2 and second._is_current(second._file)
    second.release()
    assert not (tmp_path / "run").exists()


def test_a_lock_that_cannot_be_signed_leaves_nothing(tmp_path, monkeypatch):
    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with (
        RunLock(tmp_path / "run") as lock,
        pytest.raises(ValueError, match="cannot be written to: No space left"),
    ):
        lock.acquire()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_fresh_moves_runs_and_nothing_else(stopped, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "holiday.jpg").write_bytes(b"\xff\xd8")
    assert "is not a run directory, so --fresh does not move it aside" in refused(
        capsys, stopped, "--fresh", f"run.dir={photos}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "run"]
    before = files(stopped)
    for impossible in ("data.sequence_length=1", "data.max_bytes=1", "mesh.tp=3", "batch.rows=9"):
        refused(capsys, stopped, "--fresh", impossible)
        assert files(stopped) == before
    assert main(["train", str(stopped), "--fresh", "run.updates=3"]) == 0
    assert {name: content for name, (_, content) in files(tmp_path / "run.old1").items()} == {
        name: content for name, (_, content) in before.items()
    }


def test_a_launcher_hears_that_a_run_has_begun_once_the_older_one_is_aside(stopped, capsys, monkeypatch):
    """Its next start continues what lies in the directory."""
    line, moved = Connection(), RunDirectory.move_aside
    for name, value in line.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jaxfb.cli.training.end_with_launcher", lambda: None)
    refused(capsys, stopped)
    told = [line.has_begun()]

    def move(directory):
        told.append(line.has_begun())
        return moved(directory)

    def go_through(*_):
        told.append(line.has_begun())
        raise ConfigError("enough")

    monkeypatch.setattr(RunDirectory, "move_aside", move)
    monkeypatch.setattr("jaxfb.training.loop._go_through", go_through)
    refused(capsys, stopped, "--fresh")
    assert told == [False, False, True]


def test_files_of_others_are_not_overwritten(stopped, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "tokenizer.json").write_text("{}")
    assert "its tokenizer.json would be overwritten" in refused(capsys, stopped, f"run.dir={mine}")
    assert files(mine).keys() == {"tokenizer.json"}


def test_impossible_directories_are_refused_in_a_sentence(stopped, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    cases = {
        tmp_path / "file": "is not a directory",
        tmp_path / "file" / "deeper": "Not a directory",
        "/dev/null": "/dev/null is not a directory",
        tmp_path / "loop": "Too many levels of symbolic links",
        tmp_path / "dangling": "a symbolic link to nothing",
        tmp_path / ("x" * 300): "File name too long",
        "": "must not be empty",
        "a\0b": "must be of printable characters",
    }
    for directory, reason in cases.items():
        said = refused(capsys, stopped, f"run.dir={json.dumps(str(directory))}")
        assert reason in said and len(said) < 400, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "loop", "run"]


@pytest.mark.slow
def test_strange_things_among_the_checkpoints(stopped, capsys):
    checkpoints = stopped / "checkpoints"
    for name in ("notes.txt", "tmp"):
        (checkpoints / name).mkdir()
    assert RunDirectory(stopped).newest_update() == 2
    for name in ("063", "٣", "9"):
        (checkpoints / name).write_text("x")
        said = refused(capsys, stopped, "--resume")
        assert f"{checkpoints / name} is named like a checkpoint but is not one; move it away" in said
        (checkpoints / name).unlink()
    (stopped / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 5.0}\n{"step": 2, "lo\xff": 1.0}\n')
    assert main(["train", str(stopped), "--resume"]) == 0
    assert [record["step"] for record in read_jsonl(stopped / "metrics.jsonl") if "loss" in record] == [
        1,
        3,
        4,
    ]


def test_metrics_that_are_a_directory_are_refused(stopped, capsys):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").mkdir()
    assert "metrics.jsonl is a directory, but a run writes a file there" in refused(
        capsys, stopped, "--resume"
    )


def test_a_seed_that_would_wrap_around_is_refused():
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    assert load_config(quickstart, [f"run.seed={2**32 - 1}"]).run.seed == 2**32 - 1
    for section in ("run.seed", "data.seed"):
        with pytest.raises(ValueError, match="seed"):
            load_config(quickstart, [f"{section}=-1"])
    with pytest.raises(ValueError, match=r"\[run\] seed=4294967296 must lie in \[0, 2\*\*32\); use 0"):
        load_config(quickstart, [f"run.seed={2**32}"])


def test_a_run_directory_is_for_its_user_alone_and_one_that_exists_keeps_its_mode(tmp_path):
    before = os.umask(0o022)
    try:
        with RunLock(tmp_path / "new") as lock:
            lock.acquire()
            assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        (tmp_path / "shared").mkdir(mode=0o755)
        with RunLock(tmp_path / "shared") as lock:
            lock.acquire()
            assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("done", "before", "words"),
    [
        (12, 0, "12 updates in 0:00:03"),
        (12, 4, "12 updates, the last 8 of them in 0:00:03"),
        (12, 12, "12 updates in 0:00:03"),
        (1, 0, "1 update in 0:00:03"),
    ],
)
def test_the_last_line_counts_the_updates_of_its_time(tmp_path, done, before, words):
    summary = {"updates": done, "updates_before": before, "seconds": 3.0}
    first, *_ = where_it_lies(RunDirectory(tmp_path), summary)
    assert first == f"{words}; everything is in {tmp_path}:"


def test_a_run_that_was_saved_beyond_its_end_is_described(tmp_path):
    """It resumed "after update 4 of 2"."""
    lengths = dict.fromkeys(("updates", "samples", "tokens", "epochs"))
    config = SimpleNamespace(
        run=SimpleNamespace(**{**lengths, "updates": 2}), batch=SimpleNamespace(**lengths)
    )
    run = SimpleNamespace(directory=RunDirectory(tmp_path), done=4, total=2, resumed=True, config=config)
    said = where_from(run, resume=True)
    assert said.startswith(
        f"{tmp_path} was saved after update 4, beyond the 2 that run.updates gives: it ends there"
    )


def test_a_process_that_a_callback_has_stopped_tells_so_where_the_job_hangs(tmp_path):
    """One alone that calls run.stop keeps all waiting until hosts.stuck_after, and nothing told why."""
    run = SimpleNamespace(directory=RunDirectory(tmp_path), newest_saved=4, stopped=None)
    plain = "update 4 is saved: start the run again with --resume"
    assert after_a_loss_of(run, 2) == plain
    run.stopped = "good enough"
    assert after_a_loss_of(run, 2) == (
        "a callback of this process has called run.stop('good enough'), which every process must call after the same "
        f"update; {plain}"
    )
    assert after_a_loss_of(run, 1) == plain


def test_what_is_on_the_disks_of_hosts_is_told_before_anything_is_in_the_runs_directory(tmp_path):
    """It began in the middle: "; later ones may be on the hosts' own disks"."""
    directory = RunDirectory(tmp_path)
    (directory.path / ".identity").touch()
    assert directory.has_identity
    again = "may be on the hosts' own disks: start the run again with --resume"
    assert after_a_loss(directory, None) == f"checkpoints {again}"
    assert after_a_loss(directory, 4) == f"update 4 is saved in {tmp_path}, and later ones {again}"


def test_parameters_of_a_checkpoint_come_in_its_dtype_or_the_one_asked_for(tmp_path):
    config, run = load_config(write_tiny(tmp_path)), tmp_path / "run"
    leaf = jnp.arange(3, dtype=jnp.bfloat16)
    with CheckpointStore(RunDirectory(run).checkpoints, asynchronous=False) as store:
        store.save(1, {"params": {"w": leaf}}, {})
    abstract = {"w": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)}
    for dtype, wanted in ((None, "bfloat16"), ("float32", "float32")):
        params, _ = newest_params(run, config, abstract, dtype)
        assert params["w"].dtype == wanted and params["w"].tolist() == [0, 1, 2]


def test_a_config_that_a_run_changes_is_kept_under_the_update_until_which_it_held(tmp_path):
    """Every one that differs, also where a run returns to an update; the same one is not kept again."""
    directory, configs = RunDirectory(tmp_path / "run"), []
    for updates, until in ((4, 0), (4, 2), (6, 2), (8, 2)):
        config = load_config(write_tiny(tmp_path, run={"updates": updates}))
        directory.create(config, {}, None, until)
        configs.append((directory.path / "config.yaml").read_text())
    kept = {path.name: path.read_text() for path in directory.path.glob("config.until-*")}
    assert kept == {"config.until-2.yaml": configs[0], "config.until-2-2.yaml": configs[2]}
    assert load_config(directory.path).run.updates == 8
