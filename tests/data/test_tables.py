"""Parquet and Arrow files: every way to write a column of text is read, and what is none is named with what is."""

import numpy as np
import pytest

from jaxfb.data import DataConfig, prepare

pa = pytest.importorskip("pyarrow")

TEXTS = [f"An owl sat in tree {k}. " * (k % 5 + 1) for k in [*range(40)]]


def write(path, columns):
    """Writes the table by the ending of the name; .stream is an Arrow stream in a file named .arrow."""
    import pyarrow.parquet

    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if path.suffix in (".parquet", ".pq"):
        pyarrow.parquet.write_table(table, path)
        return path
    stream, path = path.suffix == ".stream", path.with_suffix(".arrow")
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.fixture
def config(tmp_path):
    fixed = {"tokenizer": "bytes", "sequence_length": 32, "cache_dir": str(tmp_path / "shards")}
    return lambda path, **more: DataConfig(**{"source": "parquet", "path": str(path), **fixed, **more})


@pytest.mark.parametrize("name", ["a.parquet", "a.pq", "a.arrow", "a.stream"])
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_every_file_of_the_same_texts_gives_the_same_rows(config, tmp_path, name, kind):
    column = pa.array([*TEXTS, None, None])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pa, kind)())
    path = write(tmp_path / name, {"text": column})
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    found, wanted = prepare(config(path)), prepare(config(tmp_path / "b.jsonl", source="jsonl"))
    assert len(found.train) == len(wanted.train) and found.train_stats == wanted.train_stats
    rows = np.arange(len(found.train))
    for leaf, other in zip(
        found.train.gather(rows).values(), wanted.train.gather(rows).values(), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)


TWICE = pa.table([pa.array(TEXTS)] * 2, names=["text", "text"])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "columns, message",
    [
        (
            {"body": TEXTS, "n": [*range(40)]},
            "no column text_field='text'; it has: body, n; use text_field='body'$",
        ),
        ({"n": [*range(40)]}, "no column text_field='text'; it has: n; no column contains text$"),
        (
            {"text": [*range(40)], "body": TEXTS},
            "text_field='text' contains int64, not text; use text_field='body'$",
        ),
        ({"text": [["a"]] * 40}, "contains list<.*, not text; no column contains text$"),
        ({"text": [None] * 40}, "contains null, not text"),
        ({"text": pa.array([None] * 40, pa.string())}, "leaves no document to train on"),
        ({"text": pa.array([], pa.string())}, "leaves no document to train on"),
        (TWICE, "has 2 columns text_field='text'; rename all but one$"),
    ],
    ids=range(8),
)
def test_a_column_that_is_no_text_is_refused_with_one_that_is(config, tmp_path, name, columns, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(write(tmp_path / name, columns)))


@pytest.mark.parametrize("source", ["parquet", "arrow"])
def test_a_file_of_another_kind_is_refused_with_its_source(config, tmp_path, source):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 9)
    with pytest.raises(ValueError, match="a.jsonl is neither Parquet nor Arrow; use source='jsonl'"):
        prepare(config(tmp_path / "a.jsonl", source=source))
    (tmp_path / f"b.{source}").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"b.{source} is empty; leave it out"):
        prepare(config(tmp_path / f"b.{source}", source=source))
    (tmp_path / f"b.{source}").unlink()
    with pytest.raises(
        ValueError, match=f"matches no file of source='{source}' .*; use source='jsonl' for a.jsonl$"
    ):
        prepare(config(tmp_path, source=source))
    whole = write(tmp_path / f"c.{source}", {"text": TEXTS})
    with pytest.raises(
        ValueError, match=f"is not text: there is a zero byte at offset .*; use source='{source}'$"
    ):
        prepare(config(whole, source="text"))
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"c.{source} cannot be read to its end"):
        prepare(config(whole, source=source))
