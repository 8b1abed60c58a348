"""The planner's formula compared with the TPU compiler, for every row of `real_sizes_tpu.json`; seconds, no compiler.

python benchmarks/planner_accuracy.py       # after real_sizes_tpu.py, or a change of jaxfb/planner/formula.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import real_sizes_tpu
from real_sizes import gigabytes, jaxfb_config
from report import RESULTS, machine

from jaxfb.planner import parse_topology
from jaxfb.planner.verdict import estimated

PATH = RESULTS / f"{Path(__file__).stem}.json"


def main() -> None:
    compiled = json.loads(real_sizes_tpu.ROWS.results.read_text())
    rows = {name: beside_formula(name, sides) for name, sides in compiled["rows"].items()}
    settings = {"compiler": f"libtpu {compiled['machine']['libtpu']}"}
    whole = {"benchmark": PATH.stem, "settings": settings, "machine": machine(), "rows": rows}
    PATH.write_text(json.dumps(whole, indent=1) + "\n")
    for name, row in rows.items():
        print(name, row)


def beside_formula(name: str, sides: dict[str, Any]) -> dict[str, float]:
    """What the compiler reports with the options that jaxfb chooses, and what the formula estimates."""
    row, job = sides.get("jaxfb_best") or sides["jaxfb"], real_sizes_tpu.JOBS[name]
    found = estimated(jaxfb_config(job), parse_topology(job.topology))
    return {
        "hbm_gb": row["hbm_gb"],
        "formula_hbm_gb": gigabytes(found.needed),
        "step_s": row["step_s"],
        "formula_step_s": round(found.step_seconds, 3),
    }


if __name__ == "__main__":
    main()
