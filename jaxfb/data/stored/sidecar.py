"""Reads the JSON file that describes a token file, and checks every value.

Part of the data (for those who tokenised elsewhere).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxfb.refusal import Refused

EXAMPLE = '{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}'
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
MAX_VOCAB = 2**31  # ids are 32-bit integers on the device


@dataclass(frozen=True)
class Sidecar:
    """The values of one sidecar.

    vocab_size:   ids lie in [0, vocab_size). eos_id: ends a document; None where there is no such token.
    dtype:        of a .bin file. header_bytes: to be skipped at its start.
    """

    vocab_size: int
    eos_id: int | None = None
    dtype: str = "uint16"
    header_bytes: int = 0


def read_sidecar(path: Path) -> Sidecar:
    """Returns what `x.json`, or `meta.json` in the same directory, contains about the token file `x.bin` or `x.npy`.

    Keys that have nothing to do with these are left to their owners.

    Raises:
      ValueError: there is no sidecar, or a value in it is not what it must be.
    """
    for candidate in (path.with_suffix(".json"), path.parent / "meta.json"):
        if candidate.is_file():
            values = _values(candidate)
            _check(values, candidate)
            return Sidecar(**{f.name: values[f.name] for f in fields(Sidecar) if f.name in values})
    name = path.with_suffix(".json").name
    raise Refused(f"[data] {path} needs {name} or meta.json beside it, such as {EXAMPLE}")


def _values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise Refused(f"[data] {path} is not JSON ({reason}); write such as {EXAMPLE}") from None
    if not isinstance(values, dict) or "vocab_size" not in values:
        raise Refused(f"[data] {path} must name vocab_size, such as {EXAMPLE}")
    return values


def _check(values: dict[str, Any], path: Path) -> None:
    known = [field.name for field in fields(Sidecar)]
    for key in values:
        near = ["eos_id"] if key.startswith("eos") else difflib.get_close_matches(key, known, 1, 0.8)
        if key not in known and near and near[0] not in values:
            raise Refused(f"[data] {path} has {key}={values[key]!r}; did you mean {near[0]}?")
    size = values["vocab_size"]
    _check_int(path, "vocab_size", size, 1, MAX_VOCAB)
    if values.get("eos_id") is not None:
        _check_int(path, "eos_id", values["eos_id"], 0, size, "or null where there is none")
    _check_int(path, "header_bytes", values.get("header_bytes", 0), 0, 2**63)
    if values.get("dtype", "uint16") not in DTYPES:
        raise Refused(f"[data] {path} has dtype={values['dtype']!r}; use one of {', '.join(DTYPES)}")


def _check_int(path: Path, name: str, value: Any, low: int, stop: int, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < stop:
        hint = f", {more}" if more else ""
        raise Refused(f"[data] {path} has {name}={value!r}; it must be an integer in [{low}, {stop}){hint}")
