"""Text to shards: split by document, train the tokenizer on the train side, encode, store.

Part of the data (documents of text become documents of token ids, once). The source is read again for
each of these steps rather than held in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from jaxfb.data.config import DataConfig
from jaxfb.data.sources import TRAIN, Document, hash_of, read_documents, split_documents
from jaxfb.data.stored.cache import build_once, digest
from jaxfb.data.stored.shards import (
    FORMAT,
    SPLITS,
    Shards,
    TokenStream,
    check_sides,
    files_of,
    given_tokenizer,
    open_documents,
    shards_key,
    write_documents,
)
from jaxfb.data.tokenizer import Tokenizer, load_tokenizer, sampled, train_bpe, warn_of_unknown
from jaxfb.process.position import here

ENCODE_CHARACTERS = 4 * 2**20  # text handed to the tokenizer at a time


def open_text_shards(config: DataConfig, cache: Path) -> Shards:
    """Finds the shards of a source of text in `cache`, or writes them there."""
    files, held_out_files = files_of(config)
    tokenizer = given_tokenizer(config)
    identity = tokenizer.fingerprint if tokenizer else f"bpe-{config.vocab_size}"
    directory = cache / f"text-{shards_key(config, files, held_out_files, identity)}"
    facts = build_once(directory, lambda draft: _write(config, tokenizer, files, held_out_files, draft))
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    warn_of_unknown(f"[data] tokenizer={config.tokenizer!r}", *facts["unknown"])
    splits = {
        name: open_documents(
            directory, name, facts[name], _stream(directory / f"{name}.bin", facts, tokenizer)
        )
        for name in SPLITS
    }
    return Shards(**splits, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, directory=directory)


def _stream(path: Path, facts: dict, tokenizer: Tokenizer) -> TokenStream:
    dtype = facts["dtype"]
    tokens = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
    return TokenStream([tokens], [str(path)], tokenizer.vocab_size)


def common_tokenizer(configs: Sequence[DataConfig], cache: Path) -> Path:
    """Returns the file of a tokenizer trained on the train sides of several sources, from `cache` or written there."""
    found = [files_of(config) for config in configs]
    keys = [
        shards_key(config, *files, f"bpe-{config.vocab_size}")
        for config, files in zip(configs, found, strict=True)
    ]
    directory = cache / f"tokenizer-{digest(keys)}"

    def build(draft: Path) -> dict:
        sides = [_sides_of(config, *files) for config, files in zip(configs, found, strict=True)]
        texts = (document.text for on_side in sides for document in on_side(TRAIN))
        train_bpe(texts, configs[0].vocab_size).save(draft / "tokenizer.json")
        return {"format": FORMAT}

    build_once(directory, build)
    return directory / "tokenizer.json"


def _sides_of(config: DataConfig, files, held_out_files) -> Callable[[int], Iterator[Document]]:
    """Returns a function from TRAIN or HELD_OUT to the documents of that side, read anew at each call."""

    def documents() -> Iterator[Document]:
        for document in chain(
            read_documents(config.source, held_out_files, config.text_field),
            read_documents(config.source, files, config.text_field, config.max_bytes),
        ):
            here.tick()
            yield document

    num_forced = sum(1 for _ in read_documents(config.source, held_out_files, config.text_field))
    hashes = np.fromiter((hash_of(document.text) for document in documents()), np.uint64)
    sides = split_documents(hashes, config.held_out_fraction, num_forced)
    check_sides(config, sides)
    return lambda side: (document for document, s in zip(documents(), sides, strict=True) if s == side)


def _write(config: DataConfig, given: Tokenizer | None, files, held_out_files, draft: Path) -> dict:
    on_side = _sides_of(config, files, held_out_files)
    tokenizer = given or train_bpe((document.text for document in on_side(TRAIN)), config.vocab_size)
    tokenizer.save(draft / "tokenizer.json")
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")
    facts = {
        "format": FORMAT,
        "dtype": dtype.name,
        "unknown": tokenizer.unknown(sampled(d.text for d in on_side(TRAIN))),
    }
    for name, side in SPLITS.items():
        facts[name] = _write_split(draft, name, dtype, tokenizer, on_side(side))
    return facts


def _write_split(
    draft: Path, name: str, dtype: np.dtype, tokenizer: Tokenizer, documents: Iterable[Document]
) -> dict:
    lengths, num_bytes, state = [], 0, hashlib.blake2b(digest_size=8)
    with (draft / f"{name}.bin").open("wb") as file:
        for batch in _batches(documents):
            here.tick()
            num_bytes += sum(len(document.text.encode()) for document in batch)
            for document, ids in zip(batch, tokenizer.encode([d.text for d in batch]), strict=True):
                tokens = _with_ends(document, ids, tokenizer).astype(dtype)
                file.write(tokens.tobytes())
                state.update(tokens.tobytes())
                lengths.append(len(tokens))
    length = np.array(lengths, np.int64)
    start_and_length = np.stack([np.cumsum(length) - length, length], axis=1)
    return write_documents(draft, name, start_and_length, num_bytes, state)


def _with_ends(document: Document, ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    first = [tokenizer.start_id] if document.opens and tokenizer.start_id is not None else []
    last = [tokenizer.eos_id] if document.closes and tokenizer.eos_id is not None else []
    return np.concatenate([first, ids, last])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
