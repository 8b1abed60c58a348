"""A directory of files that is made whole or not at all: one that holds a part of a model must not pass for a model."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxfb.process.os_errors import FULL
from jaxfb.refusal import Refused

NO_SPACE = FULL | {errno.EFBIG}
UNFINISHED = "unfinished.tmp"


def check_new(path: str | Path, option: str = "") -> Path:
    """Returns the path of a directory that is to be made, or is empty.

    option: of the command, that names the directory.

    Raises:
      ValueError: files lie there.
    """
    target = Path(path)
    if (target / UNFINISHED).is_dir():
        raise Refused(
            f"[hf] {target} has an unfinished model, which another process writes, or was killed while it wrote it; "
            f"remove {target}, or choose another{option}"
        )
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"[hf] {target} must be a new or an empty directory; choose another{option}")
    return target


@contextmanager
def new_directory(path: str | Path, option: str = "") -> Iterator[Path]:
    """Yields a directory to write files into; if an error or Ctrl-C ends the context, what was written is removed, so
    that the next attempt finds it new.

    Raises:
      ValueError: as `check_new`.
      OSError: of a full disk, it has the path.
    """
    target = check_new(path, option)
    was_there = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        yield target
    except BaseException as error:
        with suppress(OSError):
            _empty(target)
            if not was_there:
                target.rmdir()
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            error.filename, error.filename2 = str(target), None  # a copy names the file that it reads
        raise


@contextmanager
def whole_directory(path: str | Path, last: str) -> Iterator[Path]:
    """Yields a directory inside a new one, whose files get their places at the end of the context.

    Of a process that is killed before, nothing is there under the name of a model's file.

    last: the file without which no program reads the others; it gets its place after them.

    Raises:
      As `new_directory`.
    """
    with new_directory(path) as target:
        inside = target / UNFINISHED
        inside.mkdir()
        yield inside
        for file in sorted(inside.iterdir(), key=lambda file: (file.name == last, file.name)):
            os.replace(file, target / file.name)
        inside.rmdir()


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
