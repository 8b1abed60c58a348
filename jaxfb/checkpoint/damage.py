"""Tells what is wrong with a checkpoint that cannot be read: the file, where it can be found, not a library's words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from etils import epath

from jaxfb.checkpoint.record import RECORD
from jaxfb.process.os_errors import chain
from jaxfb.refusal import StorageError

_CUT = "is cut short or unreadable"
_WIDTH = 150
_OF_AN_ARRAY = re.compile(r'Error reading [^"]*"([^"/]+)/c/')
_OF_THE_FILES = re.compile(r"\b(DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|FAILED_PRECONDITION)\b")


def damage(checkpoint: epath.Path, error: BaseException) -> str:
    """Returns what follows the name of a checkpoint whose reading failed: `is damaged: state/_METADATA is missing`."""
    if isinstance(error, StorageError):
        name, text = f"step {checkpoint.name} ", str(error)
        return text.removeprefix(name) if text.startswith(name) else f"cannot be used: {text}"
    found = next(_damaged_files(checkpoint), None) or _damaged_arrays(error)
    return f"is damaged: {found}" if found else f"cannot be read: {_words(list(chain(error))[-1])}"


def _damaged_files(checkpoint: epath.Path) -> Iterator[str]:
    """Yields what is wrong with the files that every checkpoint has, as far as one can tell without the library."""
    described = [f"{RECORD}/data.json", "state/_METADATA"]
    for name in [*described, "state/manifest.ocdbt"]:
        if not (checkpoint / name).exists():
            yield f"{name} is missing"
    arrays = checkpoint / "state" / "array_metadatas"
    also = [f"state/{arrays.name}/{path.name}" for path in (arrays.iterdir() if arrays.is_dir() else ())]
    for name in [*described, *also]:
        if (checkpoint / name).exists() and not _is_json(checkpoint / name):
            yield f"{name} {_CUT}"


def _is_json(path: epath.Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _damaged_arrays(error: BaseException) -> str | None:
    """Returns which array the storage library could not read, by its own message; None where it names none."""
    texts = [str(one) for one in chain(error)]
    array: Any = next(filter(None, map(_OF_AN_ARRAY.search, texts)), None)
    if array is not None:
        return f"the array {array[1]} {_CUT}"
    return f"a file of its arrays (state/) {_CUT}" if any(map(_OF_THE_FILES.search, texts)) else None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_WIDTH]
