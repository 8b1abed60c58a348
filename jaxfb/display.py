"""The terminal: tables at the start, a live line while it trains, plain lines where there is no terminal.

Reads numbers, changes none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, TextIO

FIELDS = (
    ("loss", "loss", "{:.4f}"),
    ("reward", "reward", "{:.3f}"),
    ("learning_rate", "lr", "{:.2e}"),
    ("grad_norm", "grad norm", "{:.3f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("seconds_per_step", "s/update", "{:.3g}"),  # where no tokens are counted
)
WIDE = 110  # columns of a terminal wide enough for a bar next to the numbers


class Progress:
    """Step, loss, learning rate, gradient norm, tokens a second, time left: a live line on a terminal.

    Elsewhere (a file, a pipe) it prints plain lines.

        with Progress(total=400, done=0) as progress:
            progress.update(step, record, seconds_left)
            progress.say("held-out loss 3.21 at 100")

    total, done: steps of the whole run, and those done before (a resumed run).
    stream:      where to; standard output by default. live: None asks the stream whether it is a terminal.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None, live: bool | None = None):
        self._stream = stream or sys.stdout
        self._total, self._done = total, done
        is_terminal = self._stream is not None and self._stream.isatty()  # None: closed by the shell
        self._live = is_terminal if live is None else live
        self._bar = self._task = None

    def __enter__(self) -> Progress:
        if self._live:
            self._bar, self._task = _bar(self._stream, self._total, self._done)
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self, step: int, record: Mapping[str, float], seconds_left: float | None = None, line: bool = True
    ) -> None:
        """Shows the numbers of a step; `line=False` moves a live line but prints no plain one."""
        text = summary(record)
        left = f"eta {duration(seconds_left)}" if seconds_left is not None else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text, left=left)
        elif line:
            self.say("  ".join(part for part in (f"{step}/{self._total}", text, left) if part))

    def say(self, text: str) -> None:
        """Prints a line that stays, above the live one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def summary(record: Mapping[str, float]) -> str:
    """Returns one line of the FIELDS in the record: `loss 3.2101  lr 3.00e-03  grad norm 0.512  tokens/s 11,402`."""
    shown = [(name, label, form) for name, label, form in FIELDS if record.get(name) is not None]
    if math.isnan(record.get("learning_rate") or 0):  # of an optax transformation that does not tell its rate
        shown = [field for field in shown if field[0] != "learning_rate"]
    if "tokens_per_second" in record:
        shown = [field for field in shown if field[0] != "seconds_per_step"]
    return "  ".join(f"{label} {form.format(float(record[name]))}" for name, label, form in shown)


def duration(seconds: float) -> str:
    """Returns a duration as 0:01:05, with days where there are some."""
    return str(timedelta(seconds=max(0, round(seconds))))


def number_of(count: int, noun: str, nouns: str | None = None) -> str:
    """Returns a count with its noun, such as `1 row` and `2 rows`; nouns: the plural, where it does not end in -s."""
    return f"{count} {noun if count == 1 else nouns or f'{noun}s'}"


def print_table(title: str, rows: Iterable[tuple[str, Any]]) -> None:
    """Prints two columns under a title: `config`, `batch plan`, `run plan`, `mesh`."""
    rows = [(str(name), "" if value is None else str(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows)]
    print("\n".join(lines), flush=True)


def _bar(stream: TextIO, total: int, done: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    console = Console(file=stream, force_terminal=True)
    columns = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[numbers]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    ]
    if console.width >= WIDE:
        columns[1:1] = [BarColumn(bar_width=16)]
        columns.append(TimeElapsedColumn())
    bar = RichProgress(*columns, console=console, refresh_per_second=4)
    return bar, bar.add_task("", total=total, completed=done, numbers="compiling", left="")
