"""Ready token files: .bin with a JSON sidecar, or .npy, mapped into memory as they are.

Step of the story: data (for those who tokenised elsewhere). The .bin of nanoGPT, llm.c and Megatron fit.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxfb.data.sources import SourceFile

CHUNK = 2**24  # tokens looked at together
PIECES_WITHOUT_END = 100
SIDECAR = '{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}'


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids and what its sidecar says of it. `tokens`: integers [num_tokens]."""

    name: str
    tokens: np.ndarray
    vocab_size: int
    eos_id: int | None
    fingerprint: str


def open_token_file(file: SourceFile) -> TokenFile:
    """Maps one file into memory.

    The sidecar of `x.bin` is `x.json`, or `meta.json` in the same directory: dtype (uint16, uint32, ...; .npy
    knows its own), vocab_size, and if there is one eos_id; `header_bytes` are skipped.
    Raises ValueError when the sidecar is missing or does not fit the file.
    """
    sidecar = _read_sidecar(file.path)
    if file.path.suffix == ".npy":
        tokens = np.load(file.path, mmap_mode="r", allow_pickle=False)
    else:
        tokens = _map_bin(file.path, np.dtype(sidecar.get("dtype", "uint16")), sidecar.get("header_bytes", 0))
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or len(tokens) < 2:
        raise ValueError(
            f"[data] {file.path} must be one dimension of at least 2 integers, "
            f"got {tokens.dtype}{list(tokens.shape)}; save a flat array of token ids"
        )
    fingerprint = _sampled_fingerprint(file)
    return TokenFile(file.name, tokens, sidecar["vocab_size"], sidecar.get("eos_id"), fingerprint)


def find_documents(file: TokenFile) -> np.ndarray:
    """Start and length of each document, i64[num_documents, 2]; neighbours share the end token between them.

    So each pair of neighbouring tokens belongs to exactly one document, whether the end token is written
    before or after a text. A file without end tokens is cut into equal pieces, to be split and shuffled.
    Raises ValueError when a token lies outside the vocabulary.
    """
    last = len(file.tokens) - 1
    edges = np.unique(np.concatenate([[0, last], *_end_positions(file)]))
    if len(edges) == 2:
        piece = max(1024, len(file.tokens) // PIECES_WITHOUT_END)
        edges = np.unique(np.append(np.arange(0, last, piece), last))
    return np.stack([edges[:-1], np.diff(edges) + 1], axis=1).astype(np.int64)


def _end_positions(file: TokenFile) -> list[np.ndarray]:
    ends = []
    for start in range(0, len(file.tokens), CHUNK):
        chunk = file.tokens[start : start + CHUNK]
        _check_ids(chunk, start, file)
        if file.eos_id is not None:
            ends.append(np.flatnonzero(chunk == file.eos_id) + start)
    return ends


def _check_ids(chunk: np.ndarray, start: int, file: TokenFile) -> None:
    largest, smallest = int(chunk.max()), int(chunk.min())
    if largest >= file.vocab_size or smallest < 0:
        bad = largest if largest >= file.vocab_size else smallest
        where = start + int(np.argmax(chunk == bad))
        raise ValueError(
            f"[data] {file.name} holds token {bad} at position {where}, outside [0, "
            f"vocab_size={file.vocab_size}); set it to {largest + 1} or more, or correct dtype in the sidecar"
        )


def _read_sidecar(path: Path) -> dict:
    for candidate in (path.with_suffix(".json"), path.parent / "meta.json"):
        if candidate.is_file():
            sidecar = json.loads(candidate.read_text())
            if isinstance(sidecar, dict) and isinstance(sidecar.get("vocab_size"), int):
                return sidecar
            raise ValueError(f"[data] {candidate} must name vocab_size, such as {SIDECAR}")
    name = path.with_suffix(".json").name
    raise ValueError(f"[data] {path} needs {name} or meta.json beside it, such as {SIDECAR}")


def _map_bin(path: Path, dtype: np.dtype, header_bytes: int) -> np.ndarray:
    size = path.stat().st_size - header_bytes
    if size < 2 * dtype.itemsize or size % dtype.itemsize:
        raise ValueError(
            f"[data] {path} has {size} bytes after header_bytes={header_bytes}, not a whole number of at "
            f"least 2 {dtype} tokens; correct dtype or header_bytes in its sidecar"
        )
    return np.memmap(path, dtype, mode="r", offset=header_bytes)


def _sampled_fingerprint(file: SourceFile) -> str:
    """Of the size and 64 evenly spread blocks: a terabyte is not read to name it."""
    state, block = hashlib.blake2b(str(file.num_bytes).encode(), digest_size=8), 2**16
    with file.path.open("rb") as stream:
        for k in range(64):
            stream.seek(k * max(file.num_bytes - block, 0) // 63)
            state.update(stream.read(block))
    return state.hexdigest()
