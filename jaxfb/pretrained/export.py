"""Writes parameters as a Hugging Face directory, in files of bounded size, one tensor at a time on the host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.architectures import architecture_of, sizes_of
from jaxfb.pretrained.family import Architecture
from jaxfb.pretrained.names import Leaf, Part, leaves_of, path_name
from jaxfb.pretrained.repository import COMPANIONS, INDEX, SINGLE
from jaxfb.refusal import Refused

PyTree = Any
FILE_BYTES = 5 * 10**9


def export_model(
    directory: str | Path,
    params: PyTree,
    config: Mapping[str, Any],
    companions: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Writes config.json and safetensors that transformers loads; returns the files.

    Args:
      directory: new or empty.
      params: like `init_params(sizes_of(config), key)`, of any sharding; written in their dtype.
      config: a config.json, such as the one that the model was imported with.
      companions: a directory whose tokenizer, chat template and generation config are copied.
      file_bytes: a file is closed before it would grow beyond this.
    Raises:
      ValueError: the directory holds files, or the parameters are not those of the config.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"[hf] {target} must be a new or an empty directory; choose another")
    architecture, sizes = architecture_of(config), sizes_of(config)
    tensors = _tensors(architecture, sizes, params)
    target.mkdir(parents=True, exist_ok=True)
    dtype = str(tensors[0].dtype)
    _write_json(target / "config.json", {**config, "dtype": dtype, "torch_dtype": dtype})
    written = [target / "config.json", *_write_tensors(target, tensors, file_bytes)]
    for name in COMPANIONS:
        if companions is not None and (companions / name).is_file():
            written.append(Path(shutil.copyfile(companions / name, target / name)))
    return written


class _Tensor(NamedTuple):
    """A tensor that is fetched from the devices when it is written. sources: (leaf, part of it, our array)."""

    name: str
    sources: list[tuple[Leaf, Part, jax.Array]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sources[0][1].shape

    @property
    def dtype(self) -> np.dtype:
        return self.sources[0][2].dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        if len(self.sources) == 1:
            return self._part(*self.sources[0])
        whole = np.empty(self.shape, self.dtype)
        for leaf, part, array in self.sources:
            whole[part.cut] = self._part(leaf, part, array)
        return whole

    def _part(self, leaf: Leaf, part: Part, array: jax.Array) -> np.ndarray:
        found = np.asarray(jax.device_get(array[part.index] if part.index else array))
        return np.ascontiguousarray(found.swapaxes(-1, -2) if leaf.turned else found)


def _tensors(architecture: Architecture, sizes: TransformerConfig, params: PyTree) -> list[_Tensor]:
    leaves = leaves_of(architecture, sizes)
    arrays = {path_name(path): array for path, array in jax.tree_util.tree_leaves_with_path(params)}
    wrong = {
        p
        for p in {*leaves, *arrays}
        if p not in leaves or p not in arrays or leaves[p].shape != arrays[p].shape
    }
    if wrong:
        raise Refused(
            f"[hf] the parameters are not those that the config describes; they differ in {sorted(wrong)[0]}"
        )
    found: dict[str, _Tensor] = {}
    for path, leaf in leaves.items():
        for part in leaf.parts:
            found.setdefault(part.name, _Tensor(part.name, [])).sources.append((leaf, part, arrays[path]))
    return list(found.values())


def _write_tensors(target: Path, tensors: list[_Tensor], file_bytes: int) -> list[Path]:
    from safetensors.numpy import save_file

    groups = _grouped(sorted(tensors, key=_order), file_bytes)
    names = [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    names = [SINGLE] if len(groups) == 1 else names
    for name, group in zip(names, groups, strict=True):
        save_file({tensor.name: tensor.fetch() for tensor in group}, target / name, metadata={"format": "pt"})
    if len(groups) == 1:
        return [target / SINGLE]
    weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    size = sum(tensor.nbytes for tensor in tensors)
    _write_json(target / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return [target / INDEX, *(target / name for name in names)]


def _order(tensor: _Tensor) -> tuple:
    """Orders leaves layer by layer, so that a file has whole layers."""
    return tensor.sources[0][1].index[:1], tensor.name


def _grouped(tensors: list[_Tensor], file_bytes: int) -> list[list[_Tensor]]:
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + tensor.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
