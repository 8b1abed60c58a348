"""From sources to rows: what is read, how it is split, what is kept, what is refused."""

import gzip
import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest

from jaxfb.config import config_from_dict
from jaxfb.data import DataConfig, bits_per_byte, count_baselines, prepare
from jaxfb.data.sources import HELD_OUT, TRAIN, find_files, read_documents, split_documents
from jaxfb.data.stored import text_shards
from jaxfb.data.stored.cache import build_once, cache_directory, is_chosen_or_there, read_whole
from jaxfb.data.stored.token_shards import _mix
from jaxfb.data.tokenizer import ByteTokenizer, load_tokenizer

WORDS = np.random.default_rng(0).integers(0, 50, 20000)


@pytest.fixture
def config(tmp_path):
    def make(**settings):
        return DataConfig(**{"cache_dir": str(tmp_path / "cache"), "sequence_length": 16, **settings})

    return make


@pytest.fixture
def notes(tmp_path):
    """Forty text files, two of them equal, and two that are not text."""
    root = tmp_path / "notes"
    (root / "deep").mkdir(parents=True)
    for k in range(40):
        words = " ".join(f"w{w}" for w in WORDS[k * 50 : k * 50 + 50])
        (root / ("deep" if k % 2 else ".") / f"{k:02}.txt").write_text(f"note {k}: {words}\n")
    (root / "copy.txt").write_text((root / "00.txt").read_text())
    (root / "image").write_bytes(b"\0\1\2")
    (root / ".hidden").write_text("no")
    return root


def texts(rows, tokenizer):
    """The documents of packed rows of bytes, in order."""
    batch = rows.gather(np.arange(len(rows)))
    stream = batch["targets"][batch["loss_mask"] > 0]
    return [tokenizer.decode(part) for part in np.split(stream, np.flatnonzero(stream == 256) + 1)][:-1]


def test_the_standard_library_is_ready(config):
    corpus = prepare(config(max_bytes=400_000, vocab_size=400))
    assert corpus.vocab_size == 400 and corpus.train_stats.bytes > 200_000 and len(corpus.held_out) > 0
    assert corpus.train_stats.bytes + corpus.held_out_stats.bytes <= 400_000
    files = find_files("python-stdlib", ())
    assert not any({"test", "tests", "site-packages"} & set(file.name.split("/")) for file in files)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_byte_is_predicted_once(config, notes, packing):
    corpus = prepare(config(source="text", path=str(notes), tokenizer="bytes", packing=packing))
    stats = corpus.train_stats, corpus.held_out_stats
    assert (
        stats[0].documents + stats[1].documents == 40
    )  # the copy, the image and the hidden file are left out
    assert all(s.tokens == s.bytes + s.documents for s in stats)  # each end is a token of its own
    bytes_per_token = corpus.bytes_per_token()
    assert bytes_per_token * corpus.held_out_stats.tokens == pytest.approx(corpus.held_out_stats.bytes)
    assert bits_per_byte(np.log(2), bytes_per_token) == pytest.approx(1 / bytes_per_token)


def test_the_split_follows_the_text_not_the_order(config, notes):
    settings = {"source": "text", "tokenizer": "bytes", "held_out_fraction": 0.3}
    before = prepare(config(path=str(notes), **settings))
    held_out = set(texts(before.held_out, before.tokenizer))
    assert 2 < len(held_out) < 25 and not held_out & set(texts(before.train, before.tokenizer))
    (notes / "00.txt").rename(notes / "zz.txt")
    (notes / "aa.txt").write_text("a newcomer")
    after = prepare(config(path=str(notes), **settings))
    assert set(texts(after.held_out, after.tokenizer)) - {"a newcomer"} == held_out
    assert after.train.fingerprint != before.train.fingerprint


