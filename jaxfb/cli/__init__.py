"""Defines the command line: its options, what each command does, and the two commands that start other processes."""

from __future__ import annotations

from collections.abc import Sequence

from jaxfb.process.signals import ended_in_imports

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default that of this process; returns its exit code."""
    with ended_in_imports():
        from jaxfb.cli.commands import main as command

        return command(arguments)
