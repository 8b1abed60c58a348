"""Compares the time that the TPU compiler takes for a step of jaxfb and for one of MaxText, compiled in turn.

    maxtext_env/bin/python benchmarks/compile_time_tpu.py                    # quarter of an hour on two cores
    maxtext_env/bin/python benchmarks/compile_time_tpu.py --rounds 1 --only "8B, v5p:4x4x4, fsdp 64"

The rows and the environment are those of `real_sizes_tpu.py`, whose own compile times are of the moment in which a row
was compiled. Here both sides of a row are compiled in every round, with the options of jaxfb, in a process each, and
CPU time is counted, so that a load of the machine that comes and goes changes the ratio less.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import real_sizes_tpu
from real_sizes import compile_row, version
from report import RESULTS, machine

ROWS = real_sizes_tpu.ROWS
PATH = RESULTS / f"{Path(__file__).stem}.json"
SIDES = ("jaxfb_best", "maxtext_best")
USUAL = (
    "8B, v5p:4x4x4, fsdp 64",
    "8B, v5e:16x16, fsdp 256",
    "70B, v5p:8x8x8, fsdp 64 x tensor 8",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*USUAL], choices=[*ROWS.jobs], metavar="ROW")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    rows = json.loads(PATH.read_text())["rows"] if PATH.exists() else {}
    for name in asked.only:
        rows[name] = in_turn(name, asked.rounds)
        print(name, json.dumps(rows[name]), flush=True)
        save({name: rows[name] for name in USUAL if name in rows}, asked.rounds)


def in_turn(name: str, rounds: int) -> dict[str, Any]:
    """Compiles both sides in every round; returns the CPU seconds of each round, and medians."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(rounds):
        for side in SIDES[:: 1 if index % 2 else -1]:
            seconds[side].append(compile_row(ROWS, name, side, None)["compile_cpu_s"])
    ours, theirs = (seconds[side] for side in SIDES)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "jaxfb_cpu_s": ours,
        "maxtext_cpu_s": theirs,
        "jaxfb": round(median(ours), 1),
        "maxtext": round(median(theirs), 1),
        "median_of_rounds": round(median(ratios), 3),
    }


def save(rows: dict[str, Any], rounds: int) -> None:
    """Writes the rows, beside the machine and the versions."""
    versions = machine() | {package: version(package) for package in ROWS.packages}
    whole = {"benchmark": PATH.stem, "settings": {"rounds": rounds}, "machine": versions, "rows": rows}
    PATH.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
