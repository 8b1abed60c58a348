"""Defines the command line: its options, what each command does, and the two commands that start other processes."""

from jaxfb.cli.commands import main

__all__ = ["main"]
