"""Documents to rows of one length: which tokens stand where, decided once and then looked up.

Part of the data (rows of the language-model microbatch). A document of n + 1 tokens has n slots: slot
t holds token t as input and token t + 1 as target, so no target ever crosses into another document and each
token but a document's first is predicted exactly once. Rows are filled with pieces of documents; row k is a
pure function of k.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxfb.data.stored.cache import build_once, digest
from jaxfb.data.stored.mapped import MappedFile, mapped_file
from jaxfb.data.stored.shards import OutsideVocabulary, TokenDocuments, TokenStream
from jaxfb.refusal import Refused

FORMAT = 1
INDEX_FILES = ("row_start", "offset", "length")


class Rows(Protocol):
    """Rows that can be asked for by number, of one source (`PackedRows`) or of several (`MixedRows`)."""

    sequence_length: int
    num_tokens: int
    fingerprint: str

    def __len__(self) -> int: ...

    def gather(self, rows: np.ndarray) -> dict[str, np.ndarray]: ...

    def select(self, rows: np.ndarray) -> Rows: ...

    @property
    def fill(self) -> float:
        """Returns share of the slots that are not padding."""
        return self.num_tokens / max(len(self) * self.sequence_length, 1)

    def spread(self, num_rows: int) -> Rows:
        """Returns at most `num_rows` rows, evenly spread over all: a cheaper evaluation that favours no document."""
        num_rows = min(num_rows, len(self))
        return self if num_rows == len(self) else self.select(np.arange(num_rows) * len(self) // num_rows)


@dataclass(frozen=True)
class PackedRows(Rows):
    """Random access to packed rows; a grain source (`len(rows)`, `rows[k]`).

    Row k holds pieces row_start[k] .. row_start[k + 1]; piece p is length[p] slots from stream[offset[p]] on.
    row_start: i64[num_rows + 1]. offset: i64[num_pieces]. length: i32[num_pieces].
    fingerprint: of tokens, packing and sequence length; two equal ones hold the same rows.
    joined: a row's tokens see all before them, whatever document they are of; its pieces are not segments.
    """

    stream: TokenStream
    row_start: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    sequence_length: int
    fingerprint: str
    joined: bool = False

    def __len__(self) -> int:
        return len(self.row_start) - 1

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: leaf[0] for name, leaf in self.gather(np.array([row])).items()}

    @cached_property
    def num_tokens(self) -> int:
        """Returns tokens that are predicted, over all rows."""
        return int(self.length.sum(dtype=np.int64))

    def gather(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns tokens, targets, loss_mask, segments and positions of `rows`, each [num_rows, sequence_length].

        rows: i64[num_rows]; -1 gives a row of zeros, which counts nothing. All i32, but loss_mask f32.
        Segments count the pieces of a row from 1, 0 is padding; positions restart at each piece. Joined rows come
        without segments, and their positions run from 0 to the end.
        """
        rows = np.asarray(rows, np.int64)
        piece, row_of_piece, segment = self._pieces(rows)
        length = self._look_up("length", piece).astype(np.int64)
        before = np.cumsum(length) - length
        first_of_row = np.searchsorted(row_of_piece, row_of_piece)
        column = before - before[first_of_row]
        position = _ranges(length)
        source = np.repeat(self._look_up("offset", piece), length) + position
        slot = np.repeat(row_of_piece * self.sequence_length + column, length) + position
        try:
            filled = {"tokens": self.stream.take(source), "targets": self.stream.take(source + 1)}
        except OutsideVocabulary as error:
            row = rows[slot[error.index] // self.sequence_length]
            raise Refused(f"{error}, in row {row}; the file has changed since it was checked") from None
        filled["loss_mask"] = np.ones((), np.float32)
        if self.joined:
            filled["positions"] = slot % self.sequence_length
        else:
            filled |= {"segments": np.repeat(segment, length), "positions": position}
        return {name: self._spread(len(rows), slot, values) for name, values in filled.items()}

    def select(self, rows: np.ndarray) -> PackedRows:
        """Returns these rows alone, renumbered from 0."""
        rows = np.asarray(rows, np.int64)
        piece, _, _ = self._pieces(rows)
        counts = self._look_up("row_start", rows + 1) - self._look_up("row_start", rows)
        return replace(
            self,
            row_start=np.concatenate([[0], np.cumsum(counts)]),
            offset=self._look_up("offset", piece),
            length=self._look_up("length", piece),
            fingerprint=digest([self.fingerprint, hashlib.blake2b(rows.tobytes()).hexdigest()]),
        )

    def _pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns piece, index into `rows`, and number within the row (from 1) of every piece of `rows`."""
        safe = np.maximum(rows, 0)
        first = self._look_up("row_start", safe)
        counts = np.where(rows < 0, 0, self._look_up("row_start", safe + 1) - first)
        within = _ranges(counts)
        return (
            np.repeat(first, counts) + within,
            np.repeat(np.arange(len(rows)), counts),
            within + 1,
        )

    @cached_property
    def _files(self) -> dict[str, MappedFile | None]:
        return {name: mapped_file(getattr(self, name)) for name in INDEX_FILES}

    def _look_up(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Returns elements of one array of the index, which is read by system calls where it is mapped from a file.

        Raises:
          ValueError: the file was cut short.
        """
        file = self._files[name]
        return getattr(self, name)[positions] if file is None or not len(positions) else file.take(positions)

    def _spread(self, num_rows: int, slot: np.ndarray, values: np.ndarray) -> np.ndarray:
        dtype = np.float32 if values.dtype == np.float32 else np.int32
        leaf = np.zeros(num_rows * self.sequence_length, dtype)
        leaf[slot] = values
        return leaf.reshape(num_rows, self.sequence_length)


def pack(documents: TokenDocuments, sequence_length: int, packing: str, cache: Path) -> PackedRows:
    """Packs documents into rows; the index is built once below `cache` and memory-mapped from there."""
    directory = cache / f"{packing}-{sequence_length}-v{FORMAT}"

    def build(draft: Path) -> dict:
        document, skip, length, row_start = pack_lengths(documents.length, sequence_length, packing)
        offset = documents.start[document] + skip
        for name, array in zip(INDEX_FILES, (row_start, offset, length.astype(np.int32)), strict=True):
            np.save(draft / f"{name}.npy", array)
        return {"format": FORMAT}

    build_once(directory, build)
    index = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in INDEX_FILES}
    fingerprint = digest([FORMAT, documents.fingerprint, sequence_length, packing])
    joined = packing == "stream"
    return PackedRows(
        documents.stream, **index, sequence_length=sequence_length, fingerprint=fingerprint, joined=joined
    )


