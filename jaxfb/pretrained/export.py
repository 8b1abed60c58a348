"""Writes parameters as a Hugging Face directory, tensor by tensor on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.models import mtp
from jaxfb.pretrained.architectures import architecture_of, sizes_of
from jaxfb.pretrained.companions import copy_companions
from jaxfb.pretrained.family import MULTI_TOKEN
from jaxfb.pretrained.names import Leaf, Part, leaves_of
from jaxfb.pretrained.new_directory import check_new, new_directory
from jaxfb.pretrained.repository import INDEX, SINGLE
from jaxfb.pretrained.tensor_files import NAMES, Tensor, TensorFile
from jaxfb.refusal import Refused
from jaxfb.trainable import name_of

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
      params: like `init_params(sizes_of(config), key)`, of any sharding; each is written in its dtype, those that
        transformers stores as parts of one tensor in the widest of theirs. config.json has the widest of all, in which
        transformers loads the model.
      config: a config.json, such as the one that the model was imported with.
      companions: a directory whose tokenizer, chat template and generation config are copied.
      file_bytes: a file is closed before it would grow beyond this.
    Raises:
      ValueError: the directory holds files, or the parameters are not those of the config.
    """
    arrays = {name_of(path): array for path, array in jax.tree_util.tree_leaves_with_path(params)}
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    dtypes = {path: array.dtype for path, array in arrays.items()}

    def parts_of(path: str, depth: int) -> Iterator[Any]:
        array = arrays[path]
        return (array[index] if index else array for index in np.ndindex(array.shape[:depth]))

    return export_arrays(directory, shapes, parts_of, dtypes, config, companions, file_bytes)


def export_arrays(
    directory: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    parts_of: Callable[[str, int], Iterable[Any]],
    dtype: Any | Mapping[str, Any],
    config: Mapping[str, Any],
    companions: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[Path]:
    """Does the same with arrays that are asked for layer by layer, so that one tensor at a time is in memory.

    Args:
      shapes: of all of our arrays by dotted path.
      parts_of: (dotted path, number of leading dims) -> array[0], array[1] and so on, of these dims in row order, or
        the whole array for 0 dims; called once for each array, in no particular order.
      dtype: of the tensors that are written, or that of each array by dotted path.
    """
    check_new(directory)
    depth = _depth(shapes)
    leaves = leaves_of(architecture_of(config), replace(sizes_of(config), mtp_depth=depth))
    _check_shapes(leaves, shapes)
    dtypes = _dtypes(leaves, dtype if isinstance(dtype, Mapping) else dict.fromkeys(leaves, dtype))
    name = str(_widest(dtypes.values()))
    values = {key: value for key, value in config.items() if key != "quantization_config"}
    values |= dict.fromkeys(
        [key for key in MULTI_TOKEN if key in values] or MULTI_TOKEN[: min(depth, 1)], depth
    )
    with new_directory(directory) as target:
        files = _files(target, leaves, dtypes, file_bytes)
        written = _written(files, leaves, parts_of, dtypes)
        index = [_write_index(target, files)] if len(files) > 1 else []
        carried = [] if companions is None else copy_companions(companions, target)
        # last, since no program reads the others without it
        _write_json(target / "config.json", {**values, "dtype": name, "torch_dtype": name})
    return [target / "config.json", *index, *written, *carried]


def _written(
    files: list[TensorFile],
    leaves: Mapping[str, Leaf],
    parts_of: Callable[[str, int], Iterable[Any]],
    dtypes: Mapping[str, np.dtype],
) -> list[Path]:
    """Returns the files once all arrays are in them."""
    place = {tensor: file for file in files for tensor in file.names}
    try:
        for path, leaf in leaves.items():
            arrays = parts_of(path, len(leaf.parts[0].index))
            for part, array in zip(leaf.parts, arrays, strict=True):
                _write_part(leaf, part, array, dtypes[part.name], place[part.name])
        return [file.close() for file in files]
    except BaseException:
        for file in files:
            file.abandon()
        raise


def _depth(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of layers of multi-token prediction among arrays by dotted path."""
    return len({path.split(".")[1] for path in shapes if path.startswith(f"{mtp.NAME}.")})


def _check_shapes(leaves: Mapping[str, Leaf], shapes: Mapping[str, tuple[int, ...]]) -> None:
    wanted = {(path, leaf.shape) for path, leaf in leaves.items()}
    if wrong := wanted ^ {(path, tuple(shape)) for path, shape in shapes.items()}:
        raise Refused(
            f"[hf] the parameters are not those that the config describes; they differ in {min(wrong)[0]}"
        )


def _dtypes(leaves: Mapping[str, Leaf], wanted: Mapping[str, Any]) -> dict[str, np.dtype]:
    """Returns the dtype of each tensor by name, the widest where several arrays are parts of it."""
    found: dict[str, list[np.dtype]] = {}
    for path, leaf in leaves.items():
        if (name := str(wanted[path])) not in NAMES:
            raise Refused(f"[hf] {path} cannot be written as {name}; it must be one of {', '.join(NAMES)}")
        for part in leaf.parts:
            found.setdefault(part.name, []).append(jnp.dtype(name))
    return {name: _widest(dtypes) for name, dtypes in found.items()}


def _widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Returns a dtype that has all numbers of each of them: of bfloat16 and float16 that is float32."""
    return reduce(jnp.promote_types, dtypes)


def _write_part(leaf: Leaf, part: Part, array: Any, dtype: Any, file: TensorFile) -> None:
    found = np.asarray(jax.device_get(array)).astype(dtype, copy=False)
    file.write(part.name, found.swapaxes(-1, -2) if leaf.turned else found, part.cut)


def _files(
    target: Path, leaves: Mapping[str, Leaf], dtypes: Mapping[str, np.dtype], file_bytes: int
) -> list[TensorFile]:
    """Opens the files, whose tensors are ordered layer by layer so that a file has whole layers."""
    parts = {part.name: part for leaf in leaves.values() for part in leaf.parts}
    ordered = sorted((part.index[:1], part.name, part.shape) for part in parts.values())
    tensors = [Tensor(name, shape, dtypes[name]) for _, name, shape in ordered]
    groups = _grouped(tensors, file_bytes)
    names = [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    names = [SINGLE] if len(groups) == 1 else names
    return [TensorFile(target / name, group) for name, group in zip(names, groups, strict=True)]


def _grouped(tensors: list[Tensor], file_bytes: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _write_index(target: Path, files: list[TensorFile]) -> Path:
    weight_map = {name: file.path.name for file in files for name in file.names}
    size = sum(file.nbytes for file in files)
    _write_json(target / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return target / INDEX


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
