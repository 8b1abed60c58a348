"""Reads compiled programs from their text: instructions, loops, and what is sent between devices.

No part of a step: tests count with it, and so does the planner.
"""

from jaxfb.hlo.calls import SELDOM, callees
from jaxfb.hlo.communication import (
    KINDS,
    Collective,
    chain_of,
    collective,
    collective_kind,
    collectives,
    traffic,
)
from jaxfb.hlo.host import HostTransfer, host_transfer
from jaxfb.hlo.text import REGIONS, Instruction, bytes_of, operand_names, parse, types

__all__ = [
    "KINDS",
    "REGIONS",
    "SELDOM",
    "Collective",
    "HostTransfer",
    "Instruction",
    "bytes_of",
    "callees",
    "chain_of",
    "collective",
    "collective_kind",
    "collectives",
    "host_transfer",
    "operand_names",
    "parse",
    "traffic",
    "types",
]
