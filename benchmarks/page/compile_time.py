"""The section on the time that the TPU's compiler takes, next to MaxText."""

from __future__ import annotations

from page.markdown import Table
from page.section import Claim, Result, Section


def facts(result: Result) -> dict:
    ratios = [row["median_of_rounds"] for row in result["rows"].values()]
    return {"least": min(ratios), "most": max(ratios), "rounds": result["settings"]["rounds"]}


def table(result: Result) -> list[Table]:
    head = {"job": "", "jaxfb CPU s": ".0f", "MaxText CPU s": ".0f", "time over MaxText's": ".2f"}
    return [
        Table(
            head,
            [
                [name, row["jaxfb"], row["maxtext"], row["median_of_rounds"]]
                for name, row in result["rows"].items()
            ],
        )
    ]


def claims(result: Result) -> list[Claim]:
    return [
        Claim(
            f"CPU time of compiling, {name}",
            f"{row['jaxfb']:.0f} s",
            f"MaxText: {row['maxtext']:.0f} s",
            row["median_of_rounds"],
        )
        for name, row in result["rows"].items()
    ]


SECTIONS = (
    Section(
        "compile_time_tpu",
        "Time to compile for a TPU pod, compared with MaxText",
        """CPU time of the TPU compiler for one step, both libraries with jaxfb's compiler options, compiled in turn in
        processes of their own, in {rounds} rounds; medians. jaxfb's step takes {least:.2f} to {most:.2f} times as long
        to compile. [measurements.md](measurements.md#compile-time) has the reasons. `jaxfb train` keeps compiled
        programs, so that later starts of the same run on the same devices compile nothing.""",
        facts, table, claims,
    ),
)  # fmt: skip
