"""A directory of Hugging Face files: config.json and safetensors, opened lazily and checked before anything is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxfb.pretrained import fp8, mxfp4
from jaxfb.refusal import Refused, refuse, shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PACKED = {format.DTYPE: format for format in (mxfp4, fp8)}
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = (*FLOATS, *PACKED)
Stored = tuple[Path, tuple[int, ...], str]
"""The file of a tensor, its shape and its dtype."""


@dataclass(frozen=True)
class Repository:
    """An open directory.

    config: config.json. tensors: name -> (file, shape, dtype), from the files' headers alone; of weights of 4 or 8
      bits, as what they are read as. packed: likewise, as they are stored, where that is something else.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    packed: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """Returns the files of the weights, and their index where there is one."""
        weights = sorted({file for file, _, _ in (self.packed or self.tensors).values()})
        return weights if weights == [self.path / SINGLE] else [self.path / INDEX, *weights]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Returns a tensor, or part of it, reading no more of the file than that (of every other number: what is
        between them too).
        """
        from safetensors import safe_open

        index = index or (slice(None),)
        if (packed := PACKED.get(self.tensors[name][2])) is not None:
            return packed.part(Repository(self.path, self.config, self.packed), name, index)
        with safe_open(self.tensors[name][0], "numpy") as file:
            found = file.get_slice(name)[tuple(slice(one.start, one.stop) for one in index)]
        return found[tuple(slice(None, None, one.step) for one in index)]

    def check(self, wanted: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Refuses a directory whose tensors are not those wanted, before one is read.

        Raises:
          ValueError: lists what is missing, unexpected, of another shape or of a dtype that cannot be read.
        """
        unexpected = set(self.tensors) - set(wanted) - set(ignored)
        problems = [f"{name}: missing" for name in wanted if name not in self.tensors]
        problems += [f"{name}: unexpected" for name in sorted(unexpected)]
        for name, shape in wanted.items():
            _, found, dtype = self.tensors.get(name, (None, shape, "F32"))
            if found != shape:
                problems.append(f"{name}: shape {list(found)}, must be {list(shape)}")
            if dtype not in DTYPES:
                problems.append(f"{name}: dtype {dtype}, must be one of {', '.join(DTYPES)}")
        if problems:
            shown = problems[:8] + [f"and {len(problems) - 8} more"] * (len(problems) > 8)
            raise Refused(
                f"[hf] {self.path} does not contain what its config.json describes: {'; '.join(shown)}"
            )


def open_repository(directory: str | Path) -> Repository:
    """Opens a directory with config.json and model.safetensors, or several files and their index.

    Raises:
      ValueError: a file is missing or damaged, or the weights are pickled (.bin, .pt), which jaxfb never loads.
    """
    path = Path(directory)
    config = read_json(path / "config.json")
    tensors = _tensors(path)
    for packed in PACKED.values():
        if packed.is_used(config):
            return Repository(path, config, packed.joined(tensors, config), packed=tensors)
    return Repository(path, config, tensors)


def _tensors(path: Path) -> dict[str, Stored]:
    """Returns all tensors: those of model.safetensors where it exists, as in transformers, or of the index's files."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return _header(*_present(path, [SINGLE]))
    listed, found = _weight_map(path / INDEX), {}
    for file in _present(path, sorted(set(listed.values()))):
        for name, tensor in _header(file).items():
            found.setdefault(name, {})[file.name] = tensor
    for name, files in found.items():
        if len(files) > 1 and listed.get(name) not in files:
            raise Refused(
                f"[hf] {path / INDEX}: weight_map must name the file of {name}, which {' and '.join(files)} contain"
            )
    return {name: files.get(listed.get(name)) or next(iter(files.values())) for name, files in found.items()}


def _weight_map(index: Path) -> dict[str, str]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(one, str) for one in listed.values()):
        refuse(f"{index}: weight_map", listed, "an object with the file of each tensor", who="[hf]")
    if wrong := [name for name in listed.values() if Path(name).name != name]:
        raise Refused(f"[hf] {index} names files outside the directory: {shown(wrong[0])}")
    return listed


def _present(path: Path, names: list[str]) -> list[Path]:
    """Returns these files of a directory, all of which must exist."""
    # unlike pathlib's, False for what cannot be a name
    if missing := [name for name in names if not os.path.isfile(path / name)]:
        pickled = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        hint = (
            f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors" if pickled else ""
        )
        raise Refused(f"[hf] {path} has no {missing[0]}{hint}")
    return [path / name for name in names]


def _header(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: (file, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise Refused(f"[hf] {file} cannot be read as safetensors: {str(error).splitlines()[0]}") from None


def holds_weights(directory: Path) -> bool:
    """Returns whether weights lie there that `open_repository` would open."""
    return any((directory / name).is_file() for name in (SINGLE, INDEX))


def download_hint(path: Path) -> str:
    """Returns what to do where a path is a name of the Hugging Face hub or a model in its cache; else empty."""
    name = str(path)
    if snapshots := sorted(map(str, path.glob("snapshots/*"))):
        return f"; this is a model in the cache of the Hugging Face hub, whose files are in {' or '.join(snapshots)}"
    if path.parent.exists() or path.parts[0] in ("runs", "configs"):
        return ""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return ""
    fetch = f"hf download {name} --local-dir {name}"
    return f"; jaxfb downloads nothing: a model of the Hugging Face hub is fetched by `{fetch}`"


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: there is no such file, or no object in it.
    """
    if not file.is_file():
        raise Refused(f"[hf] there is no file {file}{download_hint(file.parent)}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, and of endless digits
        raise Refused(f"[hf] {file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refused(f"[hf] {file} must be a JSON object")
    return values
