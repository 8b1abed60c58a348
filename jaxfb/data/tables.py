"""Texts out of a column of Parquet and Arrow files, by pyarrow, which is imported when it is needed."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxfb.refusal import Refused

ROWS = 1024  # read together
PARQUET, FILE, STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
"""What Parquet files, Arrow files and Arrow streams begin with; streams of old versions begin with no mark."""


def check_installed(source: str) -> None:
    """Raises ValueError, with what to install, where pyarrow is missing."""
    try:
        importlib.import_module("pyarrow")
    except ImportError:
        raise Refused(
            f"[data] source={source!r} needs the package pyarrow: pip install 'jaxfb[data]'"
        ) from None


def texts_of(path: Path, column: str) -> Iterator[str | None]:
    """Yields the text of each row of a Parquet file, or of an Arrow IPC file or stream; None for a null.

    Raises:
      ValueError: there is no such column, it holds something else than text, or the file is damaged.
    """
    import pyarrow

    try:
        with ExitStack() as opened:
            schema, batches = _opened(path, column, opened)
            _check_column(path, column, schema)
            for batch in batches:
                batch.validate(full=True)  # offsets that point elsewhere would be followed, text be no UTF-8
                yield from batch.column(column).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names in the schema
        raise Refused(_unreadable(path, str(error).partition("\n")[0])) from None


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _unreadable(path: Path, reason: str) -> str:
    start = _start(path) if path.is_file() else PARQUET
    if not start:
        return f"[data] {path} is empty; leave it out, or make it again"
    if not start.startswith((PARQUET, FILE, STREAM)):
        return (
            f"[data] {path} is neither Parquet nor Arrow; use source='jsonl' or source='text' if it is that"
        )
    return f"[data] {path} cannot be read to its end: {reason}; make it again"


def _opened(path: Path, column: str, opened: ExitStack) -> tuple[Any, Iterator[Any]]:
    """Returns the schema of a file, and its rows in batches."""
    import pyarrow

    if path.suffix == ".parquet" or _start(path).startswith(PARQUET):
        parquet = importlib.import_module("pyarrow.parquet")
        file = opened.enter_context(parquet.ParquetFile(path))
        names = [column] if column in file.schema_arrow.names else []
        return file.schema_arrow, file.iter_batches(ROWS, columns=names)
    mapped = opened.enter_context(pyarrow.memory_map(str(path)))
    try:
        reader = opened.enter_context(pyarrow.ipc.open_file(mapped))
    except pyarrow.ArrowInvalid:  # a stream, which the `datasets` library writes, has no magic number
        mapped.seek(0)
        reader = opened.enter_context(pyarrow.ipc.open_stream(mapped))
        return reader.schema, iter(reader)
    return reader.schema, (reader.get_batch(k) for k in range(reader.num_record_batches))


def _check_column(path: Path, column: str, schema: Any) -> None:
    if column not in schema.names:
        raise Refused(
            f"[data] {path} has no column text_field={column!r}; it has: {', '.join(schema.names) or 'none'}; "
            f"{_instead(column, schema)}"
        )
    if (number := schema.names.count(column)) > 1:
        raise Refused(f"[data] {path} has {number} columns text_field={column!r}; rename all but one")
    if not _is_text(kind := schema.field(column).type):
        raise Refused(
            f"[data] {path}: the column text_field={column!r} contains {kind}, not text; {_instead(column, schema)}"
        )


def _is_text(kind: Any) -> bool:
    """Returns whether a column contains texts, or numbers of texts in a dictionary."""
    import pyarrow

    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return str(values) in ("string", "large_string", "string_view")


def _instead(column: str, schema: Any) -> str:
    """Returns which column of text to use in place of one that is none."""
    names = [field.name for field in schema if _is_text(field.type)]
    near = next(iter(difflib.get_close_matches(column, names, n=1) or names), None)
    return f"use text_field={near!r}" if near else "no column contains text"
