"""Ready token files: .bin with a JSON sidecar, or .npy, mapped into memory as they are.

Part of the data (for those who tokenised elsewhere). The .bin of nanoGPT, llm.c and Megatron fit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxfb.data.sources import SourceFile
from jaxfb.data.stored.cache import digest
from jaxfb.data.stored.fingerprint import fingerprints
from jaxfb.data.stored.sidecar import Sidecar, read_sidecar
from jaxfb.refusal import Refused

log = logging.getLogger(__name__)
CHUNK = 2**24  # tokens looked at together
PIECES_WITHOUT_END = 100


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids and the settings in its sidecar. `tokens`: integers [num_tokens]."""

    name: str
    tokens: np.ndarray
    vocab_size: int
    eos_id: int | None
    fingerprint: str


def open_token_files(files: list[SourceFile]) -> list[TokenFile]:
    """Maps files into memory.

    The sidecar of `x.bin` is `x.json`, or `meta.json` in the same directory: dtype (uint16, uint32, ...; .npy
    knows its own), vocab_size, and if there is one eos_id; `header_bytes` are skipped.
    Raises ValueError when a sidecar is missing or does not fit its file.
    """
    contents = fingerprints(file.path for file in files)
    return [_open(file, content) for file, content in zip(files, contents, strict=True)]


def _open(file: SourceFile, content: str) -> TokenFile:
    sidecar = read_sidecar(file.path)
    tokens = _map_npy(file.path) if file.path.suffix == ".npy" else _map_bin(file.path, sidecar)
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or len(tokens) < 2:
        raise Refused(
            f"[data] {file.path} must be one dimension of at least 2 integers, "
            f"got {tokens.dtype}{list(tokens.shape)}; save a flat array of token ids"
        )
    fingerprint = digest([content, str(tokens.dtype), sidecar.header_bytes])
    return TokenFile(str(file.name), tokens, sidecar.vocab_size, sidecar.eos_id, fingerprint)


def find_documents(file: TokenFile) -> np.ndarray:
    """Returns start and length of each document, i64[num_documents, 2]; neighbours share the end token between them.

    So each pair of neighbouring tokens belongs to exactly one document, whether the end token is written
    before or after a text. A file without end tokens is cut into equal pieces, to be split and shuffled.
    Raises ValueError when a token lies outside the vocabulary.
    """
    last = len(file.tokens) - 1
    ends = _end_positions(file)
    if file.eos_id is not None and not sum(map(len, ends)):
        log.warning("[data] %s has no eos_id=%d in it; it is cut into equal pieces", file.name, file.eos_id)
    edges = np.unique(np.concatenate([[0, last], *ends]))
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
        raise Refused(
            f"[data] {file.name} contains token {bad} at position {where}, outside [0, "
            f"vocab_size={file.vocab_size}); set it to {largest + 1} or more, or correct dtype in the sidecar"
        )


def _map_npy(path: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")  # np.load also opens archives of arrays, and pickles
    except (ValueError, EOFError, OSError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise Refused(
            f"[data] {path} is not a complete .npy file of numbers ({reason}); save it again"
        ) from None


def _map_bin(path: Path, sidecar: Sidecar) -> np.ndarray:
    dtype, size = np.dtype(sidecar.dtype), path.stat().st_size - sidecar.header_bytes
    if size < 2 * dtype.itemsize or size % dtype.itemsize:
        raise Refused(
            f"[data] {path} has {size} bytes after header_bytes={sidecar.header_bytes}, not a whole number of at "
            f"least 2 {dtype} tokens; correct dtype or header_bytes in its sidecar"
        )
    return np.memmap(path, dtype, mode="r", offset=sidecar.header_bytes)