def test_jsonl_and_files_of_one_text_agree(config, notes, tmp_path):
    records = [{"body": path.read_text()} for path in sorted(notes.rglob("*.txt"))] + [{"body": ""}]
    with gzip.open(tmp_path / "notes.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, records)))
    lines = prepare(config(source="jsonl", path=str(tmp_path / "notes.jsonl.gz"), text_field="body"))
    files = prepare(config(source="text", path=f"{notes}/**/*.txt"))
    for side in ("train_stats", "held_out_stats"):
        assert getattr(lines, side).bytes == getattr(files, side).bytes


def test_one_big_file_is_cut_and_nothing_of_it_is_lost(config, tmp_path):
    text = "".join(f"line {k}\n\n" for k in range(3000))
    (tmp_path / "book.txt").write_text(text)
    files = find_files("text", (str(tmp_path / "book.txt"),))
    pieces = list(read_documents("text", files))
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 20
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    corpus = prepare(config(source="text", path=str(tmp_path / "book.txt"), tokenizer="bytes"))
    assert corpus.held_out_stats.bytes > 0
    assert corpus.train_stats.bytes + corpus.held_out_stats.bytes == len(text)


def test_a_held_out_path_is_kept_out_of_train(config, notes, tmp_path):
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"text": (notes / "02.txt").read_text()}))
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": path.read_text()}) for path in sorted(notes.rglob("*.txt")))
    )
    paths = {"path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "held_out.jsonl")}
    corpus = prepare(config(source="jsonl", tokenizer="bytes", **paths))
    assert texts(corpus.held_out, corpus.tokenizer) == [(notes / "02.txt").read_text()]
    assert corpus.train_stats.documents == 39 and (notes / "02.txt").read_text() not in texts(
        corpus.train, corpus.tokenizer
    )


def test_the_smallest_hash_is_held_out_where_the_fraction_takes_none():
    hashes = np.array([2**63, 2**62, 2**62, 2**63 + 5], np.uint64)
    np.testing.assert_array_equal(split_documents(hashes, 0.01), [TRAIN, HELD_OUT, -1, TRAIN])
    np.testing.assert_array_equal(split_documents(hashes, 0.0), [TRAIN, TRAIN, -1, TRAIN])


@pytest.mark.parametrize("leading", [True, False])
def test_token_files_are_read_where_they_lie(config, tmp_path, leading):
    documents = [np.append(WORDS[k * 9 : k * 9 + 5 + k % 4], 50) for k in range(60)]
    stream = np.concatenate([[50] if leading else [], *documents]).astype(np.uint16)
    half = len(np.concatenate(documents[:30])) + leading
    header = np.zeros(8, np.uint8)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + stream[:half].tobytes())
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocab_size": 51, "eos_id": 50, "header_bytes": 8}')
    np.save(tmp_path / "b.npy", stream[half:].astype(np.uint32))
    (tmp_path / "b.json").write_text('{"vocab_size": 51, "eos_id": 50}')
    corpus = prepare(config(source="tokens", path=str(tmp_path), held_out_fraction=0.2))
    assert corpus.vocab_size == 51 and corpus.tokenizer is None and corpus.bytes_per_token() is None
    assert corpus.held_out_stats.documents > 3
    assert (
        corpus.train_stats.tokens + corpus.held_out_stats.tokens == len(stream) - 2
    )  # one first token a file
    batch = corpus.train.gather(np.arange(len(corpus.train)))
    inner = (batch["positions"] > 0) & (batch["loss_mask"] > 0)
    assert not (batch["tokens"][inner] == 50).any()  # an end token opens a segment or closes it, as a target


def test_documents_of_token_files_are_hashed_by_splitmix64():
    """The first numbers of the generator started at 0, whose states are multiples of one constant."""
    states = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 4, dtype=np.uint64)
    assert list(map(hex, _mix(states))) == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_shards_are_reused_while_nothing_changes(config, notes):
    settings = config(source="text", path=str(notes), tokenizer="bytes")
    first = prepare(settings)
    files = {path: path.stat().st_mtime_ns for path in cache_directory(settings.cache_dir).rglob("*")}
    assert prepare(settings).train.fingerprint == first.train.fingerprint
    assert files == {path: path.stat().st_mtime_ns for path in cache_directory(settings.cache_dir).rglob("*")}
    (notes / "00.txt").write_text("other words")
    assert prepare(settings).train.fingerprint != first.train.fingerprint


