"""A conversation in a terminal: `jaxfb chat RUN`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from jaxfb.inference.complete import Sampling, answers
from jaxfb.inference.model import Model
from jaxfb.inference.prompts import Message
from jaxfb.refusal import Refused

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: Model,
    how: Sampling,
    system: str | None = None,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> list[Message]:
    """Answers every line that is read until there are no more, and returns the conversation.

    Each answer is written piece by piece, and sampled with another random key than those before it. A line that is
    refused, such as one that is not UTF-8, is forgotten; the conversation goes on.

    Args:
      system: the message that the conversation begins with.
      read: shows a prompt and returns a line; EOFError ends the conversation.
      write: prints text without adding a line break.
    Raises:
      ValueError: the model has no chat template.
    """
    if model.chat is None:
        raise Refused(
            f"[chat] {model.name} has no chat template; continue a text with jaxfb generate, or fine-tune it "
            "with jaxfb sft"
        )
    begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages, number = list(begin), 0
    write(f"{model.title}; {HELP}\n")
    while (line := _line(read)) is not None:
        if line in ("/reset", "/help", ""):
            messages = list(begin) if line == "/reset" else messages
            write({"/reset": "forgotten\n", "/help": HELP + "\n"}.get(line, ""))
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(model, messages, replace(how, seed=(how.seed + number) % 2**32), write)
        except Refused as error:
            write(f"{error}\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        number += 1
    write("\n")
    return messages


def _line(read: Callable[[str], str]) -> str | None:
    """Returns the next line, None at the end."""
    try:
        line = read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line


def _answer(model: Model, messages: list[Message], how: Sampling, write: Callable[[str], None]) -> str:
    found = []
    try:
        for piece in answers(model, messages, how):
            found.append(piece)
            write(piece)
    except KeyboardInterrupt:
        write(" (stopped)")
    write("\n")
    return "".join(found)


def with_line_editing() -> Callable[[str], str]:
    """Returns `input` with the arrow keys, where Python was built with them; without an input it ends at once."""
    with suppress(ImportError):
        import_module("readline")
    return _closed if sys.stdin is None else input


def _closed(prompt: str) -> str:
    raise EOFError
