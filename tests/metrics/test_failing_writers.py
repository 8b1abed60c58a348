"""A writer that fails is reported by its name and costs no record: metrics.jsonl has all, of a full disk later."""

import errno
import os
import shutil
import sys
import types

import pytest
from fake_tensorboard import FakeTensorboard

from jaxfb.metrics import JsonlWriter, make_writers, read_jsonl


class Fails:
    """A writer that raises `error` from step 3 on, and `at_the_end` when it is closed."""

    def __init__(self, error=None, at_the_end=None):
        self.error, self.at_the_end, self.steps, self.closed = error, at_the_end, [], False

    def write(self, step, record):
        if self.error and step >= 3:
            raise self.error
        self.steps.append(step)

    def close(self):
        self.closed = True
        if self.at_the_end:
            raise self.at_the_end


def steps(path):
    return [record["step"] for record in read_jsonl(path / "metrics.jsonl")]


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ValueError("bad\nvalue"), SystemExit(3)])
def test_a_writer_that_fails_is_reported_by_name_and_the_others_go_on(tmp_path, monkeypatch, error):
    failing, sound, said = Fails(error), Fails(), []
    monkeypatch.setitem(sys.modules, "failing", types.SimpleNamespace(make=lambda *given: failing))
    writer = make_writers(["failing:make"], tmp_path, {}, None, [sound], say=said.append)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    assert steps(tmp_path) == sound.steps == [1, 2, 3, 4, 5] and failing.steps == [1, 2]
    (sentence,) = said
    assert sentence.startswith(f"[log] the writer 'failing:make' failed at step 3 ({type(error).__name__}: ")
    assert "test_failing_writers.py:" in sentence and "\n" not in sentence
    writer.close()
    assert failing.closed and sound.closed and said == [sentence, sentence]


def test_a_writer_that_fails_at_its_end_leaves_the_others_closed(tmp_path):
    failing, sound, said = Fails(at_the_end=RuntimeError("flush failed")), Fails(), []
    writer = make_writers([], tmp_path, {}, None, [failing, sound], say=said.append)
    writer.write(1, {})
    writer.close()
    assert sound.closed and steps(tmp_path) == [1]
    assert "'Fails' failed when it was closed (RuntimeError: flush failed" in said[0] and len(said) == 1


class CommError(Exception):
    """As the packages of services have them."""


@pytest.mark.parametrize("error", [ConnectionError, CommError])
def test_a_writer_that_cannot_begin_is_refused_by_name(tmp_path, monkeypatch, error):
    def make(directory, config, resume):
        raise error("no server")

    monkeypatch.setitem(sys.modules, "failing", types.SimpleNamespace(make=make))
    with pytest.raises(
        ValueError, match="writer 'failing:make' cannot begin .*no server.* out of log.writers"
    ):
        make_writers(["failing:make"], tmp_path, {})
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_package_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, name, package):
    """Such as tensorboardX beside another protobuf: the command ended with a traceback."""
    (tmp_path / f"{package}.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(
        ValueError, match=f"{package}, which cannot be imported .TypeError: Descriptors.*log.writers"
    ):
        make_writers([name], tmp_path, {})