def test_a_damaged_cache_is_rebuilt(config, notes):
    settings = config(source="text", path=str(notes), tokenizer="bytes")
    first = prepare(settings)
    (tokens,) = cache_directory(settings.cache_dir).rglob("train.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    again = prepare(settings)
    np.testing.assert_array_equal(
        again.train[len(again.train) - 1]["tokens"], first.train[len(first.train) - 1]["tokens"]
    )


def test_documents_are_the_same_however_many_are_encoded_at_once(config, notes, tmp_path, monkeypatch):
    settings = {"source": "text", "path": str(notes), "tokenizer": "bytes"}
    whole = prepare(config(**settings))
    monkeypatch.setattr(text_shards, "ENCODE_CHARACTERS", 500)  # about three of them
    parts = prepare(config(**settings, cache_dir=str(tmp_path / "another")))
    for one, other in ((whole.train, parts.train), (whole.held_out, parts.held_out)):
        rows = np.arange(len(one))
        np.testing.assert_array_equal(one.gather(rows)["targets"], other.gather(rows)["targets"])
    assert parts.train_stats == whole.train_stats and whole.train_stats.documents > 30


def test_the_cache_is_where_the_config_or_else_the_environment_puts_it(monkeypatch):
    for name in ("JAXFB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path(".cache/jaxfb-data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/jaxfb/data") and is_chosen_or_there()
    monkeypatch.setenv("JAXFB_CACHE", "/own")
    assert cache_directory() == Path("/own/data") and cache_directory("/given") == Path("/given")


def test_an_interrupted_write_leaves_nothing_that_is_read(tmp_path):
    def dies(draft):
        (draft / "half").write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "shards", dies)
    assert list(tmp_path.iterdir()) == [] and read_whole(tmp_path / "shards") is None

    def overtaken(draft):
        (tmp_path / "shards").exists() or build_once(tmp_path / "shards", lambda other: {"by": "the other"})
        return {"by": "this one"}

    assert build_once(tmp_path / "shards", overtaken) == {"by": "the other"}
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_drafts_are_removed_a_day_after_their_build_died(tmp_path):
    for name in (".shards.old", ".shards.new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".shards.old", (0, 0))
    (tmp_path / ".shards.gone").symlink_to("nowhere")  # as if another process finished it since it was listed
    assert build_once(tmp_path / "shards", lambda draft: {"by": "this one"}) == {"by": "this one"}
    assert {path.name for path in tmp_path.iterdir()} == {".shards.new", ".shards.gone", "shards"}


def test_baselines_are_cross_entropies_of_the_held_out_tokens(config, tmp_path):
    rng = np.random.default_rng(1)
    step = rng.choice([1, 2], size=60_000, p=[0.75, 0.25])  # the next token is one or two further, of 40
    np.save(tmp_path / "walk.npy", (np.cumsum(step) % 40).astype(np.uint16))
    (tmp_path / "walk.json").write_text('{"vocab_size": 40}')
    corpus = prepare(config(source="tokens", path=str(tmp_path / "walk.npy")))
    found = count_baselines(corpus.train, corpus.held_out, corpus.vocab_size)
    assert found.unigram == pytest.approx(np.log(40), abs=0.01)
    assert found.bigram == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), abs=0.03)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"source": "txt"},
            "source='txt' is not known; use one of python-stdlib, text, jsonl, parquet, arrow, tokens",
        ),
        ({"source": "text"}, "source='text' needs path"),
        ({"path": "notes"}, "takes no path"),
        ({"packing": "tight"}, "packing='tight' is not known; use one of concat, best_fit"),
        ({"vocab_size": 256}, "vocab_size=256 is too small .* use 257 or more"),
        ({"sequence_length": 1}, "sequence_length=1 must be at least 2"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0 must lie in"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"source": "tokens", "path": "x", "max_bytes": 10}, "max_bytes=10 must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("name", "content", "settings", "words"),
    [
        ("gone.txt", None, {"source": "text"}, "matches no file of source='text'"),
        ("empty.txt", b"", {"source": "text"}, "leaves no document to train on \\(of 0 read"),
        ("one.txt", b"one", {"source": "text"}, "of 1 document\\(s\\) holds out nothing"),
        (
            "x.jsonl",
            b'{"text": "a"}\n' * 9,
            {"source": "jsonl"},
            "of 1 document\\(s\\) holds out nothing \\(8 more repeat their text\\); give held_out_path",
        ),
        ("~nobody-of-this-name/x", None, {"source": "text"}, "matches no file of source='text'"),
        ("x.jsonl", b"{]", {"source": "jsonl"}, "x.jsonl:1 is not a JSON record"),
        (
            "x.jsonl",
            b'{"body": "a"}',
            {"source": "jsonl"},
            "text_field='text'; the record has: body; use data.text_field=body",
        ),
        (
            "x.jsonl",
            b'{"messages": []}',
            {"source": "jsonl"},
            "set data.text_field to the key of a string, or remove",
        ),
        (
            "x.jsonl",
            b'{"text": null}',
            {"source": "jsonl"},
            "x.jsonl:1 has null under text_field='text', not a string",
        ),
        ("x.jsonl", b'["text"]', {"source": "jsonl"}, "x.jsonl:1 must be a JSON object .*, got list"),
        ("alone.bin", b"\0\0\0\0", {"source": "tokens"}, "needs alone.json or meta.json beside it"),
        (
            "t.bin",
            b"\1\0\11\0",
            {"source": "tokens"},
            "contains token 9 at position 1, outside .* set it to 10",
        ),
        ("t.bin", b"\1\0\2", {"source": "tokens"}, "has 3 bytes after header_bytes=0"),
        ("t.bin", b"\1\0\2\0", {"source": "tokens", "tokenizer": "bytes"}, "has 257 tokens, more than"),
    ],
)
def test_unusable_files_are_refused(config, tmp_path, name, content, settings, words):
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocab_size": 9}')
    if content is not None:
        (tmp_path / name).write_bytes(content)
    fraction = 0.0 if settings.get("tokenizer") else 0.05
    with pytest.raises(ValueError, match=words):
        prepare(
            config(
                path=name if name.startswith("~") else str(tmp_path / name),
                **{"held_out_fraction": fraction, **settings},
            )
        )


