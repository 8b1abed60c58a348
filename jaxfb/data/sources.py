"""Documents of text, in a stable order: the standard library, text files, JSONL, Parquet and Arrow.

Part of the data (the first thing read). Which side of the train / held-out split a document falls on
is decided by its content alone, so neither order nor new neighbours move it.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import logging
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxfb.data.tables import check_installed, texts_of
from jaxfb.refusal import Refused, shown

log = logging.getLogger(__name__)
# Tests and vendored tools are bulky and repetitive; `encodings` is tables of characters.
STDLIB_SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "encodings"),
    *("site-packages", "dist-packages", "__pycache__"),
}
MACHINE_SPECIFIC = ("_sysconfigdata", "config-")
SINGLE_FILE_PIECES = 100
BOM, GZIP = "\ufeff", b"\x1f\x8b"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # what such a file begins with, which no UTF-8 does
ZSTD = b"\x28\xb5\x2f\xfd"
SHOWN = 3
SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tokens": (".bin", ".npy"),
}
TABLES = ("parquet", "arrow")
OF_RECORDS = ("jsonl", *TABLES)  # many documents a file

TRAIN, HELD_OUT, DROPPED = 0, 1, -1


@dataclass(frozen=True)
class Document:
    """A text with a name; `opens` and `closes` are False at a cut made by us, not by its author."""

    name: str
    text: str
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class SourceFile:
    name: str
    path: Path
    num_bytes: int


def find_files(source: str, paths: str | tuple[str, ...], max_bytes: int | None = None) -> list[SourceFile]:
    """Returns files of a source sorted by name; with `max_bytes`, a stable choice of them that stays below it.

    Raises ValueError when a path is missing or nothing is found.
    """
    if source in TABLES:
        check_installed(source)
    if source == "python-stdlib":
        files = _stdlib_files()
    else:
        listed = (paths,) if isinstance(paths, str) else paths
        found = [file for path in listed for file in _files_at(path, source)]
        first: dict[Path, SourceFile] = {}
        # The name of a file with several is the first, since a disk lists them in any order.
        for file in sorted(found, key=lambda file: file.name):
            first.setdefault(file.path, file)
        files = list(first.values())
    if max_bytes is not None and len(files) > 1 and source not in OF_RECORDS:
        files = _within(files, max_bytes)
    if not files:
        raise Refused(f"[data] source={source!r} path={paths} has no file below {max_bytes=}; raise it")
    return files


def read_documents(
    source: str, files: list[SourceFile], text_field: str = "text", max_bytes: int | None = None
) -> Iterator[Document]:
    """Returns non-empty documents in file order, at most `max_bytes` of text in all."""
    if source == "jsonl":
        documents = (document for file in files for document in _read_jsonl(file, text_field))
    elif source in TABLES:
        documents = (document for file in files for document in _read_table(file, text_field))
    elif len(files) == 1:
        documents = _cut_in_pieces(_read_text(files[0]))
    else:
        documents = (_read_text(file) for file in files)
    total = 0
    for document in documents:
        total += len(document.text.encode())
        if max_bytes is not None and total > max_bytes:
            return
        if document.text:
            yield document


def hash_of(text: str) -> int:
    """Returns 64 bits of a string, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_documents(hashes: np.ndarray, fraction: float, num_forced: int = 0) -> np.ndarray:
    """Returns side of each document, i8[num_documents]: TRAIN, HELD_OUT, or DROPPED for a repeated text.

    hashes: u64[num_documents]. The first `num_forced` are held out and the others are not (a held-out text
    given by the user); otherwise a document is held out if its hash lies in the lowest `fraction` of all
    values, or, where none does, if its hash is the smallest.
    """
    side = np.full(len(hashes), DROPPED, np.int8)
    _, first = np.unique(hashes, return_index=True)
    side[first] = TRAIN
    if num_forced:
        side[:num_forced][side[:num_forced] == TRAIN] = HELD_OUT
    elif fraction > 0 and len(first) > 1:
        threshold = max(int(fraction * 2**64), int(hashes.min()) + 1)
        side[(side == TRAIN) & (hashes < np.uint64(threshold))] = HELD_OUT
    return side


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in STDLIB_SKIPPED | {"ensurepip"}]
        files += [Path(directory) / name for name in names if name.endswith(".py")]
    files = [path for path in files if not any(part.startswith(MACHINE_SPECIFIC) for part in path.parts)]
    if not files:
        raise Refused(f"[data] source='python-stdlib' found no .py file under {root}; use source='text'")
    return sorted((_described(path, root) for path in files), key=lambda file: file.name)


