"""The signals that end a run in an orderly way: Ctrl-C, SIGTERM and, where a terminal may be closed, SIGHUP."""

from __future__ import annotations

import signal

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal is closed; not every system has it."""

ENDING: tuple[signal.Signals, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    *(() if HANGUP is None else (signal.Signals(HANGUP),)),
)


def caught_here() -> list[signal.Signals]:
    """Returns those that a run catches: all but a SIGHUP that is ignored, as under nohup."""
    return [number for number in ENDING if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN]