@pytest.mark.parametrize("taken", [0, 10, -1, None], ids=lambda taken: f"{taken} bytes")
def test_what_a_full_disk_does_not_take_is_written_when_the_run_continues(tmp_path, monkeypatch, taken):
    """taken: bytes of the first record that fails which reached the file."""
    unwritten, beside = [], Fails()
    writer = make_writers([], tmp_path, {}, None, [beside], unwritten=unwritten)
    append = JsonlWriter._append

    def full(self, line):
        append(self, line[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer.write(1, {"loss": 1.0})
    monkeypatch.setattr(JsonlWriter, "_append", full)
    with pytest.raises(OSError, match="No space left"):
        writer.write(2, {"loss": float("nan"), "load": [1, 2]})
    monkeypatch.undo()
    writer.write(3, {"loss": 3.0})
    writer.close()
    assert [record["step"] for record in unwritten] == [2, 3] and beside.steps == [1, 2, 3]

    again = make_writers([], tmp_path, {}, 3, unwritten=unwritten)
    again.write(4, {"loss": 4.0})
    again.close()
    assert steps(tmp_path) == [1, 2, 3, 4] and unwritten == []
    assert read_jsonl(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss": None, "load": [1, 2]}


def test_a_metrics_file_that_is_removed_during_a_run_is_written_again_whole(tmp_path):
    """Its records went to a file without a name, and the run ended without one and without a word."""
    said = []
    writer = make_writers([], tmp_path, {}, say=said.append)
    writer.write(1, {"loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    writer.write(2, {"loss": 2.0})
    writer.write(3, {"loss": 3.0})
    writer.close()
    assert steps(tmp_path) == [1, 2, 3]
    (sentence,) = said
    assert sentence.startswith(f"[log] {tmp_path / 'metrics.jsonl'} was removed; it is written again")


def test_records_go_to_the_file_that_took_its_place(tmp_path):
    said = []
    writer = make_writers([], tmp_path, {}, say=said.append)
    writer.write(1, {})
    (tmp_path / "edited").write_text("")
    (tmp_path / "edited").replace(tmp_path / "metrics.jsonl")
    writer.write(2, {})
    writer.close()
    assert steps(tmp_path) == [2] and len(said) == 1 and "was replaced" in said[0]


def test_of_a_directory_that_is_gone_the_records_are_kept(tmp_path):
    unwritten = []
    writer = make_writers([], tmp_path / "run", {}, unwritten=unwritten)
    writer.write(1, {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        writer.write(2, {"loss": 2.0})
    writer.write(3, {"loss": 3.0})
    assert [record["step"] for record in unwritten] == [2, 3]


@pytest.mark.parametrize("removed", ["tensorboard", "tensorboard/*"])
def test_a_directory_or_file_of_tensorboard_that_is_removed_is_reported(tmp_path, monkeypatch, removed):
    FakeTensorboard(monkeypatch)
    said = []
    writer = make_writers(["tensorboard"], tmp_path, {}, say=said.append)
    writer.write(1, {"loss": 1.0})
    for path in tmp_path.glob(removed):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    writer.write(2, {"loss": 1.0})
    writer.close()
    assert "the writer 'tensorboard' failed at step 2" in said[0] and " was removed" in said[0]
    assert steps(tmp_path) == [1, 2]


def test_a_directory_of_wandb_that_is_removed_is_reported(tmp_path, monkeypatch):
    """What is not sent to a server is there alone: it went to a file without a name, without a word."""
    files, said = tmp_path / "wandb" / "offline-run", []
    run = types.SimpleNamespace(dir=str(files), log=lambda record, step: None, finish=lambda: None)
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **given: files.mkdir(parents=True) or run)
    )
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    writer = make_writers(["wandb"], tmp_path, {}, say=said.append)
    writer.write(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "wandb")
    writer.write(2, {"loss": 1.0})
    writer.close()
    assert f"the writer 'wandb' failed at step 2 (FileNotFoundError: {files} was removed" in said[0]


def test_a_full_disk_is_reported_with_the_record_that_tensorboard_lacks(tmp_path, monkeypatch):
    """Its own thread ended there without a word, and the run then waited for ever."""
    tensorboard, said = FakeTensorboard(monkeypatch), []
    writer = make_writers(["tensorboard"], tmp_path, {}, say=said.append)
    writer.write(1, {"loss": 1.0})
    assert tensorboard.events[1:] == [
        {"step": 1, "summary": ("loss", 1.0)}
    ]  # before close: a kill loses nothing
    tensorboard.full = True
    writer.write(2, {"loss": 1.0})
    writer.write(3, {"loss": 1.0})
    assert len(said) == 1 and "'tensorboard' failed at step 2 (OSError: [Errno 28] No space left" in said[0]
    assert steps(tmp_path) == [1, 2, 3]


def test_a_disk_that_is_full_from_the_beginning_is_refused(tmp_path, monkeypatch):
    FakeTensorboard(monkeypatch).full = True
    with pytest.raises(ValueError, match="'tensorboard' cannot begin .*No space left.* out of log.writers"):
        make_writers(["tensorboard"], tmp_path, {})
