"""Writes a file whole or not at all: a full disk or a kill leaves what was there before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNFINISHED = ".tmp"


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file beside its place and renames it.

    Where the disk takes no more, what was written of it is removed, and the OSError has the path.
    """
    path = Path(path)
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
