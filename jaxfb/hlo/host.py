"""Finds what a compiled program moves between a device and its host's memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxfb.hlo.text import Instruction, arrays, bytes_of, closing

_WRAPPED = re.compile(r"%?(dynamic-slice|dynamic-update-slice)-start")
_HOST = "S(5)"
"""XLA's number of the host's memory, in a layout."""


class HostTransfer(NamedTuple):
    """An asynchronous instruction that moves so many bytes: direction "read", from the host, or "write", to it."""

    direction: str
    bytes: int


def host_transfer(instruction: Instruction) -> HostTransfer | None:
    """Returns what the start of a copy, a slice or an update moves between the two memories; None if it does not.

    Of a slice the slice is moved, of an update what it writes; XLA for GPUs wraps both in a fusion that is named so.
    """
    moved = arrays(instruction.result)
    kind = instruction.opcode.removesuffix("-start")
    if kind == instruction.opcode or not moved:
        return None
    if kind == "fusion" and (named := _WRAPPED.match(instruction.name)):
        kind = named[1]
    if kind == "copy":  # (what is written, what is read, a mark)
        return _moved(source=moved[1], target=moved[0], what=moved[0])
    results = arrays(
        instruction.result[1 + closing(instruction.result[1:]) :]
    )  # behind the tuple of operands
    if kind in ("dynamic-slice", "slice") and results:  # ((what it is taken of, places), the slice, a mark)
        return _moved(source=moved[0], target=results[0], what=results[0])
    if kind == "dynamic-update-slice" and results:  # ((what is updated, by what, places), the same, a mark)
        return _moved(source=moved[1], target=results[0], what=moved[1])
    return None


def _moved(source: str, target: str, what: str) -> HostTransfer | None:
    from_host, to_host = (_HOST in place for place in (source, target))
    if from_host == to_host:
        return None
    return HostTransfer("read" if from_host else "write", bytes_of(what))
