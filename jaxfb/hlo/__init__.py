"""Reads compiled programs from their text: instructions, loops, and what is sent between devices.

No part of a step: tests count with it, and so does the planner.
"""

from jaxfb.hlo.calls import FIRST_TURNS, SELDOM, callees
from jaxfb.hlo.communication import (
    KINDS,
    Collective,
    begins_chain,
    chain_of,
    collective,
    collective_kind,
    collectives,
    is_collective,
    marks_end_of_chain,
    traffic,
)
from jaxfb.hlo.host import HostTransfer, host_transfer
from jaxfb.hlo.text import REGIONS, Instruction, bytes_of, operand_names, parse, types

__all__ = [
    "FIRST_TURNS",
    "KINDS",
    "REGIONS",
    "SELDOM",
    "Collective",
    "HostTransfer",
    "Instruction",
    "begins_chain",
    "bytes_of",
    "callees",
    "chain_of",
    "collective",
    "collective_kind",
    "collectives",
    "host_transfer",
    "is_collective",
    "marks_end_of_chain",
    "operand_names",
    "parse",
    "traffic",
    "types",
]
