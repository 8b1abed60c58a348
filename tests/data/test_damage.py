"""Text and token files that are damaged, edited, or something else: refused, rebuilt or reported, never read on."""

import errno
import gzip
import io
import json
import logging
import os
import warnings

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxfb.data import DataConfig, Loader, prepare
from jaxfb.data.conversations import read_conversations
from jaxfb.data.stored.cache import build_once, cache_directory, read_whole
from jaxfb.data.stored.fingerprint import PART, fingerprints
from jaxfb.data.stored.shards import TokenStream

WORDS = " ".join(f"word{k}" for k in range(4000))


@pytest.fixture
def config(tmp_path):
    def make(**settings):
        common = {"cache_dir": str(tmp_path / "cache"), "sequence_length": 16, "held_out_fraction": 0.1}
        return DataConfig(**{**common, **settings})

    return make


@pytest.fixture
def tokens(tmp_path):
    """A file of 200,000 tokens below 100, with its sidecar."""
    values = np.random.default_rng(0).integers(1, 100, 200_000).astype(np.uint16)
    values[::50] = 0
    (tmp_path / "t.bin").write_bytes(values.tobytes())
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocab_size": 100, "eos_id": 0}')
    return tmp_path / "t.bin"


def edit(path, position, value):
    """One token of a file, size and times left as they are."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(2 * position)
        file.write(np.uint16(value).tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_every_byte_has_a_part_in_the_fingerprint(tmp_path):
    content = bytearray(PART + 1000)
    (tmp_path / "x").write_bytes(content)
    seen = {fingerprints([tmp_path / "x"])[0]}
    for position in (0, 12_345, PART - 1, PART, PART + 999):
        content[position] ^= 1
        (tmp_path / "x").write_bytes(content)
        seen.add(fingerprints([tmp_path / "x"])[0])
    (tmp_path / "y").write_bytes(b"")
    assert len(seen) == 6 and len(fingerprints([tmp_path / "y", tmp_path / "x"])) == 2


def test_an_edited_token_file_is_another_text(config, tokens):
    settings = config(source="tokens", path=str(tokens))
    before = prepare(settings)
    edit(tokens, 99_999, 7)
    after = prepare(settings)
    assert after.train.fingerprint != before.train.fingerprint
    edit(tokens, 99_999, 100)
    with pytest.raises(
        ValueError, match=r"t.bin contains token 100 at position 99999, outside \[0, vocab_size=100\)"
    ):
        prepare(settings)


def test_the_same_bytes_in_another_dtype_are_another_text(config, tokens):
    settings = config(source="tokens", path=str(tokens))
    before = prepare(settings)
    (tokens.parent / "t.json").write_text('{"dtype": "uint8", "vocab_size": 256}')
    after = prepare(settings)
    assert after.train.fingerprint != before.train.fingerprint
    total = after.train_stats.tokens + after.held_out_stats.tokens
    assert total == 399_999


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_id_that_appears_while_the_run_reads_is_refused_where_it_is_read(config, tokens, prefetch):
    corpus = prepare(config(source="tokens", path=str(tokens), packing="stream"))
    corpus.train.gather(np.arange(4))
    row = 5
    edit(tokens, int(corpus.train.offset[corpus.train.row_start[row]]) + 3, 60_000)
    loader = Loader(corpus.train, 2, seed=None, prefetch=prefetch)
    next(loader), next(loader)
    with pytest.raises(
        ValueError, match=r"t.bin contains token 60000 at position \d+, outside .*, in row 5; the file"
    ):
        next(loader)


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("files", [1, 2])
def test_a_file_that_is_cut_while_the_run_reads_is_refused_by_name(config, tokens, prefetch, files):
    """Without a look at the file the process would end by SIGBUS."""
    if files == 2:
        (tokens.parent / "t2.bin").write_bytes(tokens.read_bytes())
        (tokens.parent / "t2.json").write_text(tokens.with_suffix(".json").read_text())
    corpus = prepare(config(source="tokens", path=str(tokens.parent / "*.bin")))
    loader = Loader(corpus.train, 2, seed=None, prefetch=prefetch)
    next(loader)
    os.truncate(tokens, 8192)
    with pytest.raises(ValueError, match=r"t.bin was cut from 400000 to 8192 bytes while it was read"):
        for _ in range(100):
            next(loader)


def test_a_file_that_is_cut_between_the_look_at_it_and_its_reading_is_refused_too(
    config, tokens, monkeypatch
):
    """Read through its mapping, it would end the process by SIGBUS."""
    stream, real = TokenStream([np.memmap(tokens, np.uint16, "r")]), os.fstat

    def then_cut(file):
        status = real(file)
        os.truncate(tokens, 8192)
        return status

    monkeypatch.setattr(os, "fstat", then_cut)
    with pytest.raises(ValueError, match=r"t.bin was cut from 400000 to 8192 bytes while it was read"):
        stream.take(np.arange(len(stream)))


@pytest.mark.parametrize("name", ["row_start", "offset", "length"])
def test_an_index_of_rows_that_is_cut_while_the_run_reads_is_refused_by_its_name(
    config, tokens, tmp_path, name
):
    """It ended the process by SIGBUS, without a word."""
    corpus = prepare(config(source="tokens", path=str(tokens)))
    cut = next(path for path in (tmp_path / "cache").rglob(f"{name}.npy") if "train" in path.parts)
    os.truncate(cut, 4096)
    with pytest.raises(ValueError, match=rf"{name}.npy was cut from \d+ to 4096 bytes while it was read"):
        corpus.train.gather(np.arange(4))


def test_a_disk_that_fails_while_the_run_reads_is_a_sentence(config, tokens, monkeypatch):
    corpus = prepare(config(source="tokens", path=str(tokens)))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ValueError, match=r"t.bin cannot be read: Input/output error"):
        corpus.train.stream.take(np.arange(4))
    with pytest.raises(ValueError, match=r"row_start.npy cannot be read: Input/output error"):
        corpus.train.gather(np.arange(4))


def test_a_file_that_was_replaced_or_removed_is_read_as_it_was(config, tokens):
    corpus = prepare(config(source="tokens", path=str(tokens)))
    rows = np.arange(8)
    before = corpus.train.gather(rows)["tokens"]
    (tokens.parent / "other").write_bytes(bytes(100))
    os.replace(tokens.parent / "other", tokens)
    np.testing.assert_array_equal(corpus.train.gather(rows)["tokens"], before)
    tokens.unlink()
    np.testing.assert_array_equal(corpus.train.gather(rows)["tokens"], before)


def test_a_file_that_is_written_to_while_the_run_reads_is_reported_once(config, tokens, caplog):
    corpus = prepare(config(source="tokens", path=str(tokens)))
    rows = np.arange(8)
    first = corpus.train.gather(rows)["tokens"]
    assert caplog.text == ""
    times = tokens.stat()
    os.utime(tokens, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with caplog.at_level(logging.WARNING, "jaxfb"):
        corpus.train.gather(rows), corpus.held_out.gather(rows[:1]), corpus.train.gather(rows)
    assert caplog.text.count("t.bin was written to while it is read") == 1
    caplog.clear()
    for change in (lambda: tokens.rename(tokens.with_suffix(".old")), lambda: tokens.write_bytes(b"")):
        change()  # moved away, then another file in its place: what is mapped stays
        np.testing.assert_array_equal(corpus.train.gather(rows)["tokens"], first)
    assert caplog.text == ""


def test_a_cache_whose_bytes_changed_is_made_again(config, tmp_path, caplog):
    (tmp_path / "book.txt").write_text(WORDS)
    settings = config(source="text", path=str(tmp_path / "book.txt"), tokenizer="bytes")
    first = prepare(settings)
    whole = [batch.copy() for batch in first.train.gather(np.arange(len(first.train))).values()]
    places = {
        "train.bin": -1,
        "train.documents.npy": -1,
        "offset.npy": -1,
        "meta.json": 20,
    }  # the last: facts
    for name, place in places.items():
        path = next(cache_directory(settings.cache_dir).rglob(name))
        content = bytearray(path.read_bytes())
        content[place] ^= 64
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxfb"):
            again = prepare(settings)
        assert "is damaged; it is made again" in caplog.text
        for one, other in zip(whole, again.train.gather(np.arange(len(again.train))).values(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_full_disk_under_the_cache_is_one_sentence(tmp_path):
    def full(draft):
        raise OSError(28, "No space left on device")

    with pytest.raises(
        ValueError, match=r"\[data\] the cache .*shards cannot be made: .*No space left.*data.cache_dir"
    ):
        build_once(tmp_path / "shards", full)
    assert list(tmp_path.iterdir()) == [] and read_whole(tmp_path / "shards") is None


LATIN = "caf\xe9 au lait".encode("latin1")


def archived():
    """Returns an .npz file, an archive of arrays."""
    file = io.BytesIO()
    np.savez(file, tokens=np.arange(9, dtype=np.uint16))
    return file.getvalue()


def with_length(length):
    """Returns an .npy file of 2000 tokens whose header has another length."""
    file = io.BytesIO()
    np.save(file, np.arange(2000, dtype=np.uint16))
    return file.getvalue().replace(b"(2000,)", f"({length},)".encode())


@pytest.mark.parametrize(
    "name, source, content, words",
    [
        ("a.txt", "text", b"0123456789" + LATIN, "a.txt is not UTF-8: byte 0xe9 at offset 13; convert it"),
        ("a.txt", "text", WORDS.encode("utf-16-le"), "not text: there is a zero byte at offset"),
        (
            "a.txt",
            "text",
            WORDS.encode("utf-16"),
            "a.txt is UTF-16; convert it, for example by iconv -f utf-16 -t utf-8",
        ),
        ("a.txt", "text", "\ufeff".encode("utf-16-be") + b"\xd8\xd8", "a.txt is UTF-16; convert it"),
        ("a.jsonl", "jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl:1 is UTF-16; convert it"),
        ("t.parquet", "jsonl", b"PAR1\xe4", "is not UTF-8: byte 0xe4 at offset 4; use source='parquet'"),
        ("a.txt", "text", gzip.compress(WORDS.encode(), mtime=0), "a.txt is compressed by gzip; unpack it"),
        ("a.txt", "text", b"x" * 5000 + b"\0", "a.txt is not text: there is a zero byte at offset 5000"),
        (
            "a.jsonl",
            "jsonl",
            b'{"text": "a"}\n{"text": "' + LATIN + b'"}\n',
            "a.jsonl:2 is not UTF-8: byte 0xe9 at offset 27",
        ),
        (
            "a.jsonl.gz",
            "jsonl",
            gzip.compress(b'{"text": "abc"}\n' * 900, mtime=0)[:-20],
            "cannot be read to its end",
        ),
        (
            "a.jsonl",
            "jsonl",
            gzip.compress(b"x" * 99, mtime=0),
            "compressed by gzip; give it a name .* .jsonl.gz",
        ),
        ("a.jsonl.zst", "jsonl", b"\x28\xb5\x2f\xfd\xe9", "is compressed by zstd; unpack it"),
        ("a.jsonl.gz", "jsonl", b'{"text": "abc"}\n', "cannot be read to its end: Not a gzipped file"),
        ("a.jsonl", "jsonl", b"[" * 100_000, "a.jsonl:1 is not a JSON record"),
        ("a.npy", "tokens", b"\x93NUMPY\x01\0v\0{'descr'", "a.npy is not a complete .npy file of numbers"),
        ("a.npy", "tokens", b"", "a.npy is not a complete .npy file of numbers"),
        ("a.npy", "tokens", b"PK\3\4" + bytes(99), "a.npy is not a complete .npy file of numbers"),
        ("a.npy", "tokens", archived(), "a.npy is not a complete .npy file of numbers"),
        ("a.npy", "tokens", with_length(-900), "a.npy is not a complete .npy file of numbers"),
    ],
)
def test_what_is_no_text_is_refused_with_file_and_offset(config, tmp_path, name, source, content, words):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "meta.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ValueError, match=words):
        prepare(config(source=source, path=str(tmp_path / name)))
    assert not cache_directory(config().cache_dir).exists() or not any(
        cache_directory(config().cache_dir).iterdir()
    )


def test_a_pickle_is_never_loaded(config, tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "a.json").write_text('{"vocab_size": 9}')
    with pytest.raises(ValueError, match="a.npy is not a complete .npy file of numbers"):
        prepare(config(source="tokens", path=str(tmp_path / "a.npy")))


def test_files_that_are_no_text_are_named_where_they_are_left_out(config, tmp_path, caplog):
    (tmp_path / "notes").mkdir()
    for k in range(20):
        (tmp_path / "notes" / f"{k}.txt").write_text(f"{k} {WORDS[:200]}\r\nend")
    (tmp_path / "notes" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "notes" / "old.gz").write_bytes(gzip.compress(b"text"))
    with caplog.at_level(logging.WARNING, "jaxfb"):
        corpus = prepare(config(source="text", path=str(tmp_path / "notes"), tokenizer="bytes"))
    assert "2 of the 22 files" in caplog.text and "picture.png" in caplog.text and "old.gz" in caplog.text
    assert corpus.train_stats.documents + corpus.held_out_stats.documents == 20


@pytest.mark.parametrize(
    "sidecar, words",
    [
        ({"vocab_size": 100, "eos_id": "0"}, "eos_id='0'; it must be an integer in \\[0, 100\\), or null"),
        ({"vocab_size": 100, "eos_id": 100}, "eos_id=100; it must be an integer in"),
        ({"vocab_size": 100, "eos_id": -1}, "eos_id=-1; it must be an integer in"),
        ({"vocab_size": 100, "eos_id": True}, "eos_id=True; it must be an integer in"),
        ({"vocab_size": 100, "eos": 0}, "has eos=0; did you mean eos_id"),
        ({"vocab_size": 100, "eos_token_id": 0}, "has eos_token_id=0; did you mean eos_id"),
        ({"vocab_size": 100, "header_byte": 8}, "has header_byte=8; did you mean header_bytes"),
        ({"vocab_size": 100, "header_bytes": -2}, "header_bytes=-2; it must be an integer"),
        ({"vocab_size": 100, "header_bytes": "8"}, "header_bytes='8'; it must be an integer"),
        ({"vocab_size": 100, "dtype": "float32"}, "dtype='float32'; use one of uint8, uint16"),
        ({"vocab_size": 100, "dtype": 16}, "dtype=16; use one of"),
        ({"vocab_size": 100.0}, "vocab_size=100.0; it must be an integer"),
        ({"vocab_size": True}, "vocab_size=True; it must be an integer"),
        ([1], "must name vocab_size"),
    ],
)
def test_a_sidecar_is_checked_value_by_value(config, tokens, sidecar, words):
    (tokens.parent / "t.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match=words):
        prepare(config(source="tokens", path=str(tokens)))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_sidecar_that_is_no_json_is_named(config, tokens, content):
    (tokens.parent / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match="t.json is not JSON"):
        prepare(config(source="tokens", path=str(tokens)))


def test_an_end_that_never_comes_is_reported(config, tokens, caplog):
    (tokens.parent / "t.json").write_text('{"vocab_size": 101, "eos_id": 100, "owner": "me"}')
    with caplog.at_level(logging.WARNING, "jaxfb"):
        prepare(config(source="tokens", path=str(tokens)))
    assert "t.bin has no eos_id=100 in it; it is cut into equal pieces" in caplog.text


def write_tokenizer(path, model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"),
        models.BPE({"a": 0, "b": 1}, []),  # drops what it does not know
    ],
    ids=["unknown token", "dropped"],
)
def test_a_tokenizer_that_loses_characters_is_warned_of_with_the_share(config, tmp_path, model):
    (tmp_path / "book.txt").write_text("a b a \xe9\n\n" * 4000)
    tokenizer = write_tokenizer(tmp_path / "small.json", model)
    settings = config(source="text", path=str(tmp_path / "book.txt"), tokenizer=tokenizer)
    for _ in range(2):  # from the cache too
        with pytest.warns(
            UserWarning, match=r"cannot encode 25\.00% of the characters of the text, such as '\xe9'"
        ):
            prepare(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for knows in ("bytes", "bpe"):
            prepare(config(source="text", path=str(tmp_path / "book.txt"), tokenizer=knows, vocab_size=300))


def test_a_tokenizer_file_that_is_no_text_is_refused(config, tmp_path):
    (tmp_path / "book.txt").write_text(WORDS)
    (tmp_path / "tokenizer.json").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ValueError, match="tokenizer=.* cannot be read: 'utf-8' codec"):
        prepare(
            config(source="text", path=str(tmp_path / "book.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
        )


def test_conversations_are_read_by_lines_of_their_file(tmp_path):
    """A line separator inside a text is part of it; bytes of another encoding are refused."""
    message = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(message, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    ((read,),) = read_conversations(tmp_path / "a.jsonl")
    assert read["content"] == "one\u2028two\x85three"
    (tmp_path / "b.jsonl").write_bytes(b'{"messages": "' + LATIN + b'"}')
    with pytest.raises(ValueError, match="b.jsonl is not UTF-8: byte 0xe9 at offset 17"):
        read_conversations(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="c.jsonl line 1 is not JSON"):
        read_conversations(tmp_path / "c.jsonl")
