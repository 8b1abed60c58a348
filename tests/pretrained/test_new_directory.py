"""An import or an export that fails leaves nothing that could pass for a model, or that the next attempt meets."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from jaxfb.cli.commands import main
from jaxfb.pretrained.new_directory import new_directory
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
