"""Refuses arguments in words that help: the nearest option or command, what is lacking, and an example."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxfb.schedules import NAMES

OVERRIDE = "key=value"
KINDS = {int: "an integer", float: "a number"}
"""What an option of that type must be, in the words of its refusal."""


def not_taken(command: argparse.ArgumentParser, text: str) -> str:
    """Returns the refusal of an argument that a command does not take, with an option that is like it."""
    close = _nearest_option(command, text)
    near = f" (did you mean {close}?)" if close else ""
    takes_keys = any(action.dest == "overrides" for action in command._actions)
    keys = "; keys of the config have no dashes, such as run.updates=100" if takes_keys else ""
    return f"`{command.prog}` does not take {text!r}{near}{keys}; `{command.prog} --help` lists what it takes"


def _nearest_option(command: argparse.ArgumentParser, text: str) -> str | None:
    """Returns the option that was probably meant: one that is spelt alike, or `--kind` for the name of a schedule."""
    flags = _flags(command)
    if text in NAMES and "--kind" in flags:
        return f"--kind {text}"
    return next(iter(difflib.get_close_matches(text.partition("=")[0], flags, n=1, cutoff=0.7)), None)


def _flags(command: argparse.ArgumentParser) -> list[str]:
    return [option for action in command._actions for option in action.option_strings]


class Parser(argparse.ArgumentParser):
    """A parser whose refusals name the nearest command, the arguments that are missing, and an example."""

    given: Sequence[str] = ()
    example: str | None = None  # a whole command

    def parse_known_args(self, args=None, namespace=None):
        self.given = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = message.replace(f", {OVERRIDE}", "")
        is_lacking = message.endswith(" is required") or "arguments are required" in message
        if is_lacking and (unknown := self._misspelt()):
            super().error(not_taken(self, unknown))
        super().error(f"{message}; for example: {self.example}" if self.example and is_lacking else message)

    def _misspelt(self) -> str | None:
        """Returns the first flag that the command does not have: it may be what is lacking, written otherwise."""
        words = [text.partition("=")[0] for text in self.given if text.startswith("--") and text != "--"]
        return next((word for word in words if not any(flag.startswith(word) for flag in _flags(self))), None)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        kind: Any = action.type
        if kind not in KINDS:
            return super()._get_value(action, text)
        try:
            return kind(text)
        except ValueError:
            such = 1 if action.default is None else action.default
            raise argparse.ArgumentError(
                action, f"must be {KINDS[kind]}, such as {such}, got {text!r}"
            ) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not action.choices:  # a path or a text, which may be called as an option is
            return super()._check_value(action, value)
        known, flag = [str(one) for one in action.choices], f"--{value}"
        if str(value) not in known and flag in _flags(self):
            raise argparse.ArgumentError(
                None, f"unknown {action.metavar or action.dest} {value!r}; did you mean {flag}?"
            )
        close = difflib.get_close_matches(str(value), known, n=1)
        if value in known or not close:
            return super()._check_value(action, value)
        raise argparse.ArgumentError(
            None, f"unknown {action.metavar or action.dest} {value!r}; did you mean {close[0]}?"
        )