def pack_lengths(lengths: np.ndarray, sequence_length: int, packing: str) -> tuple[np.ndarray, ...]:
    """Decides which piece of which document goes to which row.

    lengths: i64[num_documents], tokens of each.
    Returns document, skip and length of each piece, i64[num_pieces], sorted by row, and row_start
    i64[num_rows + 1]: the first piece of each row.
    """
    slots = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    whole = {"concat": _cut_stream, "stream": _cut_stream, "best_fit": _cut_long_documents}[packing]
    document, skip, length, row = whole(slots, sequence_length)
    num_rows = int(row.max()) + 1 if len(row) else 0
    return document, skip, length, np.searchsorted(row, np.arange(num_rows + 1))


def _cut_stream(slots: np.ndarray, sequence_length: int) -> tuple[np.ndarray, ...]:
    """Cuts the stream of all slots where a document or a row ends."""
    ends = np.concatenate([[0], np.cumsum(slots)])
    total = int(ends[-1])
    start = np.union1d(ends, np.arange(0, total, sequence_length))
    start = start[start < total]
    document = np.searchsorted(ends, start, side="right") - 1
    return document, start - ends[document], np.diff(np.append(start, total)), start // sequence_length


def _cut_long_documents(slots: np.ndarray, sequence_length: int) -> tuple[np.ndarray, ...]:
    """Cuts documents longer than a row into row-long pieces and a rest, and puts each into the fullest fitting row."""
    counts = -(-slots // sequence_length)
    document = np.repeat(np.arange(len(slots)), counts)
    skip = _ranges(counts) * sequence_length
    length = np.minimum(slots[document] - skip, sequence_length)
    row = _best_fit(length, sequence_length)
    _, first, row = np.unique(row, return_index=True, return_inverse=True)
    row = np.argsort(np.argsort(first))[row]  # rows in the order of their first piece
    order = np.argsort(row, kind="stable")
    return document[order], skip[order], length[order], row[order]


def _best_fit(length: np.ndarray, sequence_length: int) -> np.ndarray:
    """Returns the row of each piece: longest first, each into the fullest open row that still fits it."""
    row_of_piece = np.empty(len(length), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(sequence_length + 1)]  # by the space they have left
    lengths_left, num_rows = 0, 0  # bit r of `lengths_left` is set if some row has r slots left
    order = np.argsort(-length, kind="stable")
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        fitting = lengths_left >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            lengths_left ^= 0 if open_rows[left] else 1 << left
        else:
            left, row, num_rows = sequence_length, num_rows, num_rows + 1
        row_of_piece[piece] = row
        if left > size:
            open_rows[left - size].append(row)
            lengths_left |= 1 << (left - size)
    return row_of_piece


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0..counts[0]-1, 0..counts[1]-1, ... one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
