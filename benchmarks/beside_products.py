"""Lists what a compiled program does beside matrix products, by the time that it takes in a step.

    python benchmarks/real_sizes_tpu.py --only "8B, v6e:8x8, fsdp 64" --sides jaxfb_best --keep texts
    python benchmarks/beside_products.py texts/8B_v6e_8x8_fsdp_64_jaxfb_best.hlo v6e:8x8         # a minute

Each line is an instruction: the seconds of all its runs beyond its products at the peak rate, the number of runs, bytes
of one, name and result; below it where it comes from. Passes over memory that a compiler could not fuse stand out.
"""

from __future__ import annotations

import argparse
import os
import re
from operator import attrgetter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxfb.planner import parse_topology
from jaxfb.planner.program_cost import hlo_cost
from jaxfb.planner.program_cost.hlo_cost import Executed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="a file with the text of a compiled program")
    parser.add_argument("topology", help="that it is compiled for, such as v5p:4x4x4 or gpu:h100x8")
    parser.add_argument("--most", type=int, default=20, help="number of lines (default: 20)")
    asked = parser.parse_args()
    chip = parse_topology(asked.topology).chip
    if chip is None:
        parser.error(f"{asked.topology} has no known peak; name a kind of chip such as v5p:4x4x4")
    beside = attrgetter("beside_products")
    found = sorted(hlo_cost.executed(asked.text.read_text(), chip), key=beside, reverse=True)
    work = sum(one.times * one.cost.work_seconds for one in found)
    print(f"{work:.3f} s of work, {sum(map(beside, found)):.3f} s of it beside products")
    for one in found[: asked.most]:
        print(described(one))


def described(one: Executed) -> str:
    """Returns two lines about an instruction."""
    came_from = re.search(r'op_name="([^"]*)"', one.instruction.rest)
    numbers = f"{one.beside_products:.4f} s  {one.times:g} x {one.cost.bytes / 1e6:.0f} MB"
    where = came_from[1][-110:] if came_from else ""
    return f"{numbers}  {one.instruction.name}  {one.instruction.result[:80]}\n    {where}"


if __name__ == "__main__":
    main()
