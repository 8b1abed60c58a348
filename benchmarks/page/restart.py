"""The section on restarts: seconds from the death of a process to the next applied update, and updates lost."""

from __future__ import annotations

from statistics import median

from page.markdown import Table
from page.section import Result, Section

COLUMNS = {
    "seconds to the new processes": ".1f",
    "seconds to the next update": ".1f",
    "updates lost": ".0f",
}


def medians(result: Result) -> dict[str, dict[str, float]]:
    return {
        name: {column: median(kill[column] for kill in kills) for column in COLUMNS}
        for name, kills in result["rows"].items()
    }


def facts(result: Result) -> dict:
    seconds = [row["seconds to the next update"] for row in medians(result).values()]
    return {"kills": result["settings"]["kills"], "least": min(seconds), "most": max(seconds)}


def table(result: Result) -> list[Table]:
    rows = [[name, *row.values()] for name, row in medians(result).items()]
    return [Table({"processes, and where checkpoints are": "", **COLUMNS}, rows)]


SECTIONS = (
    Section(
        "restart",
        "Restarting after a killed process",
        """A process of a run under `jaxfb launch` is killed; the table has the medians of {kills} kills. The next
        update is applied **{least:.0f} to {most:.0f} s** later, in which processes start, compile and read the
        checkpoint. With checkpoints on local disks, which are saved more often, fewer updates are computed again.""",
        facts, table,
    ),
)  # fmt: skip
