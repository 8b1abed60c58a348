"""Ready token files to shards: the boundaries of documents are stored, the tokens stay where they lie.

Part of the data (for those who tokenised elsewhere).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from jaxfb.data.config import DataConfig
from jaxfb.data.sources import HELD_OUT, TRAIN, SourceFile, hash_of, split_documents
from jaxfb.data.stored.cache import build_once, digest
from jaxfb.data.stored.shards import (
    FORMAT,
    Shards,
    TokenStream,
    check_sides,
    files_of,
    given_tokenizer,
    open_documents,
    shards_key,
    write_documents,
)
from jaxfb.data.stored.token_files import TokenFile, find_documents, open_token_files
from jaxfb.data.tokenizer import Tokenizer
from jaxfb.refusal import Refused


def open_token_shards(config: DataConfig, cache: Path) -> Shards:
    """Maps the token files and finds their index in `cache`, or writes it there."""
    files, held_out_files = files_of(config)
    _check_apart(files, held_out_files)
    train, held_out = open_token_files(files), open_token_files(held_out_files)
    identity = [[file.vocab_size, file.eos_id, file.fingerprint] for file in [*train, *held_out]]
    directory = cache / f"tokens-{shards_key(config, files, held_out_files, identity)}"
    facts = build_once(directory, lambda draft: _write_index(config, train, held_out, draft))
    stream = _stream(train)
    streams = {"train": stream, "held_out": _stream(held_out) if held_out else stream}
    vocab_size = max(file.vocab_size for file in [*train, *held_out])
    return Shards(
        **{name: open_documents(directory, name, facts[name], streams[name]) for name in streams},
        tokenizer=_matching_tokenizer(config, vocab_size),
        vocab_size=vocab_size,
        directory=directory,
    )


def _check_apart(files: list[SourceFile], held_out_files: list[SourceFile]) -> None:
    """Refuses a file that is held out and trained on; documents of text are compared instead."""
    both = {file.path for file in files} & {file.path for file in held_out_files}
    if both:
        raise Refused(f"[data] {min(both)} is both in path and in held_out_path; name the others in path")


def _stream(files: list[TokenFile]) -> TokenStream:
    vocab_size = max(file.vocab_size for file in files)
    return TokenStream([file.tokens for file in files], [file.name for file in files], vocab_size)


def _matching_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer | None:
    tokenizer = given_tokenizer(config)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise Refused(
            f"[data] tokenizer={config.tokenizer!r} has {tokenizer.vocab_size} tokens, more than the token "
            f"files' vocab_size={vocab_size}; set vocab_size to {tokenizer.vocab_size} in their sidecar"
        )
    return tokenizer


def _write_index(config: DataConfig, train: list[TokenFile], held_out: list[TokenFile], draft: Path) -> dict:
    documents, sides = _documents(train, 0.0 if held_out else config.held_out_fraction)
    index = {"train": documents[sides == TRAIN], "held_out": documents[sides == HELD_OUT]}
    if held_out:
        index["held_out"], _ = _documents(held_out, 0.0)
    else:
        check_sides(config, sides)
    content = digest([file.fingerprint for file in [*train, *held_out]]).encode()
    splits = {
        name: write_documents(draft, name, chosen, None, hashlib.blake2b(content, digest_size=8))
        for name, chosen in index.items()
    }
    return {"format": FORMAT, **splits}


def _documents(files: list[TokenFile], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns start (in the stream of all files) and length, i64[num_documents, 2], and side of each document.

    The side comes from a hash of the file's name and the document's place in it.
    """
    bases = np.cumsum([0] + [len(file.tokens) for file in files])
    found = [find_documents(file) for file in files]
    file_hash = np.repeat(np.array([hash_of(f.name) for f in files], np.uint64), [len(d) for d in found])
    place = np.concatenate([np.arange(len(d), dtype=np.uint64) for d in found])
    sides = split_documents(_mix(file_hash + place), fraction)
    sides = np.where(sides == HELD_OUT, HELD_OUT, TRAIN)  # places that hash alike are not a repeated text
    documents = np.concatenate([d + [[base, 0]] for d, base in zip(found, bases[:-1], strict=True)])
    return documents, sides


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes integers by splitmix64, vectorised."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
