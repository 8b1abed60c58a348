"""Draws damaged data files: text, JSON lines, token files, tokenizers, tables, conversations and jaxfb's own caches.

`python tests/misuse/data_files.py 2000 [seed]` counts what comes of them. Each is read or refused in a sentence; the
cache that was made of the sound file, which has the same name, is never taken for the damaged one.
"""

import collections
import contextlib
import gzip
import importlib.util
import io
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import warnings

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxfb.data import DataConfig, prepare
from jaxfb.data.conversations import read_conversations, read_preferences
from jaxfb.data.stored.cache import cache_directory
from jaxfb.refusal import Refused, StorageError

SECONDS = 120
"""A file that takes longer to read hangs."""

WORDS = "Ways of saying wörter, naïve 数 and 🙂 again."
TEXTS = [f"{WORDS} {k} {WORDS[: k % 40]}" for k in range(40)]
SAMPLES = pathlib.Path(__file__).parents[2] / "jaxfb" / "sample_data"


def tokenizer_json():
    """Returns the file of a small tokenizer of words."""
    vocab = {word: k for k, word in enumerate(["<unk>", *sorted({w for t in TEXTS for w in t.split()})])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str().encode()


def npy():
    """Returns a .npy file of token ids."""
    file = io.BytesIO()
    np.save(file, np.arange(3000, dtype=np.uint16) % 90)
    return file.getvalue()


def table(kind):
    """Returns the bytes of a Parquet or Arrow file of texts."""
    import pyarrow
    import pyarrow.parquet

    rows, sink = pyarrow.table({"text": TEXTS}), io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(rows, sink)
        return sink.getvalue()
    with pyarrow.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()


LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
META = json.dumps({"dtype": "uint16", "vocab_size": 90, "eos_id": 0, "header_bytes": 0}).encode()
BIN = (np.arange(3000) % 90).astype(np.uint16).tobytes()
KINDS = {
    # settings of DataConfig without paths, then the files; the first is the one to read
    "text": ({"source": "text"}, {"a.txt": "\n".join(TEXTS).encode()}),
    "jsonl": ({"source": "jsonl"}, {"a.jsonl": LINES}),
    "jsonl.gz": ({"source": "jsonl"}, {"a.jsonl.gz": gzip.compress(LINES, mtime=0)}),
    "tokens": ({"source": "tokens"}, {"a.bin": BIN, "a.json": META}),
    "npy": ({"source": "tokens"}, {"a.npy": npy(), "a.json": META}),
    "tokenizer": (
        {"source": "text"},
        {"a.txt": "\n".join(TEXTS).encode(), "tokenizer.json": tokenizer_json()},
    ),
    "conversations": (read_conversations, {"a.jsonl": (SAMPLES / "conversations.jsonl").read_bytes()}),
    "preferences": (read_preferences, {"a.jsonl": (SAMPLES / "preferences.jsonl").read_bytes()}),
    "cache": ({"source": "text"}, {"a.txt": "\n".join(TEXTS).encode()}),
}
if importlib.util.find_spec("pyarrow"):
    KINDS |= {kind: ({"source": kind}, {f"a.{kind}": table(kind)}) for kind in ("parquet", "arrow")}


def damaged(content, rng):
    """Returns the content with one kind of damage."""
    data, size = bytearray(content), max(len(content), 1)
    start = rng.randrange(size)
    end = min(size, start + rng.choice((1, 2, 16, 200, 4096)))
    kind = rng.randrange(12)
    if kind < 3 and data:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[start:]
    elif kind == 4:
        del data[:start]
    elif kind == 5:
        del data[start:end]
    elif kind == 6:
        data[start:end] = bytes(end - start)
    elif kind == 7:
        data[start:start] = rng.randbytes(end - start)
    elif kind == 8:
        data[start:start] = data[start:end]
    elif kind == 9:
        data[start:end] = rng.randbytes(end - start)
    elif kind == 10:
        _, files = KINDS[rng.choice(list(KINDS))]
        data = bytearray(rng.choice(list(files.values())))
    else:
        words = (b"", b"\n", b"null\n", b"[]", b"{}", b"\xff\xfe", b"\0" * 100, b"[" * 5000, b'{"text": 1}\n')
        more = (b"NaN", b"-1", b"1" * 5000, b'"\\ud800"', b'{"vocab_size": 1e400}')
        data = bytearray(rng.choice(words + more))
    return bytes(data)


@contextlib.contextmanager
def limit():
    """Raises TimeoutError in what takes longer than SECONDS."""

    def late(number, frame):
        raise TimeoutError(f"hangs: longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows_of(settings, directory, cache):
    """Returns the rows that are read, as bytes."""
    tokenizer = directory / "tokenizer.json"
    more = (
        {}
        if settings["source"] == "tokens"
        else {"tokenizer": str(tokenizer) if tokenizer.exists() else "bytes"}
    )
    file = next(path for path in sorted(directory.iterdir()) if path.suffix != ".json")
    corpus = prepare(DataConfig(**settings, **more, path=str(file), sequence_length=32, cache_dir=str(cache)))
    corpora = [rows for rows in (corpus.train, corpus.held_out) if len(rows)]
    leaves = [leaf for rows in corpora for leaf in rows.gather(np.arange(len(rows))).values()]
    return [leaf.tobytes() for leaf in leaves]


def outcome(seed, directory):
    """Returns "read" or "refused" for one damaged file in an empty directory; raises what should not have come."""
    rng = random.Random(seed)
    kind = rng.choice(list(KINDS))
    how, files = KINDS[kind]
    data, cache = directory / "data", directory / "cache"
    data.mkdir()
    for name, content in files.items():
        (data / name).write_bytes(content)
    with limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "cache":
            return of_cache(how, data, cache, rng)
        sound = None if callable(how) else rows_of(how, data, cache)
        name = rng.choice(list(files))
        (data / name).write_bytes(damaged(files[name], rng))
        try:
            if callable(how):
                records = how(data / name)
                lines = [line for line in (data / name).read_bytes().split(b"\n") if line.strip()]
                assert len(records) == len(lines), f"{len(records)} records of {len(lines)} lines"
                return "read"
            found = rows_of(how, data, cache)
        except (Refused, StorageError) as error:
            sentence = str(error)
            assert sentence.strip() and len(sentence) < 2000, sentence
            return "refused"
        assert found == rows_of(how, data, directory / "other"), "the cache of other bytes was read"
        same = (data / name).read_bytes() == files[name]
        assert not same or found == sound
    return "read"


def of_cache(how, data, cache, rng):
    """Damages one file of the cache: the rows must be those of before."""
    sound = rows_of(how, data, cache)
    files = sorted(path for path in cache_directory(str(cache)).rglob("*") if path.is_file())
    path = rng.choice(files)
    path.write_bytes(damaged(path.read_bytes(), rng))
    assert rows_of(how, data, cache) == sound, f"other rows, after {path.name} of the cache changed"
    return "read"


def main(number, seed):
    """Prints every file that is neither read nor refused, then the sums."""
    total = collections.Counter()
    for one in range(seed, seed + number):
        directory = pathlib.Path(tempfile.mkdtemp())
        try:
            total[outcome(one, directory)] += 1
        except Exception as error:
            total["other"] += 1
            print(f"  {one}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{number} files: {dict(total)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
