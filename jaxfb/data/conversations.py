"""Conversations and preferences: JSON lines to token ids, with a chat template, and which tokens are learnt.

Step of the story: data (post-training's documents). Pieces of a conversation are encoded apart, so that a prompt
has the same ids in training as when it stands alone; names such as <|im_start|> become one token where the
vocabulary has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfb.data.sources import BOM, HELD_OUT, TRAIN, decoded, name_hash, split_documents
from jaxfb.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, str]


class Piece(NamedTuple):
    """Text between two ends of tokens. learnt: the assistant's. special: the name of one token, if it is known."""

    text: str
    learnt: bool = False
    special: bool = False


class Pair(NamedTuple):
    """A prompt and two answers to it."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


END = Piece("", learnt=True, special=True)  # the tokenizer's own end of a text


def _chatml(message: Message) -> Iterator[Piece]:
    learnt = message["role"] == "assistant"
    yield Piece("<|im_start|>", special=True)
    yield Piece(f"{message['role']}\n")
    yield Piece(message["content"], learnt)
    yield Piece("<|im_end|>", learnt, special=True)
    yield from [END] if learnt else []
    yield Piece("\n")


def _plain(message: Message) -> Iterator[Piece]:
    learnt = message["role"] == "assistant"
    yield Piece(f"{message['role'].capitalize()}: ")
    yield Piece(message["content"], learnt)
    yield END if learnt else Piece("\n\n")


def _none(message: Message) -> Iterator[Piece]:
    learnt = message["role"] == "assistant"
    yield Piece(message["content"], learnt)
    yield from [END] if learnt else []


TEMPLATES: dict[str, Callable[[Message], Iterator[Piece]]] = {
    "chatml": _chatml,
    "plain": _plain,
    "none": _none,
}
# What stands before the assistant's words, for a prompt that waits for them.
OPENINGS = {
    "chatml": (Piece("<|im_start|>", special=True), Piece("assistant\n")),
    "plain": (Piece("Assistant: "),),
    "none": (),
}


def read_conversations(path: str | Path) -> list[tuple[Message, ...]]:
    """Of a .jsonl file, one {"messages": [{"role", "content"}, ...]} a line.

    Raises:
      ValueError: the file is missing or empty, or a line is not that; it names the line.
    """
    return [_messages(record.get("messages"), where) for where, record in _records(path)]


def read_preferences(path: str | Path) -> list[Pair]:
    """Of a .jsonl file, one {"prompt": text, or "messages": [...], "chosen": text, "rejected": text} a line."""
    return [_pair(record, where) for where, record in _records(path)]


def split_held_out(items: Sequence[Any], fraction: float) -> tuple[list, list]:
    """(train, held out): by content, so that neither order nor new neighbours move an item; repeated ones go."""
    hashes = np.array([name_hash(json.dumps(item)) for item in items], np.uint64)
    side = split_documents(hashes, fraction)
    return tuple(
        [item for item, at in zip(items, side, strict=True) if at == one] for one in (TRAIN, HELD_OUT)
    )


def encode_conversations(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, template: str, learn: str = "assistant"
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ids i32[n], counts bool[n]) of each. learn: "assistant", all its messages, or "last", the last one alone.

    An assistant's message ends with the tokenizer's end token, which is learnt.
    """
    pieces = [_pieces(messages, template, learn) for messages in conversations]
    return _encoded(pieces, tokenizer)


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer, template: str) -> np.ndarray:
    """i32[n] of a conversation that waits for the assistant."""
    pieces = [piece for message in messages for piece in TEMPLATES[template](message)]
    return _encoded([[*pieces, *OPENINGS[template]]], tokenizer)[0][0]


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, template: str
) -> tuple[tuple[list, list], tuple[list, list]]:
    """((ids, counts) of the chosen, (ids, counts) of the rejected), in the order of the pairs."""

    def answered(answer: str):
        whole = [(*pair.prompt, {"role": "assistant", "content": getattr(pair, answer)}) for pair in pairs]
        return encode_conversations(whole, tokenizer, template, "last")

    return answered("chosen"), answered("rejected")


def cut_to(
    ids: list[np.ndarray], counts: list[np.ndarray], slots: int, truncate: bool, who: str
) -> tuple[list, list]:
    """Each of at most slots + 1 tokens; a longer one is cut at its end, or refused."""
    for number, one in enumerate(ids):
        if len(one) > slots + 1 and not truncate:
            raise ValueError(
                f"[{who}] item {number} has {len(one)} tokens, sequence_length={slots} has room for {slots + 1}; "
                f"use sequence_length={len(one) - 1}, or truncate=true"
            )
    return [one[: slots + 1] for one in ids], [one[: slots + 1] for one in counts]


def _pieces(messages: Sequence[Message], template: str, learn: str) -> list[Piece]:
    last = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    found = []
    for k, message in enumerate(messages):
        keep = learn == "assistant" or k == last
        found += [piece._replace(learnt=piece.learnt and keep) for piece in TEMPLATES[template](message)]
    return found


def _encoded(
    conversations: list[list[Piece]], tokenizer: Tokenizer
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    texts = [piece.text for pieces in conversations for piece in pieces]
    encoded = iter(tokenizer.encode(texts))
    ids, counts = [], []
    for pieces in conversations:
        parts = [_ids(piece, next(encoded), tokenizer) for piece in pieces]
        ids.append(np.concatenate([*parts, np.zeros(0, np.int32)]).astype(np.int32))
        learnt = [np.full(len(part), piece.learnt) for part, piece in zip(parts, pieces, strict=True)]
        counts.append(np.concatenate([*learnt, np.zeros(0, bool)]))
    return ids, counts


def _ids(piece: Piece, encoded: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    if not piece.special:
        return encoded
    known = tokenizer.id_of(piece.text) if piece.text else tokenizer.eos_id
    return encoded if known is None else np.array([known], np.int32)


def _records(path: str | Path) -> Iterator[tuple[str, dict]]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"[data] there is no file {file}; give a .jsonl file")
    text = decoded(file.read_bytes(), file).removeprefix(BOM)
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"[data] {file} is empty; it needs one JSON object a line")
    for number, line in lines:
        where = f"[data] {file} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
        yield where, record


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f'{where} needs "messages", a list of {{"role", "content"}}')
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f'{where}: a message must be {{"role", "content"}} with a text, got {message!r}')
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}: role {message.get('role')!r} must be one of {', '.join(ROLES)}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _pair(record: dict, where: str) -> Pair:
    prompt = record.get("messages")
    if isinstance(record.get("prompt"), str):
        prompt = [{"role": "user", "content": record["prompt"]}]
    for name in ("chosen", "rejected"):
        if not isinstance(record.get(name), str):
            raise ValueError(f'{where} needs "{name}", a text; got {record.get(name)!r}')
    return Pair(_messages(prompt, where), record["chosen"], record["rejected"])
