"""Compares the planner's formula with the compilers, for every row of `real_sizes_tpu.json` and `real_sizes_gpu.json`.

python benchmarks/planner_accuracy.py       # after either benchmark, or a change of jaxfb/planner/formula/; seconds
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import real_sizes_gpu
import real_sizes_tpu
from real_sizes import Rows, gigabytes
from report import RESULTS, machine

from jaxfb.planner import parse_topology
from jaxfb.planner.verdict import estimated

PATH = RESULTS / f"{Path(__file__).stem}.json"
BENCHMARKS = (real_sizes_tpu.ROWS, real_sizes_gpu.ROWS)


def main() -> None:
    rows, compilers = {}, []
    for benchmark in BENCHMARKS:
        compiled = json.loads(benchmark.results.read_text())
        rows |= {name: beside_formula(benchmark, name, sides) for name, sides in compiled["rows"].items()}
        compilers += [f"{package} {compiled['machine'].get(package)}" for package in benchmark.packages]
    settings = {"compilers": ", ".join(compilers)}
    whole = {"benchmark": PATH.stem, "settings": settings, "machine": machine(), "rows": rows}
    PATH.write_text(json.dumps(whole, indent=1) + "\n")
    for name, row in rows.items():
        print(name, row)


def beside_formula(benchmark: Rows, name: str, sides: dict[str, Any]) -> dict[str, float]:
    """What the compiler reports with the options that jaxfb chooses, and what the formula estimates."""
    side = next(side for side in ("jaxfb_best", "jaxfb_rounded", "jaxfb") if side in sides)
    row, job = sides[side], benchmark.jobs[name]
    found = estimated(benchmark.config(job, side), parse_topology(job.topology))
    return {
        "hbm_gb": row["hbm_gb"],
        "formula_hbm_gb": gigabytes(found.needed),
        "step_s": row["step_s"],
        "formula_step_s": round(found.step_seconds, 3),
    }


if __name__ == "__main__":
    main()