def test_a_path_without_its_suffix_is_refused_with_it(config, tmp_path):
    """Megatron names its two files by what they have in common."""
    (tmp_path / "t_document.bin").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match=r"no file of source='tokens' .*; did you mean .*t_document\.bin\?$"):
        prepare(config(source="tokens", path=str(tmp_path / "t_document")))


def test_a_token_file_that_is_held_out_is_not_trained_on(config, tmp_path):
    """Documents of tokens are not compared, so nothing else would find it: a loss of rows that were learnt."""
    for name in ("train", "val"):
        np.arange(99, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.json").write_text('{"vocab_size": 100}')
    val = str(tmp_path / "val.bin")
    prepare(config(source="tokens", path=str(tmp_path / "train.bin"), held_out_path=val))
    with pytest.raises(
        ValueError, match=r"val\.bin is both in path and in held_out_path; name the others in path"
    ):
        prepare(config(source="tokens", path=str(tmp_path / "*.bin"), held_out_path=val))


def test_a_home_directory_is_written_as_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_directory("~/cache") == tmp_path / "cache"
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer("~/tokenizer.json"), ByteTokenizer)
    run = {"dir": "~/run", "updates": 1}
    values = {"model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1}, "data": {}, "run": run}
    values |= {"batch": {"rows": 8, "rows_per_microbatch": 8}, "optimizer": {"learning_rate": 0.1}}
    assert config_from_dict(values).run.dir == str(tmp_path / "run")


def test_the_order_of_files_does_not_follow_that_of_the_directory(tmp_path, monkeypatch):
    """A file that has two names has the first of them, whichever the disk lists first."""
    for name in ("b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "d.txt").symlink_to("b.txt")
    (tmp_path / "a.txt").symlink_to("c.txt")
    names, walk = [], os.walk
    for step in (1, -1):

        def listed(root, step=step, **options):
            return ((here, below, sorted(files)[::step]) for here, below, files in walk(root, **options))

        monkeypatch.setattr(os, "walk", listed)
        names.append([file.name for file in find_files("text", str(tmp_path))])
    assert names == [["a.txt", "b.txt"]] * 2


def test_directories_that_a_pattern_cannot_read_are_named(tmp_path, monkeypatch, caplog):
    for name in ("open/x.txt", "closed/y.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path) and access(path, mode))
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/*.txt", "*/*.txt", str(tmp_path / "*" / "*.txt")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxfb"):
            find_files("text", pattern)
        assert re.search(r"directories that cannot be read are skipped: \S*closed/$", caplog.text)
    caplog.clear()
    find_files("text", str(tmp_path / "open" / "*.txt"))
    assert not caplog.text


def test_links_to_directories_are_followed_and_each_file_is_read_once(tmp_path):
    for name in ("notes/a.txt", "notes/.hidden/b.txt", "elsewhere/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "notes" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "deep" / "loop").symlink_to(tmp_path / "notes")
    (tmp_path / "notes" / "again.txt").symlink_to(tmp_path / "notes" / "a.txt")
    (tmp_path / "notes" / "broken.txt").symlink_to(tmp_path / "nowhere")
    files = find_files("text", str(tmp_path / "notes"))
    assert sorted(file.path.name for file in files) == ["a.txt", "c.txt"]
