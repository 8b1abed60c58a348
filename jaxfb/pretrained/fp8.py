"""Reads weights of 8 bits with a scale for each block of a matrix, as DeepSeek-V3 and Qwen3-FP8 are published, as
numbers of 16 bits.

A matrix [out, in] is stored in two tensors: itself, as numbers with 4 bits of exponent and 3 of mantissa, and
"..._scale_inv" [ceil(out / rows), ceil(in / columns)], by which each block of `weight_block_size` is multiplied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SCALE, DTYPE, STORED = "_scale_inv", "blocks of F8_E4M3", "F8_E4M3"


def is_used(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is of weights in this format."""
    found = config.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "fp8" and _block(found) is not None


def _block(values: Mapping[str, Any]) -> tuple[int, int] | None:
    block = values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return None
    return block[0], block[1]


def joined(tensors: Mapping[str, tuple], config: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns the tensors with each matrix of 8 bits as one, (file, [out, in], DTYPE), in place of its two."""
    found, (rows, columns) = dict(tensors), _block(config["quantization_config"]) or (1, 1)
    for name, (file, shape, dtype) in tensors.items():
        if dtype != STORED or len(shape) != 2:
            continue
        _, scales, _ = tensors.get(name + SCALE, (None, None, None))
        if scales == (-(-shape[0] // rows), -(-shape[1] // columns)):
            del found[name + SCALE]
            found[name] = (file, shape, DTYPE)
    return found


def part(stored: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns part of a matrix, bfloat16; of the file no more is read than that, and its scales.

    stored: the `Repository` as it is on the disk.
    """
    file, shape, _ = stored.tensors[name]
    own = (*index, *[slice(None)] * (2 - len(index)))
    block = _block(stored.config["quantization_config"]) or (1, 1)
    begin, header = _header(file)  # numpy has no dtype of 8 bits for the library to return
    at = begin + header[name]["data_offsets"][0]
    numbers = np.memmap(file, np.uint8, "r", at, shape)[own].view(ml_dtypes.float8_e4m3fn)
    places = [np.arange(size)[one] // of for size, one, of in zip(shape, own, block, strict=True)]
    scales = stored.read(name + SCALE)[np.ix_(*places)].astype(np.float32)
    return (numbers.astype(np.float32) * scales).astype(ml_dtypes.bfloat16)


@lru_cache(maxsize=256)
def _header(file: Path) -> tuple[int, dict[str, Any]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))
