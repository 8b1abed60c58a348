"""Text to token ids and back: plain bytes, or byte-level BPE by the `tokenizers` library.

Part of the data (documents become token ids). A token stands at either end of a document, so its first
token is predicted too, and its end; every byte of the text is then counted once in bits/byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxfb.process.whole_file import write_whole
from jaxfb.refusal import Refused

SHOWN = 5
END_TOKEN = "<|end|>"
SAMPLE_BYTES = 64 * 2**20  # BPE merges settle long before this much text
_DEEPSEEK = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
START_NAMES = (
    "<|begin_of_text|>",
    "<|startoftext|>",
    _DEEPSEEK[0],
    "<s>",
    "<bos>",
    "<|endoftext|>",
    END_TOKEN,
)
END_NAMES = ("<|end_of_text|>", _DEEPSEEK[1], "<|endoftext|>", "</s>", "<eos>", END_TOKEN)
BYTES_FILE = {"jaxfb_tokenizer": "bytes"}


class Tokenizer(Protocol):
    """The interface of a tokenizer. It adds no special tokens, and `encode` reads none out of text.

    vocab_size: ids lie in [0, vocab_size).
    start_id, eos_id: put before and after each document; None where the vocabulary has none.
    before_text: what transformers puts before a prompt by this tokenizer's file, such as Llama's start token.
    fingerprint: 16 hexadecimal digits; equal fingerprints encode alike.
    special_names: of special tokens, which only a chat template may write. added_names: of these and of all others that
      are found in a text before it is cut into words.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def start_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def before_text(self) -> tuple[int, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def special_names(self) -> tuple[str, ...]: ...

    @property
    def added_names(self) -> tuple[str, ...]: ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Encodes each text as i32[num_tokens]."""
        ...

    def encode_template(self, texts: list[str], continued: list[bool]) -> list[np.ndarray]:
        """Encodes each text as i32[num_tokens], reading names of special tokens as these tokens.

        continued: whether a text continues another one; some tokenizers put a space before a text that does not.
        """
        ...

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Returns the text of the ids; special tokens are left out, or appear by name."""
        ...

    def id_of(self, name: str) -> int | None:
        """Returns the id of a special token such as <|im_start|>, or None if the vocabulary has none of that name."""
        ...

    def name_of(self, token: int) -> str:
        """Returns the name of an id: the inverse of `id_of`."""
        ...

    def unknown(self, texts: list[str]) -> tuple[float, list[str]]:
        """Returns share of the characters (white space left out) that are in no token but the unknown one, and some
        of them.
        """
        ...

    def token_bytes(self) -> np.ndarray:
        """Returns i32[vocab_size]: bytes of text each token stands for; 0 for special tokens."""
        ...

    def is_token(self) -> np.ndarray:
        """Returns bool[vocab_size]: which ids are tokens; a vocabulary may have holes."""
        ...

    def save(self, path: Path) -> None:
        """Writes one file that `load_tokenizer` reads."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; 256 stands between documents."""

    vocab_size = 257
    start_id = eos_id = 256
    before_text: tuple[int, ...] = ()
    fingerprint = "bytes-257"
    special_names = added_names = (END_TOKEN,)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def encode_template(self, texts: list[str], continued: list[bool]) -> list[np.ndarray]:
        end = np.array([self.eos_id], np.int32)
        return [
            np.concatenate([piece for part in self.encode(text.split(END_TOKEN)) for piece in (part, end)])[
                :-1
            ]
            for text in texts
        ]

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        special = END_TOKEN.encode() if keep_special else b""
        return b"".join(bytes([i]) if i < 256 else special for i in map(int, ids)).decode("utf-8", "replace")

    def id_of(self, name: str) -> int | None:
        return self.eos_id if name == END_TOKEN else None

    def name_of(self, token: int) -> str:
        return self.decode([token], keep_special=True)

    def unknown(self, texts: list[str]) -> tuple[float, list[str]]:
        return 0.0, []

    def token_bytes(self) -> np.ndarray:
        return (np.arange(257) < 256).astype(np.int32)

    def is_token(self) -> np.ndarray:
        return np.ones(257, bool)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(BYTES_FILE))


