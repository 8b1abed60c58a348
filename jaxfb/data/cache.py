"""Directories that are whole or absent: written beside their place, sealed, renamed.

Step of the story: data (where prepared tokens are kept between runs).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

SEAL = "meta.json"  # written last: the facts, and the size of every other file
ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_directory(configured: str | None = None) -> Path:
    """`configured`, else $JAXFB_CACHE/data, else $XDG_CACHE_HOME/jaxfb/data, else .cache/jaxfb-data."""
    if configured:
        return Path(configured)
    if os.environ.get("JAXFB_CACHE"):
        return Path(os.environ["JAXFB_CACHE"]) / "data"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "jaxfb" / "data"
    return Path(".cache") / "jaxfb-data"


def digest(value: object) -> str:
    """16 hexadecimal digits of a JSON-able value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def build_once(directory: Path, build: Callable[[Path], dict]) -> dict:
    """The facts of `directory`, built by `build(draft_directory) -> facts` unless it is already whole.

    A build that dies leaves only a hidden draft, which no reader looks at. Two processes that build at once
    both succeed: the first to finish is kept, and the second takes what the first wrote.
    """
    facts = read_whole(directory)
    if facts is not None:
        return facts
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned_drafts(directory)
    draft = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        _seal(draft, build(draft))
        return _publish(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_whole(directory: Path) -> dict | None:
    """The facts written with `directory`, or None where it is absent or a file is missing or cut short."""
    try:
        sealed = json.loads((directory / SEAL).read_text())
        whole = all((directory / name).stat().st_size == size for name, size in sealed["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return sealed["facts"] if whole else None


def _seal(draft: Path, facts: dict) -> None:
    files = sorted(path for path in draft.iterdir() if path.is_file())
    sizes = {path.name: path.stat().st_size for path in files}
    (draft / SEAL).write_text(json.dumps({"facts": facts, "sizes": sizes}, indent=1))
    for path in [*files, draft / SEAL, draft]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _publish(draft: Path, directory: Path) -> dict:
    if directory.exists() and read_whole(directory) is None:
        shutil.rmtree(directory, ignore_errors=True)  # damaged: rebuilt in `draft`
    try:
        os.rename(draft, directory)
    except OSError:
        if read_whole(directory) is None:
            raise
    return read_whole(directory)


def _remove_abandoned_drafts(directory: Path) -> None:
    for draft in directory.parent.glob(f".{directory.name}.*"):
        if time.time() - draft.stat().st_mtime > ABANDONED_AFTER_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)
