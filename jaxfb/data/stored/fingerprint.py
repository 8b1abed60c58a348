"""Names files by every byte of them: a changed byte gives another name, whatever its size and times are.

Part of the data (which text is this?). Reading a file once at each start is cheap beside training on it, and
a name from size, time or samples would take an edited file for the old one. The weights of a model are sampled: they
are many times larger, and only compared among the processes of a job.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxfb.refusal import Refused

PART = 2**24  # bytes hashed together by one thread
SAMPLES, SAMPLE = 64, 2**20  # how many parts of a large file are sampled, and bytes of each
THREADS = min(8, os.cpu_count() or 1)  # hashing releases Python's lock


def fingerprints(paths: Iterable[Path]) -> list[str]:
    """Returns 16 hexadecimal digits for each file, of its size and all its bytes.

    Raises:
      ValueError: a file cannot be read.
    """
    try:
        return _hashed(paths, lambda size: range(0, size, PART), PART)
    except OSError as error:
        raise Refused(f"[data] {error.filename} cannot be read: {error.strerror}") from None


def sampled_fingerprints(paths: Iterable[Path]) -> list[str]:
    """Returns 16 hexadecimal digits for each file, of its size and all its bytes; of more than 64 MiB only samples.

    Those are 64 parts of 1 MiB, evenly over the file, its beginning and its end among them: enough to tell the weights
    of two models apart, not to find one changed byte.

    Raises:
      OSError: a file cannot be read.
    """
    return _hashed(paths, _samples, SAMPLE)


def _samples(size: int) -> Sequence[int]:
    """Returns where the parts of a file begin that are hashed."""
    if size <= SAMPLES * SAMPLE:
        return range(0, size, SAMPLE)
    return [number * (size - SAMPLE) // (SAMPLES - 1) for number in range(SAMPLES)]


def _hashed(paths: Iterable[Path], starts: Callable[[int], Sequence[int]], length: int) -> list[str]:
    """Returns the digits of each file. starts: of its parts, by its size. length: of a part in bytes."""
    sizes = [(path, path.stat().st_size) for path in paths]
    parts = [(path, start, length) for path, size in sizes for start in starts(size)]
    with ThreadPoolExecutor(THREADS) as threads:
        hashes = iter(list(threads.map(_of_part, parts)))
    return [_joined(size, [next(hashes) for _ in starts(size)]) for _, size in sizes]


def _of_part(part: tuple[Path, int, int]) -> bytes:
    path, start, length = part
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(length)).digest()


def _joined(size: int, parts: list[bytes]) -> str:
    return hashlib.sha256(str(size).encode() + b"".join(parts)).hexdigest()[:16]
