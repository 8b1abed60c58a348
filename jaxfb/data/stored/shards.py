"""Tokenised documents, memory-mapped, with the boundaries between them.

Part of the data (documents of token ids, ready to be packed into rows). What is on disk: tokens in one
or several flat files, and for each split the start and length of every document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxfb.data.config import DataConfig
from jaxfb.data.sources import DROPPED, HELD_OUT, TRAIN, SourceFile, find_files
from jaxfb.data.stored.cache import digest
from jaxfb.data.stored.fingerprint import fingerprints
from jaxfb.data.stored.mapped import mapped_file
from jaxfb.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jaxfb.refusal import Refused

FORMAT = 2  # raise it when the files change meaning
SPLITS = {"train": TRAIN, "held_out": HELD_OUT}


class OutsideVocabulary(Refused):
    """A token that no embedding has. index: which of the positions asked for holds it."""

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


class TokenStream:
    """Several memory-mapped arrays of token ids, addressed as one.

    names: of the arrays, for messages. vocab_size: ids are checked against it whenever they are read, since a mapped
    file may change at any time; None checks nothing. They are read by system calls, since a file may be cut too.
    """

    def __init__(self, arrays: list[np.ndarray], names: Sequence[str] = (), vocab_size: int | None = None):
        self._arrays, self._names, self._vocab_size = arrays, names, vocab_size
        self._bases = np.cumsum([0] + [len(array) for array in arrays])
        self._files = [mapped_file(array) for array in arrays]

    def __len__(self) -> int:
        return int(self._bases[-1])

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Returns i32[n]: the tokens at i64[n] positions.

        Raises:
          OutsideVocabulary: one of them is not an id; it names the file and the place in it.
          ValueError: a file was cut short.
        """
        if len(self._arrays) == 1:
            return self._checked(self._read(0, positions), positions, 0)
        tokens = np.empty(len(positions), np.int32)
        which = np.searchsorted(self._bases, positions, side="right") - 1
        for k in np.unique(which):
            here = np.flatnonzero(which == k)
            local = positions[here] - self._bases[k]
            tokens[here] = self._checked(self._read(int(k), local), local, int(k), here)
        return tokens

    def _read(self, array: int, positions: np.ndarray) -> np.ndarray:
        file = self._files[array]
        return self._arrays[array][positions] if file is None or not len(positions) else file.take(positions)

    def _checked(self, tokens: np.ndarray, positions: np.ndarray, array: int, index=None) -> np.ndarray:
        size = self._vocab_size
        if size is not None and len(tokens) and (int(tokens.max()) >= size or int(tokens.min()) < 0):
            bad = int(np.argmax((tokens >= size) | (tokens < 0)))
            raise OutsideVocabulary(
                f"[data] {self._names[array]} contains token {int(tokens[bad])} at position {int(positions[bad])}, "
                f"outside [0, vocab_size={size})",
                bad if index is None else int(index[bad]),
            )
        return tokens.astype(np.int32)


@dataclass(frozen=True)
class TokenDocuments:
    """The documents of one split. Document d is stream[start[d] : start[d] + length[d]], its end tokens included.

    start, length: i64[num_documents]. num_bytes: of the text, None where it is not known.
    fingerprint: of the tokens and boundaries; the same on every machine with the same text and tokenizer.
    """

    stream: TokenStream
    start: np.ndarray
    length: np.ndarray
    num_bytes: int | None
    fingerprint: str

    @cached_property
    def num_tokens(self) -> int:
        """Returns tokens that are predicted: all but the first of each document."""
        return int((self.length - 1).sum())


@dataclass(frozen=True)
class Shards:
    """The two splits of a corpus, its tokenizer (None for token files without one), and their directory."""

    train: TokenDocuments
    held_out: TokenDocuments
    tokenizer: Tokenizer | None
    vocab_size: int
    directory: Path


def files_of(config: DataConfig) -> tuple[list[SourceFile], list[SourceFile]]:
    """Returns the files of a source, and those of which everything is held out."""
    files = find_files(config.source, config.path, config.max_bytes)
    return files, find_files(config.source, config.held_out_path) if config.held_out_path else []


def shards_key(
    config: DataConfig, files: list[SourceFile], held_out_files: list[SourceFile], tokens: object
) -> str:
    """Names the shards of these files under these settings; every byte of the files counts."""
    both = [*files, *held_out_files]
    contents = fingerprints(file.path for file in both)
    stamps = [[file.name, content] for file, content in zip(both, contents, strict=True)]
    settings = [config.source, config.text_field, config.held_out_fraction, config.max_bytes, len(files)]
    return digest([FORMAT, settings, tokens, stamps])


def given_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer that `config` names; None for "bpe", which has yet to be trained."""
    if config.tokenizer == "bpe":
        return None
    return ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)


def write_documents(draft: Path, name: str, documents: np.ndarray, num_bytes: int | None, state) -> dict:
    """Stores start and length of each document, i64[num_documents, 2]; `state` has hashed the tokens.

    Returns the facts from which `open_documents` continues.
    """
    np.save(draft / f"{name}.documents.npy", documents)
    state.update(documents.tobytes())
    return {"num_bytes": num_bytes, "fingerprint": state.hexdigest()}


def open_documents(directory: Path, name: str, facts: dict, stream: TokenStream) -> TokenDocuments:
    documents = np.load(directory / f"{name}.documents.npy", mmap_mode="r")
    return TokenDocuments(stream, documents[:, 0], documents[:, 1], **facts)


def check_sides(config: DataConfig, sides: np.ndarray) -> None:
    """Raises ValueError when a split of these documents has an empty side."""
    num_held_out = int((sides == HELD_OUT).sum())
    if not (sides == TRAIN).any():
        raise Refused(
            f"[data] source={config.source!r} path={config.path} max_bytes={config.max_bytes} leaves no "
            f"document to train on (of {len(sides)} read, {num_held_out} are held out); give it more text"
        )
    if config.held_out_fraction > 0 and num_held_out == 0:
        repeated = int((sides == DROPPED).sum())
        more = f" ({repeated} more repeat their text)" if repeated else ""
        raise Refused(
            f"[data] held_out_fraction={config.held_out_fraction} of {len(sides) - repeated} document(s) holds out "
            f"nothing{more}; give held_out_path, more documents, or held_out_fraction=0"
        )
