"""Reads weights of 4 bits (MXFP4: 32 numbers with one exponent), as gpt-oss is published, as numbers of 16 bits.

A matrix [E, in, out] is stored in two tensors, "..._blocks" u8[E, out, in / 32, 16] of two numbers each, the first in
the low half, and "..._scales" u8[E, out, in / 32] of exponents plus 127. Each such number is one of bfloat16, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

BLOCKS, SCALES, DTYPE = "_blocks", "_scales", "MXFP4"
GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


def is_used(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is of weights in this format."""
    found = config.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


def joined(tensors: Mapping[str, tuple], config: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns the tensors with each matrix of 4 bits as one, (file, [E, in, out], "MXFP4"), in place of its two."""
    found = dict(tensors)
    for name, (file, shape, dtype) in tensors.items():
        whole = name.removesuffix(BLOCKS)
        _, scales, of_scales = tensors.get(whole + SCALES, (None, None, None))
        if name.endswith(BLOCKS) and scales == shape[:-1] and len(shape) == 4 and dtype == of_scales == "U8":
            del found[name], found[whole + SCALES]
            found[whole] = (file, (shape[0], shape[2] * GROUP, shape[1]), DTYPE)
    return found


def part(stored: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Returns part of a matrix, bfloat16. stored: the `Repository` as it is on the disk."""
    expert, row, column = (*index, *[slice(None)] * (3 - len(index)))
    # all that is in, and of the rest no more than the part
    found = numbers(*(stored.read(name + end, (expert, column)) for end in (BLOCKS, SCALES)))
    return found[:, row]


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns bfloat16[E, in, out] of blocks u8[E, out, in / 32, 16] and scales u8[E, out, in / 32]."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], GROUP)
    scaled = np.ldexp(_VALUES[pairs], scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
