"""A safetensors file that is written tensor by tensor, in any order.

The `safetensors` library writes a file from all of its tensors at once, and so needs memory for them all. The format:
8 bytes with the length of a JSON header, the header, and the tensors' bytes at the offsets that the header lists.
"""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Tensor(NamedTuple):
    """A tensor that is to be written: its name in the file, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file with these tensors, whose values follow by `write`; it has its name once it is closed."""

    def __init__(self, path: Path, tensors: list[Tensor]):
        self.path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._tensors, self._at, at = {one.name: one for one in tensors}, {}, 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for one in tensors:
            offsets = [at, at + one.nbytes]
            header[one.name] = {
                "dtype": NAMES[str(one.dtype)],
                "shape": list(one.shape),
                "data_offsets": offsets,
            }
            self._at[one.name], at = at, offsets[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._begin, self.nbytes = 8 + len(text), at
        self._file = self._temporary.open("wb")
        self._missing = set(self._tensors)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._begin + at)
        self._file.flush()

    @property
    def names(self) -> list[str]:
        """Returns the names of its tensors, in their order."""
        return list(self._tensors)

    def write(self, name: str, value: np.ndarray, cut: tuple[slice, ...] = ()) -> None:
        """Writes a tensor, or a part of it, in the dtype that it was announced with."""
        wanted = self._tensors[name]
        if cut:
            at = self._begin + self._at[name]
            self._reserve(at, wanted.nbytes)
            np.memmap(self._temporary, wanted.dtype, "r+", at, wanted.shape)[cut] = value
        elif value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise RuntimeError(f"{name} is {value.dtype}{value.shape}, not {wanted.dtype}{wanted.shape}")
        else:
            self._file.seek(self._begin + self._at[name])
            self._file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        self._missing.discard(name)

    def _reserve(self, at: int, size: int) -> None:
        """Takes the space of a mapped part from the disk: where a full one has none, the mapping kills the process."""
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file.fileno(), at, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that does not reserve
                    raise

    def close(self, holes: bool = False) -> Path:
        """Gives the file its name, and returns it. holes: tensors that were not written are zeros."""
        if self._missing and not holes:
            raise RuntimeError(f"{self.path.name} lacks {sorted(self._missing)[0]}")
        self._file.close()
        os.replace(self._temporary, self.path)
        return self.path

    def abandon(self) -> None:
        """Removes what was written."""
        with suppress(OSError):  # of what is still to be written, on a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)
