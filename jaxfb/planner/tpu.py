"""The TPU compiler on a machine without a TPU: where it is installed, its devices, and the memory that it plans.

It comes with libtpu. What it will have allocated it tells in a report beside the program alone:
`memory_analysis().temp_size_in_bytes` was up to 2.5 times that for a toy and 1.6 times for a model of 8B, while what it
refuses, and with which number, goes by the report's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxfb.planner.topology import Topology
from jaxfb.platforms.torus import is_of_cubes
from jaxfb.refusal import Refused

INSTALL = "pip install 'jaxfb[plan]' adds libtpu (no TPU is needed)"
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache comes without its report
}
_HBM = re.compile(r"^Memory Space: default \(color=0\)\nTotal bytes: (\d+)", re.MULTILINE)


def is_installed() -> bool:
    """Returns whether libtpu is installed; nothing is loaded."""
    return find_spec("libtpu") is not None


def devices(topology: Topology) -> list:
    """Returns the devices of a slice to compile for.

    Raises:
      ValueError: libtpu knows no such slice.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"wrap": wraps(topology)}
    if topology.chip and topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"
    if max(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(topology.text, platform="tpu", **options).devices
    except Exception as error:
        first = str(error).splitlines()[0]
        raise Refused(
            f"[plan] libtpu does not make {topology.text}: {first}; use a shape such as 4x4x4"
        ) from None


def wraps(topology: Topology) -> tuple[bool, bool, bool]:
    """Returns in which dimensions of a slice the last chip is linked to the first.

    A torus of three dimensions consists of cubes (`is_of_cubes`); smaller slices are meshes. One of two dimensions has
    such links along a side of 16 chips. A compiler that is not given this takes the slice for a mesh: no permute along
    a ring runs beside anything, and gathers over all of it are all-reduces.
    """
    shape = (*topology.shape, *(1,) * (3 - len(topology.shape)))
    if topology.chip is not None and topology.chip.torus == 3:
        closed = is_of_cubes(shape)
        return closed, closed, closed
    x, y, _ = (size == 16 for size in shape)
    return x, y, False


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array on a TPU, whose last two dims, in the order that wastes less, fill tiles of 8 x
    128; a few rows lie in tiles of 4, 2 or 1.
    """
    *stacked, rows, columns = (1, 1, *shape)

    def padded(rows: int, columns: int) -> int:
        tile = min(8, 1 << (rows - 1).bit_length())
        return math.ceil(rows / tile) * tile * math.ceil(columns / 128) * 128

    return math.prod(stacked) * min(padded(rows, columns), padded(columns, rows)) * itemsize


def report_into(directory: Path) -> dict[str, Any]:
    """Returns the compiler's options with which it writes its reports there."""
    return {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}


def reported_bytes(directory: Path) -> int | None:
    """Returns HBM that the program takes beside its own code, arguments included; None where there is no report."""
    reports = [path.read_text() for path in directory.glob("*memory-usage-report.txt")]
    found = [int(one[1]) for text in reports if (one := _HBM.search(text))]
    return max(found, default=None)
