"""Names files by every byte of them: a changed byte gives another name, whatever its size and times are.

Part of the data (which text is this?). Reading a file once at each start is cheap beside training on it, and
a name from size, time or samples would take an edited file for the old one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxfb.refusal import Refused

PART = 2**24  # bytes hashed together by one thread
THREADS = min(8, os.cpu_count() or 1)  # hashing releases Python's lock


def fingerprints(paths: Iterable[Path]) -> list[str]:
    """Returns 16 hexadecimal digits for each file, of its size and all its bytes.

    Raises:
      ValueError: a file cannot be read.
    """
    try:
        sizes = [(path, path.stat().st_size) for path in paths]
        parts = [(path, start) for path, size in sizes for start in range(0, size, PART)]
        with ThreadPoolExecutor(THREADS) as threads:
            hashes = iter(list(threads.map(_of_part, parts)))
    except OSError as error:
        raise Refused(f"[data] {error.filename} cannot be read: {error.strerror}") from None
    return [_joined(size, [next(hashes) for _ in range(0, size, PART)]) for _, size in sizes]


def _of_part(part: tuple[Path, int]) -> bytes:
    path, start = part
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(PART)).digest()


def _joined(size: int, parts: list[bytes]) -> str:
    return hashlib.sha256(str(size).encode() + b"".join(parts)).hexdigest()[:16]