def _files_at(path: str, source: str) -> list[SourceFile]:
    try:
        return _found_at(path, source)
    except OSError as error:
        raise Refused(
            f"[data] path={shown(path)} cannot be read: {error.strerror}: {error.filename}"
        ) from None


def _found_at(path: str, source: str) -> list[SourceFile]:
    root = Path(os.path.expanduser(path))  # unlike pathlib's, leaves ~name of an unknown name
    if root.is_file():
        return [_described(root, root.parent)]
    if root.is_dir():
        found = list(_below(root))
    else:
        found = [Path(p) for p in glob.glob(str(root), recursive=True)]
        _warn_of_unreadable(path, root)
    found = [p for p in found if p.is_file()]
    paths = [p for p in found if _belongs(p, source)]
    if source == "text" and 0 < len(paths) < len(found):
        _warn_of_binaries(path, sorted(set(found) - set(paths)), len(found))
    if not paths:
        raise Refused(
            f"[data] path={shown(path)} matches no file of {source=} "
            f"(a file, a directory or a glob pattern); {_completed(root, source) or _source_of(found, source)}"
        )
    base = root if root.is_dir() else Path(os.path.commonpath([p.parent for p in paths]))
    return [_described(p, base) for p in paths]


def _completed(root: Path, source: str) -> str | None:
    """Returns the advice to add the suffix that a path lacks, such as Megatron's common name of .bin and .idx."""
    files = (Path(f"{root}{suffix}") for suffix in SUFFIXES.get(source, ()))
    return next((f"did you mean {file}?" for file in files if file.is_file()), None)


def _source_of(found: list[Path], asked: str) -> str:
    """Returns the advice to read files as another source; to give another path where they are of none."""
    others = ((path.name, kind) for kind in SUFFIXES for path in found if _belongs(path, kind))
    return next(
        (f"use source={kind!r} for {name}" for name, kind in others if kind != asked), "give another path"
    )


def _described(path: Path, root: Path) -> SourceFile:
    return SourceFile(path.relative_to(root).as_posix(), path.resolve(), path.stat().st_size)


def _below(root: Path) -> Iterator[Path]:
    """Yields the files below a directory but for hidden ones, following links to directories, each directory once."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for directory, subdirectories, names in os.walk(root, onerror=fail, followlinks=True):
        if (real := os.path.realpath(directory)) in seen:
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        yield from (Path(directory) / name for name in names if not name.startswith("."))


def _belongs(path: Path, source: str) -> bool:
    if source in SUFFIXES:
        return path.name.endswith(SUFFIXES[source])
    with path.open("rb") as file:
        start = file.read(4096)
    return start.startswith(UTF_16) or b"\0" not in start and not start.startswith(GZIP)


def _warn_of_unreadable(path: str, pattern: Path) -> None:
    """Warns of directories that a pattern would look into, but which cannot be listed; `glob` passes over them."""
    places = [each for each in (pattern, *pattern.parents) if glob.has_magic(each.name)]
    looked_into = [each if each.name == "**" else each.parent for each in places]
    directories = {name for each in looked_into for name in glob.glob(f"{each}{os.sep}", recursive=True)}
    if closed := sorted(name for name in directories if not os.access(name, os.R_OK | os.X_OK)):
        shown = ", ".join(closed[:SHOWN]) + (" ..." if closed[SHOWN:] else "")
        log.warning("[data] path=%r: directories that cannot be read are skipped: %s", path, shown)


def _warn_of_binaries(path: str, others: list[Path], number: int) -> None:
    shown = ", ".join(str(other) for other in others[:SHOWN]) + (" ..." if others[SHOWN:] else "")
    log.warning(
        "[data] %d of the %d files of path=%r are not text and are skipped: %s",
        len(others),
        number,
        path,
        shown,
    )


def _within(files: list[SourceFile], max_bytes: int) -> list[SourceFile]:
    """Returns a subset that does not depend on the alphabet: taken in the order of the hashes of the names."""
    chosen, total = [], 0
    for file in sorted(files, key=lambda file: hash_of(file.name)):
        if total + file.num_bytes <= max_bytes:
            chosen.append(file)
            total += file.num_bytes
    return sorted(chosen, key=lambda file: file.name)


def _read_text(file: SourceFile) -> Document:
    content = _bytes_of(file.path)
    if content.startswith(GZIP):
        raise Refused(f"[data] {file.path} is compressed by gzip; unpack it (gunzip), or use source=jsonl")
    if (zero := content.find(b"\0")) >= 0 and not content.startswith(UTF_16):
        advice = _other_kind(file.path) or "leave it out"
        raise Refused(f"[data] {file.path} is not text: there is a zero byte at offset {zero}; {advice}")
    text = decoded(content, file.path).removeprefix(BOM)
    return Document(file.name, text.replace("\r\n", "\n").replace("\r", "\n"))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"[data] {path} cannot be read: {error.strerror}") from None


def decoded(content: bytes, path: str | Path, start: int = 0) -> str:
    """Returns the text of UTF-8 bytes that begin at offset `start` of a file.

    Raises:
      ValueError: they are something else; the message names the file and the offset.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if not start and content.startswith(UTF_16):
            raise Refused(
                f"[data] {path} is UTF-16; convert it, for example by iconv -f utf-16 -t utf-8"
            ) from None
        advice = _other_kind(path) or "convert it, for example by iconv -f latin1 -t utf-8, or leave it out"
        where = f"byte 0x{content[error.start]:02x} at offset {start + error.start}"
        raise Refused(f"[data] {path} is not UTF-8: {where}; {advice}") from None


