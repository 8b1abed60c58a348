"""Directories that are whole or absent: written beside their place, sealed with a fingerprint of each file, renamed.

Part of the data (where prepared tokens are kept between runs).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from jaxfb.data.stored.fingerprint import fingerprints
from jaxfb.refusal import Refused

log = logging.getLogger(__name__)
SEAL = "meta.json"  # written last: the facts, the fingerprint of every other file, and a digest of both
ABANDONED_AFTER_SECONDS = 24 * 3600


def cache_directory(configured: str | None = None) -> Path:
    """Returns `configured`, else $JAXFB_CACHE/data, else $XDG_CACHE_HOME/jaxfb/data, else .cache/jaxfb-data."""
    if configured:
        return Path(os.path.expanduser(configured))
    if os.environ.get("JAXFB_CACHE"):
        return Path(os.environ["JAXFB_CACHE"]) / "data"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "jaxfb" / "data"
    return Path(".cache") / "jaxfb-data"


def is_chosen_or_there() -> bool:
    """Returns whether the environment names a cache, or the working directory has one."""
    chosen = any(os.environ.get(name) for name in ("JAXFB_CACHE", "XDG_CACHE_HOME"))
    return chosen or cache_directory().exists()


def digest(value: object) -> str:
    """Returns 16 hexadecimal digits of a JSON-able value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def build_once(directory: Path, build: Callable[[Path], dict]) -> dict:
    """Returns the facts of `directory`, built by `build(draft_directory) -> facts` unless it is already whole.

    A build that dies leaves only a hidden draft, which no reader looks at. Two processes that build at once
    both succeed: the first to finish is kept, and the second takes what the first wrote.
    """
    facts = read_whole(directory)
    if facts is not None:
        return facts
    if directory.exists():
        log.warning("[data] the cache %s is damaged; it is made again", directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_drafts(directory)
        draft = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            _seal(draft, build(draft))
            return _publish(draft, directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise Refused(
            f"[data] the cache {directory} cannot be made: {error}; free some space, or set data.cache_dir"
        ) from error


def read_whole(directory: Path) -> dict | None:
    """Returns the facts written with `directory`, or None where it is absent or any byte of a file is not what was
    written.
    """
    try:
        sealed = json.loads((directory / SEAL).read_text())
        content = {name: sealed[name] for name in ("facts", "files")}
        if sealed not in (content, _with_digest(content)):  # older ones have no digest
            return None
        names = list(sealed["files"])
        whole = fingerprints(directory / name for name in names) == [sealed["files"][name] for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sealed["facts"] if whole else None


def _seal(draft: Path, facts: dict) -> None:
    files = sorted(path for path in draft.iterdir() if path.is_file())
    named = dict(zip((path.name for path in files), fingerprints(files), strict=True))
    content = json.loads(json.dumps({"facts": facts, "files": named}))
    (draft / SEAL).write_text(json.dumps(_with_digest(content), indent=1))
    for path in [*files, draft / SEAL, draft]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _with_digest(content: dict) -> dict:
    return {**content, "digest": digest(content)}


def _publish(draft: Path, directory: Path) -> dict:
    if directory.exists() and read_whole(directory) is None:
        shutil.rmtree(directory, ignore_errors=True)  # damaged: rebuilt in `draft`
    try:
        os.rename(draft, directory)
    except OSError:
        if (facts := read_whole(directory)) is None:
            raise
        return facts
    if (facts := read_whole(directory)) is None:
        raise OSError(f"{directory} changed while it was written")
    return facts


def _remove_abandoned_drafts(directory: Path) -> None:
    for draft in directory.parent.glob(f".{directory.name}.*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just finished it
            if time.time() - draft.stat().st_mtime > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(draft, ignore_errors=True)
