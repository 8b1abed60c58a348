"""Writes a run's tokenizer, its chat template and the tokens that end its texts beside its exported weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxfb.data import load_tokenizer
from jaxfb.data.chat import FILE, Chat, read_chat
from jaxfb.pretrained.repository import read_json

_GENERATION = "generation_config.json"


def token_ids(source: Path, is_own: bool) -> dict[str, Any]:
    """Returns the keys of config.json for the tokens that begin and end a text.

    They replace keys of the same names; {} where those stay.

    source: the run. is_own: whether its model was trained from scratch, so that no files name these tokens.
    """
    if not (source / "tokenizer.json").is_file():
        return {}
    if (chat := _chat_of(source)) is not None:
        ends = _one_or_all(chat.stop_tokens)
        return {"bos_token_id": chat.tokenizer.start_id, **ends} if is_own else ends
    if not is_own:
        return {}
    tokenizer = load_tokenizer(source / "tokenizer.json")
    return {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.eos_id}


def add_tokenizer(source: Path, target: Path) -> list[Path]:
    """Writes the run's tokenizer and its chat template, where the target has not the same; returns the new files.

    Files of the model that the run began with may contain further templates, which stay.
    """
    written, own = [], source / "tokenizer.json"
    if not (target / "tokenizer.json").exists() and _is_library_tokenizer(own):
        written.append(Path(shutil.copyfile(own, target / "tokenizer.json")))
    if (chat := _chat_of(source)) is None or not (target / "tokenizer.json").exists():
        return written
    if (given := read_chat(target, chat.tokenizer)) is None or given.template != chat.jinja:
        written.append(target / "chat_template.jinja")
        written[-1].write_text(chat.jinja, encoding="utf-8")
    if (target / _GENERATION).is_file():  # transformers reads it in place of config.json
        values = {**read_json(target / _GENERATION), **_one_or_all(chat.stop_tokens)}
        (target / _GENERATION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return written


def _chat_of(source: Path) -> Chat | None:
    """Returns the chat that the run was trained with, None if it learned no conversations."""
    has_both = (source / FILE).is_file() and (source / "tokenizer.json").is_file()
    return read_chat(source, load_tokenizer(source / "tokenizer.json")) if has_both else None


def _one_or_all(ends: Iterable[int]) -> dict[str, Any]:
    found = list(ends)
    return {"eos_token_id": found[0] if len(found) == 1 else found}


def _is_library_tokenizer(path: Path) -> bool:
    return path.is_file() and "model" in read_json(path)
