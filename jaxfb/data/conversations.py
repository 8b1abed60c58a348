"""Conversations and preferences: JSON lines to messages, and pairs of answers to token ids.

Part of the data step (post-training's documents); `chat.py` makes token ids of messages.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfb.data.chat import Chat
from jaxfb.data.samples import sample_file
from jaxfb.data.sources import BOM, DROPPED, HELD_OUT, TRAIN, decoded, hash_of, split_documents
from jaxfb.refusal import Refused, shown, text

ROLES = ("system", "user", "assistant", "tool")
# keys of other programs' files that change what an answer is or whether it is learnt, none of which is read
_NOT_READ = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "weight", "train"),
    *("tools", "functions", "documents", "system"),
)
Message = dict[str, str]


class Pair(NamedTuple):
    """A prompt and two answers to it."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def read_conversations(path: str | Path) -> list[tuple[Message, ...]]:
    """Reads a .jsonl file, one {"messages": [{"role", "content"}, ...]} a line.

    Raises:
      ValueError: the file is missing or empty, or a line is not that; it names the line.
    """
    return [_messages(record.get("messages"), where) for where, record in _records(path)]


def read_preferences(path: str | Path) -> list[Pair]:
    """Reads a .jsonl file, one {"prompt": text, or "messages": [...], "chosen": text, "rejected": text} a line."""
    return [_pair(record, where) for where, record in _records(path)]


def split_held_out(items: Sequence[Any], fraction: float, who: str = "conversations") -> tuple[list, list]:
    """Splits items into (train, held out) by content, so that neither order nor new neighbours move an item.

    Repeated items are left out, with a warning. who: the section of the config that it names.
    """
    hashes = np.array([hash_of(json.dumps(item)) for item in items], np.uint64)
    side = split_documents(hashes, fraction)
    if repeated := int((side == DROPPED).sum()):
        warnings.warn(
            f"[{who}] {repeated} of {len(items)} items are repeated and left out, since they could be held out too; "
            f"with {who}.held_out_path all are kept",
            stacklevel=3,
        )
    on_side = lambda one: [item for item, at in zip(items, side, strict=True) if at == one]  # noqa: E731
    return on_side(TRAIN), on_side(HELD_OUT)


def warn_of_shared(train: Sequence[Any], held_out: Sequence[Any], who: str) -> None:
    """Warns of held-out items that are trained on too. who: the section of the config that it names."""
    trained = {json.dumps(item) for item in train}
    shared = sum(json.dumps(item) in trained for item in held_out)
    if shared:
        warnings.warn(
            f"[{who}] {shared} of the {len(held_out)} items of {who}.held_out_path are trained on too, so held-out "
            f"numbers are too good; remove them from {who}.path",
            stacklevel=3,
        )


def encode_pairs(pairs: Sequence[Pair], chat: Chat) -> tuple[tuple[list, list], tuple[list, list]]:
    """Returns ((ids, counts) of the chosen, (ids, counts) of the rejected), in order; the answers count."""

    def answered(answer: str):
        whole = [(*pair.prompt, {"role": "assistant", "content": getattr(pair, answer)}) for pair in pairs]
        return chat.encode(whole, "last", "preferences")

    return answered("chosen"), answered("rejected")


def longest(*ids: Sequence[np.ndarray]) -> int:
    """Returns the tokens of the longest of all these sequences; 0 without any."""
    return max((len(one) for sequences in ids for one in sequences), default=0)


def cut_to(ids: list[np.ndarray], counts: list[np.ndarray], slots: int) -> tuple[list, list]:
    """Cuts each sequence to at most slots + 1 tokens, at its end."""
    return [one[: slots + 1] for one in ids], [one[: slots + 1] for one in counts]


def _records(path: str | Path) -> Iterator[tuple[str, dict]]:
    file = Path(path)
    if not file.is_file():
        sample = sample_file(file.name) if file.parts[-3:-1] == ("examples", "data") else None
        hint = f"use {sample}, which is installed" if sample else "give a .jsonl file"
        raise Refused(f"[data] there is no file {file}; {hint}")
    content = decoded(file.read_bytes(), file).removeprefix(BOM)
    lines = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise Refused(f"[data] {file} is empty; it needs one JSON object a line")
    for number, line in lines:
        where = f"[data] {file} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{where} is not JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(record, dict):
            raise Refused(f"{where} must be a JSON object, got {type(record).__name__}")
        _refuse_unread(record, where)
        yield where, record


def _refuse_unread(values: dict, where: str) -> None:
    """Refuses keys without which other tokens would be learnt than the file means; empty ones and weights of 1 change
    nothing.
    """
    for name in _NOT_READ:
        if values.get(name) not in (None, "", [], {}, 1):
            raise Refused(
                f"{where}: {name}={shown(values[name])} is not read, so other tokens would be learnt than intended; "
                f'write it into "content", or remove {name}'
            )


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise Refused(f'{where} needs "messages", a list of {{"role", "content"}}')
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise Refused(f'{where}: a message must be {{"role", "content"}} with a string, got {message!r}')
        if message.get("role") not in ROLES:
            raise Refused(f"{where}: role {message.get('role')!r} must be one of {', '.join(ROLES)}")
        text("content", message["content"], who=f"{where}:")
        _refuse_unread(message, where)
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _pair(record: dict, where: str) -> Pair:
    prompt = _prompt_of(record, where)
    for name in ("chosen", "rejected"):
        if not isinstance(record.get(name), str):
            raise Refused(f'{where} needs "{name}", a string; got {record.get(name)!r}')
        text(name, record[name], who=f"{where}:")
    return Pair(prompt, record["chosen"], record["rejected"])


def _prompt_of(record: dict, where: str) -> tuple[Message, ...]:
    """Returns the messages before the answers of a pair; a prompt is one message of the user."""
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if len(given) == 2:
        raise Refused(f'{where} has "prompt" and "messages", of which one would be lost; remove one')
    if given == ["messages"]:
        return _messages(record["messages"], where)
    if not isinstance(record.get("prompt"), str):
        raise Refused(
            f'{where} needs "prompt", a string, or "messages", a list of {{"role", "content"}}; got '
            f"prompt={shown(record.get('prompt'))}"
        )
    return _messages([{"role": "user", "content": record["prompt"]}], where)
