"""One benchmark's part of the page: what its sentences, claims, tables and pictures are, each a function of its result.

Sentences are templates without a digit of their own: every number is a fact of the result. What has no section is
shown in a generic form, so a new benchmark is on the page from its first result on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from page.markdown import Table, flat, plain
from page.plots import Picture

ABOUT = ("benchmark", "settings", "machine")
Result = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A line of the summary. `ours` and `theirs` are costs (time, bytes), so a ratio below one is in jaxfb's favour."""

    what: str
    ours: str
    theirs: str
    ratio: float | None


@dataclass(frozen=True)
class Section:
    """benchmark: the name in its results. script: what `jaxfb bench` calls it, if not the same.

    text: a template of `facts(result)`.
    """

    benchmark: str
    title: str
    text: str
    facts: Callable[[Result], dict[str, Any]]
    tables: Callable[[Result], list[Table]]
    claims: Callable[[Result], list[Claim]] = lambda result: []
    pictures: Callable[[Result], list[Picture]] = lambda result: []
    script: str = ""


def generic(benchmark: str, about: str) -> Section:
    """Whatever a result holds: a mapping of mappings is a table, lone numbers another, lists stay in the file."""
    title = benchmark.replace("_", " ").capitalize()
    return Section(benchmark, title, "{about}", lambda result: {"about": about}, everything)


def everything(result: Result) -> list[Table]:
    entries = {key: value for key, value in result.items() if key not in ABOUT}
    alone = {key: value for key, value in entries.items() if plain(value)}
    tables = [rows_table(key, value) for key, value in entries.items() if isinstance(value, dict)]
    if alone:
        tables.append(rows_table("", alone))
    return [table for table in tables if table.rows]


def rows_table(name: str, rows: dict[str, Any]) -> Table:
    """One line a key; columns are the plain cells that any line has, in order of appearance."""
    cells = {key: flat(value) if isinstance(value, dict) else {"value": value} for key, value in rows.items()}
    cells = {key: {k: v for k, v in line.items() if plain(v)} for key, line in cells.items()}
    columns = list(dict.fromkeys(key for line in cells.values() for key in line))
    head = {spaced(name) if name != "rows" else "": ""}
    head |= {spaced(column): "" if any(isinstance(line.get(column), str) for line in cells.values()) else ">"
             for column in columns}  # fmt: skip
    return Table(
        head, [[spaced(key), *(line.get(c) for c in columns)] for key, line in cells.items() if line]
    )


def microbatches(count: int) -> str:
    return f"{count} microbatch" + "es" * (count != 1)


def spaced(key: str) -> str:
    """`time_over.median_of_rounds` -> `time over, median of rounds`."""
    return str(key).replace("_", " ").replace(".", ", ")
