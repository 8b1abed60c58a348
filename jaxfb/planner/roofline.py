"""The shortest time of a traced program's work: each operation takes its products at the peak rate or its bytes at the
peak bandwidth, whichever is longer.

What exists in memory is `liveness`'s rule; what is fused away costs nothing, and what it reads is read by its reader.
Softmax over whole [T, T] scores is most of this where no flash kernel runs.
"""

from __future__ import annotations

import math

from jaxfb.planner import liveness
from jaxfb.planner.kernels import kernel_flops
from jaxfb.planner.program import Op, Region, Value, run_regions

RAGGED = ("ragged_dot", "ragged_dot_general")
_SLICES = {"slice", "dynamic_slice", "gather"}


def flops(op: Op, rows: float = math.inf) -> float:
    """Returns the FLOPs of a matrix product, or of those inside a kernel; 0 of anything else.

    rows: of a ragged product, those that there are.
    """
    if op.name == "dot_general":
        (contracted, _), _ = op.params["dimension_numbers"]
        left = op.inputs[0].shape
        return 2.0 * math.prod(op.outputs[0].shape) * math.prod(left[dim] for dim in contracted)
    if op.name in RAGGED:
        return _ragged_flops(op, rows)
    if op.name == "pallas_call":
        return kernel_flops(op.params["name"] or "", [value.shape for value in op.inputs])
    return 0.0


def work_seconds(region: Region, rate: float, bandwidth: float, rows: float = math.inf) -> float:
    """Returns the time of a region's work, loops counted, collectives left out. rows: as in `flops`."""
    in_memory, total = liveness.in_memory(region), 0.0
    for op in region.ops:
        if op.regions:
            inside = ((inner.length, work_seconds(inner, rate, bandwidth, rows)) for inner in run_regions(op))
            total += sum(length * seconds for length, seconds in inside)
        else:
            total += max(flops(op, rows) / rate, _moved(op, in_memory) / bandwidth)
    return total


def _moved(op: Op, in_memory: set[Value]) -> float:
    """Returns bytes that an operation reads and writes."""
    if op.name == "dynamic_update_slice":
        return 2.0 * op.inputs[1].bytes
    written = sum(value.bytes for value in op.outputs if value in in_memory)
    if not written:
        return 0.0
    read: dict[Value, int] = {}
    for value in op.inputs:
        _read(value, in_memory, read)
    return written + sum(read.values())


def _read(value: Value, in_memory: set[Value], read: dict[Value, int]) -> None:
    """Adds what must be read for a value: itself, or what it is fused from."""
    if value in read:
        return
    if value.maker is None or value in in_memory or value.maker.name in _SLICES:
        read[value] = value.bytes
        return
    for one in value.maker.inputs:
        _read(one, in_memory, read)


def _ragged_flops(op: Op, rows: float) -> float:
    """Returns the FLOPs of a ragged product: each row meets one group's matrix, rows x columns before x after."""
    left, right = op.inputs[0].shape, op.inputs[1].shape
    return 2.0 * min(left[0], rows) * left[1] * right[-1]
