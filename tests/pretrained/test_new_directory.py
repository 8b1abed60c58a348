"""An import or an export that fails leaves nothing that could pass for a model, or that the next attempt meets."""

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from jaxfb.cli.commands import main
from jaxfb.pretrained.new_directory import UNFINISHED, check_new, new_directory
from jaxfb.pretrained.tensor_files import Tensor, TensorFile

GOLDEN = Path(__file__).parent.parent / "golden"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "what was read")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
@pytest.mark.parametrize("was_there", [True, False])
def test_what_was_written_is_removed(tmp_path, error, was_there):
    target = tmp_path / "model"
    if was_there:
        target.mkdir()
    with pytest.raises(type(error)), new_directory(target) as made:
        (made / "hf").mkdir()
        (made / "hf" / "config.json").write_text("{}")
        raise error
    assert target.exists() == was_there and not any(tmp_path.rglob("config.json"))
    if error is FULL:  # a copy names the file that it reads
        assert error.filename == str(target)


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(ValueError, match="link must be a new or an empty directory"):
        check_new(tmp_path / "link")


@pytest.mark.parametrize("command", ["import-hf", "export-hf", "export-hf --dtype float16"])
def test_a_second_attempt_finds_the_directory_new(tmp_path, command, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    verb, *options = command.split()
    assert main(["import-hf", str(GOLDEN / "hf_llama_tiny"), "--out", str(run)]) == 0
    given = ["--out", str(out)] if verb == "import-hf" else [str(out)]
    source = GOLDEN / "hf_llama_tiny" if verb == "import-hf" else run

    def full(*_, **__):
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        patch.setattr("jaxfb.pretrained.export._write_part", full)
        assert main([verb, str(source), *given, *options]) == 74
    assert f"No space left on device: {out}" in capsys.readouterr().err and not out.exists()
    assert main([verb, str(source), *given, *options]) == 0


@pytest.mark.parametrize("options", [[], ["--dtype", "float16"]], ids=["copied", "converted"])
def test_an_export_that_is_killed_leaves_no_file_of_a_model(tmp_path, options, monkeypatch, capsys):
    """The tokenizer and its template are written last; without them the directory would pass for a model."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import-hf", str(GOLDEN / "hf_llama_tiny"), "--out", str(run)]) == 0
    found, moved = [], []

    def killed(source, target):
        found.extend(path.name for path in out.iterdir())
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr("jaxfb.training.hugging_face.add_tokenizer", killed)
        assert main(["export-hf", str(run), str(out), *options]) == 74
    assert found == [UNFINISHED] and not out.exists()
    move = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: moved.append(Path(paths[1]).name) or move(*paths))
        assert main(["export-hf", str(run), str(out), *options]) == 0
    assert moved[-1] == "config.json" and set(moved) >= {path.name for path in out.iterdir()}
    assert f"wrote {out / 'config.json'}" in capsys.readouterr().out


def test_a_directory_with_an_unfinished_model_is_named(tmp_path):
    (tmp_path / "out" / UNFINISHED).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"has an unfinished model.*remove {tmp_path / 'out'}"):
        check_new(tmp_path / "out")


@pytest.mark.parametrize("command", ["import-hf", "export-hf"])
def test_sigterm_removes_what_was_written(tmp_path, command, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import-hf", str(GOLDEN / "hf_llama_tiny"), "--out", str(run)]) == 0
    given = [str(run), str(out)] if command == "export-hf" else [str(run / "hf"), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert main([command, *given]) == 143
    assert not out.exists()


def test_a_part_of_a_tensor_is_mapped_where_the_disk_has_space_for_it(tmp_path, monkeypatch):
    """A full disk has no other way to refuse a write into a mapping than to kill the process (SIGBUS)."""

    def full(*_):
        raise FULL

    file = TensorFile(tmp_path / "model", [Tensor("both", (4, 2), np.dtype("float32"))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            file.write("both", np.ones((2, 2)), (slice(0, 2),))
    file.write("both", np.ones((2, 2)), (slice(0, 2),))
    file.abandon()
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_be_closed_is_removed(tmp_path, monkeypatch):
    file = TensorFile(tmp_path / "model", [Tensor("one", (2,), np.dtype("float32"))])

    class Full:
        def close(self):
            raise FULL

    file._file.close()
    monkeypatch.setattr(file, "_file", Full())
    file.abandon()
    assert not any(tmp_path.iterdir())
