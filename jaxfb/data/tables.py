"""Texts out of a column of Parquet and Arrow files, by pyarrow, which is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxfb.refusal import Refused

ROWS = 1024  # read together


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
        reason = str(error).partition("\n")[0]
        raise Refused(f"[data] {path} cannot be read to its end: {reason}; make it again") from None


def _opened(path: Path, column: str, opened: ExitStack) -> tuple[Any, Iterator[Any]]:
    """Returns the schema of a file, and its rows in batches."""
    import pyarrow

    if path.suffix == ".parquet":
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
            f"[data] {path} has no column text_field={column!r}; it has: {', '.join(schema.names) or 'none'}"
        )
    kind = schema.field(column).type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise Refused(
            f"[data] {path}: the column text_field={column!r} contains {kind}, not text; choose another column"
        )