class LibraryTokenizer:
    """A tokenizer.json, read by the `tokenizers` library. Offline: no name is looked up anywhere."""

    def __init__(self, serialized: str):
        from tokenizers import Tokenizer as Implementation

        self._implementation = Implementation.from_str(serialized)
        self._implementation.no_truncation()  # a file may ask for texts to be cut, or padded
        self._implementation.no_padding()
        # Text that happens to contain the name of a special token must not become that token.
        self._implementation.encode_special_tokens = True
        self._serialized = serialized
        self._vocab = self._implementation.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        self.start_id, self.eos_id = self._first(START_NAMES), self._first(END_NAMES)
        self.fingerprint = hashlib.blake2b(serialized.encode(), digest_size=8).hexdigest()

    def _first(self, names: Iterable[str]) -> int | None:
        """Returns the id of the first of these names that is a special token, or else any token: Gemma's vocabulary has
        <s> and </s> too, as the tags of web pages.
        """
        added = self._implementation.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        known = sorted((name for name in names if name in self._vocab), key=lambda name: name not in special)
        return self._vocab[known[0]] if known else None

    @property
    def before_text(self) -> tuple[int, ...]:
        if self._implementation.post_processor is None:
            return ()
        encoding = self._implementation.encode("a", add_special_tokens=True)
        added = np.asarray(encoding.special_tokens_mask)
        return () if added.all() else tuple(encoding.ids[: int(added.argmin())])

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._implementation.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_template(self, texts: list[str], continued: list[bool]) -> list[np.ndarray]:
        # What follows a special token is in the middle of a text, so one is put before and taken off again.
        before = [self._anchor if continues else "" for continues in continued]
        whole = [anchor + text for anchor, text in zip(before, texts, strict=True)]
        encodings = self._reads_names.encode_batch_fast(whole, add_special_tokens=False)
        return [
            np.asarray(encoding.ids, np.int32)[bool(anchor) :]
            for anchor, encoding in zip(before, encodings, strict=True)
        ]

    @property
    def added_names(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._reads_names.get_added_tokens_decoder().values())

    @property
    def special_names(self) -> tuple[str, ...]:
        added = self._reads_names.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @cached_property
    def _reads_names(self) -> Any:
        """Makes the same tokenizer reading names of special tokens in a text, those of its ends among them."""
        from tokenizers import Tokenizer as Implementation

        made = Implementation.from_str(self._serialized)
        made.no_truncation()
        made.no_padding()
        made.add_special_tokens([self.name_of(i) for i in (self.start_id, self.eos_id) if i is not None])
        made.encode_special_tokens = False
        return made

    @cached_property
    def _anchor(self) -> str:
        """Returns the name of a special token after which a text is encoded as it stands; "" if there is none."""
        added = self._reads_names.get_added_tokens_decoder()
        return next((token.content for token in added.values() if token.special and not token.rstrip), "")

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        return self._implementation.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def id_of(self, name: str) -> int | None:
        return self._vocab.get(name)

    def name_of(self, token: int) -> str:
        return self._implementation.id_to_token(int(token)) or ""

    def unknown(self, texts: list[str]) -> tuple[float, list[str]]:
        lost, total = Counter(), 0
        for text, encoding in zip(
            texts, self._implementation.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            known = np.zeros(len(text) + 1, np.int32)
            spans = [s for s, i in zip(encoding.offsets, encoding.ids, strict=True) if i != self._unknown_id]
            for edge, change in zip(np.array(spans or [(0, 0)]).T, (1, -1), strict=True):
                np.add.at(known, edge, change)
            covered = np.cumsum(known) > 0
            lost.update(text[k] for k in np.flatnonzero(~covered[: len(text)]) if not text[k].isspace())
            total += sum(not character.isspace() for character in text)
        return sum(lost.values()) / max(total, 1), [character for character, _ in lost.most_common(SHOWN)]

    @cached_property
    def _unknown_id(self) -> int | None:
        """Returns the id of the unknown token, by its name or number in the model."""
        model = json.loads(self._serialized)["model"]
        return model["unk_id"] if "unk_id" in model else self._vocab.get(model.get("unk_token"))

    def token_bytes(self) -> np.ndarray:
        return self._token_bytes.copy()

    def is_token(self) -> np.ndarray:
        found = np.zeros(self.vocab_size, bool)
        found[list(self._vocab.values())] = True
        return found

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        definition = json.loads(self._serialized)
        added = {token["id"]: token for token in definition.get("added_tokens", ())}
        byte_level = '"ByteLevel"' in json.dumps(definition.get("decoder"))
        sizes = np.zeros(self.vocab_size, np.int32)
        for name, i in self._vocab.items():
            if i not in added:
                sizes[i] = _num_bytes(name, byte_level)
            elif not added[i]["special"]:
                sizes[i] = len(name.encode())
        return sizes

    def save(self, path: Path) -> None:
        write_whole(path, self._serialized)


def absent_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, int], ...]:
    """Returns ranges (first, end) of the ids below `vocab_size` that are not tokens: padding, and holes.

    What samples from a model of that vocabulary leaves them out, since no text corresponds to them.
    """
    known = np.zeros(vocab_size, bool)
    mask = tokenizer.is_token()[:vocab_size]
    known[: len(mask)] = mask
    edges = np.flatnonzero(np.diff(np.concatenate([[True], known, [True]]).astype(np.int8)))
    return tuple((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens on the first SAMPLE_BYTES of `texts`.

    The same texts in the same order give the same tokenizer. Every byte is a token, so nothing is unknown.
    """
    from tokenizers import Tokenizer as Implementation
    from tokenizers import decoders, models, pre_tokenizers, trainers

    implementation = Implementation(models.BPE())
    implementation.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    implementation.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    implementation.train_from_iterator(_first_bytes(texts, SAMPLE_BYTES), trainer)
    return LibraryTokenizer(implementation.to_str())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer in a tokenizer.json, or in a directory that contains one.

    Raises ValueError when there is none, or it cannot be read.
    """
    given = Path(os.path.expanduser(path))
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise Refused(f"[data] tokenizer={str(path)!r} is not a file; use 'bpe', 'bytes' or a tokenizer.json")
    try:
        serialized = file.read_text(encoding="utf-8")
        return ByteTokenizer() if json.loads(serialized) == BYTES_FILE else LibraryTokenizer(serialized)
    except Exception as error:  # the library raises bare Exception
        raise Refused(f"[data] tokenizer={str(path)!r} cannot be read: {error}") from error


def warn_of_unknown(what: str, share: float, examples: list[str]) -> None:
    """Warns of characters that the tokenizer does not know, as `Tokenizer.unknown` has found them; of none, not."""
    if share:
        warnings.warn(
            f"{what} cannot encode {share:.2%} of the characters of the text, such as "
            f"{', '.join(map(repr, examples))}: the model never sees them; use a tokenizer that knows them, 'bpe' or "
            "'bytes'",
            stacklevel=3,
        )


def sampled(texts: Iterable[str], characters: int = 2**19) -> list[str]:
    """Returns the first so many characters, of as many texts as it takes."""
    taken: list[str] = []
    for text in texts:
        taken.append(text[:characters])
        characters -= len(taken[-1])
        if not characters:
            break
    return taken


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= limit:
            return


def _num_bytes(name: str, byte_level: bool) -> int:
    if byte_level:
        return len(name)  # the byte-level alphabet has one character a byte
    if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
        return 1
    return len(name.replace("\u2581", " ").encode())  # SentencePiece writes a space as this character