def _other_kind(path: str | Path) -> str | None:
    """Returns the advice to read a table as what it is, by the name of its file."""
    kinds = (kind for kind in TABLES if any(suffix in Path(path).name for suffix in SUFFIXES[kind]))
    return next((f"use source={kind!r}" for kind in kinds), None)


def _cut_in_pieces(document: Document) -> Iterator[Document]:
    """Cuts one big file at blank lines (or lines) into documents, so that it can be split and shuffled."""
    text, start = document.text, 0
    size = max(1024, len(text) // SINGLE_FILE_PIECES)
    while start < len(text):
        end = _next_break(text, start + size, start + 2 * size)
        name = f"{document.name}@{start}"
        yield Document(name, text[start:end], opens=start == 0, closes=end == len(text))
        start = end


def _next_break(text: str, low: int, high: int) -> int:
    for mark in ("\n\n", "\n", " "):
        found = text.find(mark, low, high)
        if found >= 0:
            return found + len(mark)
    return min(high, len(text))


def _read_jsonl(file: SourceFile, text_field: str) -> Iterator[Document]:
    offset = 0
    for number, line in enumerate(_lines(file.path), 1):
        if number == 1:
            _refuse_compressed(line, file.path)
        text = decoded(line, f"{file.path}:{number}", offset)
        text, offset = text.removeprefix(BOM) if number == 1 else text, offset + len(line)
        if text.strip():
            yield Document(f"{file.name}:{number}", _text_of(text, text_field, f"{file.path}:{number}"))


def _refuse_compressed(start: bytes, path: Path) -> None:
    """Refuses what is compressed, though its name does not end as that of a compressed file that is read."""
    if start.startswith(GZIP):
        raise Refused(f"[data] {path} is compressed by gzip; give it a name that ends in .jsonl.gz")
    if start.startswith(ZSTD):
        raise Refused(f"[data] {path} is compressed by zstd; unpack it (unzstd), or compress it by gzip")


def _read_table(file: SourceFile, text_field: str) -> Iterator[Document]:
    for number, text in enumerate(texts_of(file.path, text_field), 1):
        if text:
            yield Document(f"{file.name}:{number}", text)


def _lines(path: Path) -> Iterator[bytes]:
    """Returns lines with their ends, unpacked where the name ends in .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error).partition("\n")[0]
        raise Refused(f"[data] {path} cannot be read to its end: {reason}; make it again") from None


def _text_of(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"[data] {where} is not a JSON record: {error}") from None
    if not isinstance(record, dict):
        raise Refused(f"[data] {where} must be a JSON object with {text_field=}, got {type(record).__name__}")
    text = record.get(text_field)
    if not isinstance(text, str):
        raise Refused(_no_text(record, text_field, where))
    return text.encode("utf-8", "replace").decode()  # JSON may hold lone surrogates, which no tokenizer takes


def _no_text(record: dict, text_field: str, where: str) -> str:
    texts = [name for name, value in record.items() if isinstance(value, str)]
    use = (
        f"use data.text_field={texts[0]}"
        if texts
        else "set data.text_field to the key of a string, or remove the record"
    )
    if text_field in record:
        value = json.dumps(record[text_field])[:40]
        return f"[data] {where} has {value} under {text_field=}, not a string; {use}"
    return f"[data] {where} has no text under {text_field=}; the record has: {', '.join(record)}; {use}"
