"""Prompts and answers in files, and what a prompt may be: a string, or a conversation that waits for an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfb.data.conversations import ROLES
from jaxfb.data.sources import BOM
from jaxfb.refusal import Refused, refuse, text

Message = dict[str, str]
Prompt = str | Sequence[Message]


def check_prompt(prompt: Any, name: str = "prompt", who: str = "[generate]") -> None:
    """Refuses what is neither a string nor messages, or cannot be written in UTF-8."""
    if isinstance(prompt, str):
        text(name, prompt, who=who)
        return
    if not (isinstance(prompt, Sequence) and prompt and all(map(_is_message, prompt))):
        rule = f'a string, or messages {{"role": one of {", ".join(ROLES)}, "content": text}}'
        refuse(name, prompt, rule, who=who)
    for message in prompt:
        text(name, message["content"], who=who)


def read_prompts(path: str | Path) -> dict[str, Prompt]:
    """Reads prompts: of a .jsonl file {"prompt": text} or {"messages": [...]} a line, of any other file its lines.

    Returns:
      Each by what refusals call it, in their order.
    Raises:
      ValueError: the file is missing, empty or not UTF-8, or a line is not that; it names the line.
    """
    file, who = Path(path), "[generate]"
    lines = lines_of(read_text(file, who))
    if not lines:
        raise Refused(f"{who} {file} has no prompts")
    read = _prompt if file.suffix == ".jsonl" else lambda line, where: line
    wheres = {f"line {number} of {file}": line for number, line in lines}
    return {prompt_in(where): read(line, where) for where, line in wheres.items()}


def prompt_in(where: str) -> str:
    """Returns what refusals call the prompt of a line."""
    return f"the prompt in {where}"


def read_text(path: str | Path, who: str) -> str:
    """Returns the text of a file without a byte order mark; refuses one that is not there or not UTF-8."""
    file = Path(path)
    if file.is_dir() or not file.exists():  # a pipe is not a file, but can be read
        raise Refused(f"{who} there is no file {file}")
    try:
        return file.read_text(encoding="utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise Refused(f"{who} {file} is not UTF-8: {error.reason} at offset {error.start}") from None


def lines_of(content: str) -> list[tuple[int, str]]:
    """Returns (number, line) of the lines that are not blank; a line separator (U+2028) inside a text is part of it."""
    return [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def record_of(line: str, where: str) -> dict[str, Any]:
    """Returns the JSON object of a line, {} where it is none; refuses what is not JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{where} is not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def _prompt(line: str, where: str) -> Prompt:
    record = record_of(line, f"[generate] {where}")
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str):
        found = prompt
    elif isinstance(messages, list) and messages and all(map(_is_message, messages)):
        found = messages
    else:
        raise Refused(
            f'[generate] {where} must be {{"prompt": text}} or {{"messages": [{{"role", "content"}}, ...]}}'
        )
    check_prompt(found, prompt_in(where))
    return found


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)


def check_target(path: str | Path) -> None:
    """Refuses a file for answers that cannot be there, before any answer is computed."""
    file = Path(path)
    if file.is_dir():
        raise Refused(
            f"[generate] --out {file} is a directory; give a file in it, such as {file / 'answers.jsonl'}"
        )
    if not file.parent.is_dir():
        raise Refused(f"[generate] --out {file} is in {file.parent}, which is not a directory; make it first")


def write_answers(path: str | Path, prompts: Sequence[Prompt], found: Sequence[list[str]]) -> None:
    """Writes one JSON object a line: the prompt or the messages, and the answers.

    Raises:
      OSError: the file does not take them; it is named.
    """
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for prompt, texts in zip(prompts, found, strict=True):
                name = "prompt" if isinstance(prompt, str) else "messages"
                file.write(json.dumps({name: prompt, "answers": texts}, ensure_ascii=False) + "\n")
    except OSError as error:  # of a write, it lacks the name
        raise OSError(error.errno, error.strerror, str(path)) from error
