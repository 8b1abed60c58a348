"""Lists what a compiled program sends between devices: every collective, its bytes, its group, how often it runs.

It reads the text of `compiled.as_text()`, of any backend, and nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxfb.hlo.calls import callees, times_run
from jaxfb.hlo.groups import groups_of
from jaxfb.hlo.text import Instruction, arrays, bytes_of, closing, parse, types
from jaxfb.refusal import Refused

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_SCATTER = "all-reduce-scatter"
"""How the names of the computations begin that are an all-reduce fused with the slice behind it."""
_CHAIN_BEGINS, _CHAIN_IS_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Calls with which XLA for TPUs marks the ends of a collective that a chain of fusions carries out."""


@dataclass(frozen=True)
class Collective:
    """A collective instruction of a compiled program.

    kind:           such as "all-reduce"; the start of an asynchronous pair counts, its end does not.
    arrays:         how many arrays it carries (XLA combines several into one instruction).
    bytes:          of the whole arrays on one device: the result of a gather, the operand of a scatter; of a ragged
                    exchange the smaller of operand and result.
    replica_groups: positions in `mesh.devices.flat` that talk to each other; of a permute the (source,
                    target) pairs; () is all devices together.
    times:          how often one run of the program executes it; None in a loop of unknown length.
    computation:    the HLO computation that holds it.
    op_name:        where in the JAX program it comes from, named scopes included.
    """

    kind: str
    arrays: int
    bytes: int
    replica_groups: tuple[tuple[int, ...], ...]
    times: int | None
    computation: str
    op_name: str

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the axes of `mesh` along which it moves data, outermost first."""
        moved = set()
        for group in self.replica_groups or (tuple(range(mesh.size)),):
            places = np.unravel_index(group, mesh.devices.shape)
            moved |= {axis for axis, along in enumerate(places) if len(set(along.tolist())) > 1}
        return tuple(name for axis, name in enumerate(mesh.axis_names) if axis in moved)


def collectives(compiled_text: str) -> list[Collective]:
    """Returns every collective of a compiled program, with loop bodies multiplied by their trip counts.

    A branch of a conditional counts as if it were always taken. What a TPU compiler has fused is one collective as
    well: an all-reduce with the slice behind it (a reduce-scatter), and one that a chain of fusions carries out.

    Raises:
      ValueError: the text has no ENTRY computation, or a replica group is written in an unknown way.
    """
    computations, entry = parse(compiled_text)
    times, chains = times_run(computations, entry), set()
    return [
        collective(instruction, kind, instructions, times.get(name, 0), name)
        for name, instructions in computations.items()
        for instruction in instructions
        if (kind := collective_kind(instruction.opcode, name)) and _is_first(instruction, chains)
    ]


def traffic(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Returns kind -> (arrays moved, bytes moved) by one run of the program on one device."""
    arrays, size = Counter(), Counter()
    for one in found:
        if one.times is None:
            raise Refused(
                f"{one.kind} in {one.computation} runs an unknown number of times; give the loop a length"
            )
        arrays[one.kind] += one.arrays * one.times
        size[one.kind] += one.bytes * one.times
    return {kind: (arrays[kind], size[kind]) for kind in sorted(arrays) if arrays[kind]}


def collective_kind(opcode: str, computation: str = "") -> str | None:
    """Returns the kind, such as "all-reduce", of a collective or of its start; None for other operations."""
    opcode = opcode.removesuffix("-start")
    if opcode == "all-reduce" and computation.startswith(_SCATTER):
        return "reduce-scatter"
    return opcode if opcode in KINDS else None


def chain_of(instruction: Instruction) -> str | None:
    """Returns the number that all links of one collective share, if a chain of fusions carries it out.

    Their channel is no such number: gathers over the same axis can all have the same.
    """
    link = re.search(r'chain_id="?(\d+)', instruction.rest)
    return link[1] if link else None


def marks_end_of_chain(instruction: Instruction) -> bool:
    """Returns whether this call marks where a chain begins or is done; it moves nothing itself."""
    return _CHAIN_BEGINS in instruction.rest or _CHAIN_IS_DONE in instruction.rest


def begins_chain(body: list[Instruction]) -> bool:
    """Returns whether a fusion does nothing but begin a collective, which a chain of fusions then carries out."""
    return any(_CHAIN_BEGINS in one.rest for one in body if one.is_root)


def is_collective(instruction: Instruction, computations: dict[str, list[Instruction]]) -> bool:
    """Returns whether an instruction only communicates: a collective, or a fusion that is one or begins one."""
    if instruction.opcode != "fusion":
        return collective_kind(instruction.opcode) is not None
    inner = callees(instruction, computations)[0][0]
    return inner.startswith(_SCATTER) or begins_chain(computations[inner])


def _is_first(instruction: Instruction, chains: set[str]) -> bool:
    """Returns whether this is the first link of its chain."""
    chain = chain_of(instruction)
    if chain is None:
        return True
    first = chain not in chains
    chains.add(chain)
    return first


def collective(instruction, kind, siblings, times, computation) -> Collective:
    """Returns the Collective of one instruction; `siblings` are the instructions of the same computation."""
    operands = _operands(instruction, siblings)
    moved, came = bytes_of(operands), bytes_of(instruction.result)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        came -= moved  # the result of a start holds its operands too
    op_name = re.search(r'op_name="([^"]*)"', instruction.rest)
    if kind == "ragged-all-to-all":
        moved = came = _smaller(operands)
    return Collective(
        kind=kind,
        arrays=len(arrays(operands)),
        bytes=moved if kind == "collective-permute" else max(moved, came),
        replica_groups=groups_of(instruction.rest),
        times=times,
        computation=computation,
        op_name=op_name[1] if op_name else "",
    )


def _smaller(operands: str) -> int:
    """Returns the bytes of the smaller of the first two operands of a ragged exchange: what is read, and the space that
    is written to. One of the two is large enough for the worst case.
    """
    return min(map(bytes_of, arrays(operands)[:2]))


def _operands(instruction: Instruction, siblings: list[Instruction]) -> str:
    """Returns the types of the operands, which are written in place, or only where the operand is defined."""
    inside = instruction.rest[: closing("(" + instruction.rest) - 2]
    if arrays(inside):
        return inside
    results = types(siblings)
    return " ".join(results[name.strip().lstrip("%")] for name in inside.split(","))
