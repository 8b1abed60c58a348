"""What a full disk or a kill leaves of a file that is written again: all of before, or all that is new."""

import errno
import os
from pathlib import Path

import pytest

from jaxfb.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxfb.process.whole_file import write_whole
from jaxfb.training.run_dir import RunDirectory


@pytest.fixture
def full(monkeypatch):
    """A disk that takes five bytes of a file, and then no more."""

    def five(self, content, *_, **__):
        with self.open("wb") as file:
            file.write((content.encode() if isinstance(content, str) else content)[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", five)
    monkeypatch.setattr(Path, "write_text", five)


def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path, full):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"before")
    with pytest.raises(OSError) as raised:
        write_whole(path, "after this")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_text_and_bytes_are_written(tmp_path):
    for content in ("größer", b"\xff\0"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_the_tokenizer_of_a_saved_run_outlives_a_resume_on_a_full_disk(tmp_path, request):
    """It was cut short before anything was known of the disk, and the run could not be exported or sampled from."""
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    request.getfixturevalue("full")
    with pytest.raises(OSError):
        ByteTokenizer().save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer)


def test_a_name_that_was_cut_short_is_none(tmp_path):
    """Of an empty one, local checkpoints went to a place that all such runs shared."""
    run = RunDirectory(tmp_path)
    (tmp_path / ".identity").write_text("")
    assert len(run.identity(new=False)) == 32 == len(run.identity(new=False))
    assert run.identity(new=False) == run.identity(new=False) != run.identity(new=True)
