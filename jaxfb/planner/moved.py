"""Memory for what XLA moves out of the loop over microbatches: done once instead of in every turn, and kept throughout.

Read from programs compiled for TPUs and GPUs:
a TPU casts a parameter as a whole before the loop, where the loop reads nothing but its cast;
a TPU adds up what each turn would scatter, and scatters the sum once;
a GPU copies a stack of parameters that are gathered along another dim than their first into that dim's order.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxfb.planner.liveness import carried_of
from jaxfb.planner.program import Op, Region, Value

_SHAPED = {"squeeze", "reshape", "convert_element_type", "copy", "sharding_constraint"}


def moved_bytes(region: Region, platform: str) -> int:
    """Returns bytes on one device. region: the step's loops, one device's view."""
    loops = [op for op in region.ops if op.name == "scan" and op.regions[0].length > 1]
    if platform == "tpu":
        return sum(_casts(op) + _sums(op) for op in loops)
    return sum(_turned(op) for op in loops) if platform == "gpu" else 0


def _casts(loop: Op) -> int:
    """Returns the bytes of low-precision copies of loop-invariant values that the loop reads only through a cast."""
    return sum(value.bytes * min(sizes) // value.itemsize for value, sizes in _only_cast(loop))


def _only_cast(loop: Op) -> Iterator[tuple[Value, set[int]]]:
    for value in _constants(loop):
        reads = [use for one in _seen_in_loops(value) for use in one.uses if not use.regions]
        sizes = {use.outputs[0].itemsize for use in reads if use.name == "convert_element_type"}
        if reads and all(use.name == "convert_element_type" for use in reads) and max(sizes) < value.itemsize:
            yield value, sizes


def _sums(loop: Op) -> int:
    """Returns the extra bytes of an unscattered gradient sum, where the TPU compiler scatters once after the loop."""
    body, extra = loop.regions[0], 0
    for begun, summed in zip(carried_of(loop, body)[0], body.outputs, strict=False):
        adds = summed.maker is not None and summed.maker.name in ("add", "add_any")
        for term in summed.maker.inputs if adds and begun in summed.maker.inputs else ():
            scattered = _source(term)
            if scattered is not None and scattered.name == "reduce_scatter":
                whole = scattered.inputs[0]
                extra += whole.bytes // whole.itemsize * summed.itemsize - summed.bytes
    return extra


def _turned(loop: Op) -> int:
    """Returns the bytes of the stacks whose slices are gathered along another dim than their first."""
    return sum(
        value.bytes
        for value in _constants(loop)
        if any(_gathered_across(one) for one in _seen_in_loops(value) if one.shape != value.shape)
    )


def _gathered_across(value: Value) -> bool:
    for use in value.uses:
        if use.name == "all_gather" and use.params["all_gather_dimension"] > 0:
            return True
        if use.name in _SHAPED and _gathered_across(use.outputs[0]):
            return True
    return False


def _constants(loop: Op) -> list[Value]:
    """Returns what the turns of a loop read and none of them changes."""
    body = loop.regions[0]
    changing = {value for values in carried_of(loop, body) for value in values}
    return [value for value in body.inputs if value not in changing and value.bytes]


def _seen_in_loops(value: Value) -> Iterator[Value]:
    """Returns a value, and it or its slices as the loops inside see it."""
    yield value
    for use in value.uses:
        for inner in use.regions:
            for given, seen in zip(use.inputs[-len(inner.inputs) :], inner.inputs, strict=True):
                if given is value:
                    yield from _seen_in_loops(seen)


def _source(value: Value) -> Op | None:
    """Returns what made a value, casts and shapes apart."""
    while value.maker is not None and value.maker.name in _SHAPED:
        value = value.maker.inputs[0]
    return value.maker
