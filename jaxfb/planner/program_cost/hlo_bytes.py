"""Bytes that the instructions of a compiled program read and write in HBM, from the program's text.

A fusion is charged for what it reads and not for what it is given: where it takes a slice of a stack, in itself or in a
fusion inside it, the slice; where it updates an array in place, the update. What a chain of fusions gathers is charged
where the chain begins, and not again in every fusion that it is handed through.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from jaxfb import hlo
from jaxfb.hlo import Instruction
from jaxfb.hlo.text import arrays
from jaxfb.planner.program_cost import gpu_calls

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota add-dependency "
    "opt-barrier domain".split()
)
_NAMES_ONLY = re.compile(r'custom_call_target="(AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast)"')
"""Calls of XLA for TPUs that move nothing."""
_SLICES = {"dynamic-slice", "gather", "slice"}
_UPDATE, _SCATTER = "dynamic-update-slice", "scatter"


@dataclass(frozen=True)
class _Use:
    """A fusion's use of one operand. whole: reads all of it. read: bytes of its slices otherwise. written: bytes
    moved by the updates that are put into it; updated: whether there are any."""

    whole: bool = False
    read: float = 0.0
    written: float = 0.0
    updated: bool = False

    def __add__(self, other: _Use) -> _Use:
        return _Use(
            self.whole or other.whole,
            self.read + other.read,
            self.written + other.written,
            self.updated or other.updated,
        )


class Bytes:
    """Bytes of the instructions of some computations; loops and branches apart."""

    def __init__(self, computations: dict[str, list[Instruction]]):
        self._computations = computations
        self._types = {name: hlo.types(body) for name, body in computations.items()}
        self._uses: dict[str, dict[int, _Use]] = {}
        self._handed_on: dict[str, set[str]] = {}

    def of(self, instruction: Instruction, name: str) -> float:
        """Returns the bytes read and written by one run of an instruction of the computation `name`."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode in hlo.REGIONS or opcode.endswith(("-done", "-update")):
            return 0.0
        operands = [self._types[name].get(one, "") for one in hlo.operand_names(instruction)]
        if opcode.endswith("-start"):
            return self._of_start(instruction, operands)
        if opcode in _SLICES:
            return 2 * hbm_bytes(instruction.result)
        if opcode == _UPDATE:
            return 2 * hbm_bytes(operands[1])
        if opcode == _SCATTER and len(operands) == 3:
            return hbm_bytes(operands[1]) + 3 * hbm_bytes(
                operands[2]
            )  # what is there is read, added to, written
        if opcode == "custom-call" and _NAMES_ONLY.search(instruction.rest):
            return 0.0
        if opcode == "fusion":
            inner = hlo.callees(instruction, self._computations)[0][0]
            if hlo.begins_chain(self._computations[inner]):
                return sum(map(hbm_bytes, operands)) + self._of_links(inner)
            return self._of_fusion(self._written_by(instruction, inner), operands, self._uses_in(inner))
        return hbm_bytes(gpu_calls.result(instruction)) + sum(map(hbm_bytes, operands))

    def _of_start(self, instruction: Instruction, operands: list[str]) -> float:
        """Returns the bytes of an asynchronous instruction, charged at its start."""
        if hlo.collective_kind(instruction.opcode) is not None:
            read = 0.0 if instruction.result.startswith("(") else sum(map(hbm_bytes, operands))
            return hbm_bytes(instruction.result) + read
        called = hlo.callees(instruction, self._computations)
        if called:
            return sum(self.of(one, name) for name, _ in called for one in self._computations[name])
        if instruction.result.startswith("(("):  # of a slice: (what it is taken of), the slice, a mark
            written = arrays(instruction.result)[len(operands)]
            return hbm_bytes(written) + (hlo.bytes_of(written) if hbm_bytes(operands[0]) else 0.0)
        return hbm_bytes(instruction.result)  # of a copy: what is written, what is read, a mark

    def _of_fusion(self, result: str, operands: list[str], uses: dict[int, _Use]) -> float:
        total, in_place = 0.0, 0.0
        for place, operand in enumerate(operands):
            size, use = hbm_bytes(operand), uses.get(place, _Use())
            if size:
                total += size if use.whole else min(size, use.read)
                total += use.written
                in_place += size if use.updated and not use.whole else 0.0
        return total + max(0.0, hbm_bytes(result) - in_place)

    def _of_links(self, name: str) -> float:
        """Returns the bytes of what a chain gathers that begins with this fusion."""
        return sum(hbm_bytes(one.result) for one in self._computations[name] if _is_link(one))

    def _written_by(self, fusion: Instruction, inner: str) -> str:
        """Returns the types of a fusion's results without those that its chain hands on."""
        handed_on = self._handed_on_by(inner)
        if not handed_on:
            return fusion.result
        (root,) = (one for one in self._computations[inner] if one.is_root)
        names = hlo.operand_names(root) if root.opcode == "tuple" else [root.name]
        return " ".join(self._types[inner][name] for name in names if name not in handed_on)

    def _handed_on_by(self, name: str) -> set[str]:
        if name not in self._handed_on:
            self._handed_on[name] = _handed_on(self._computations[name])
        return self._handed_on[name]

    def _uses_in(self, name: str) -> dict[int, _Use]:
        """Returns the bytes of each operand of a fusion, by its place."""
        if name not in self._uses:
            body = self._computations[name]
            places = {one.name: int(one.rest.split(")")[0]) for one in body if one.opcode == "parameter"}
            readers, handed_on = _readers(body), self._handed_on_by(name)
            self._uses[name] = {
                place: sum((self._use(*reader, name) for reader in readers[parameter]), _Use())
                for parameter, place in places.items()
                if parameter not in handed_on
            }
        return self._uses[name]

    def _use(self, reader: Instruction, place: int, name: str) -> _Use:
        """Returns what one instruction inside a fusion does with its operand at a place."""
        operands = hlo.operand_names(reader)
        if reader.opcode in _SLICES and place == 0:
            return _Use(read=hlo.bytes_of(reader.result))
        if reader.opcode == _UPDATE and place == 0:
            return _Use(written=hlo.bytes_of(self._types[name].get(operands[1], "")), updated=True)
        if reader.opcode == _SCATTER and place == 0 and len(operands) == 3:
            return _Use(written=2 * hlo.bytes_of(self._types[name].get(operands[2], "")), updated=True)
        if reader.opcode == "fusion":
            inner = hlo.callees(reader, self._computations)[0][0]
            return self._uses_in(inner).get(place, _Use())
        return _Use(whole=True)


def _is_link(instruction: Instruction) -> bool:
    """Returns whether a fusion carries out a part of this collective, and others of its chain the rest."""
    return hlo.collective_kind(instruction.opcode) is not None and hlo.chain_of(instruction) is not None


def _handed_on(body: list[Instruction]) -> set[str]:
    """Returns the values of a fusion that belong to a collective which a chain of fusions carries out: what it gathers,
    and the operands that are only handed on.
    """
    links = {one.name for one in body if _is_link(one)}
    if not links:
        return set()
    links |= {one.name for one in body if hlo.marks_end_of_chain(one)}
    at_root = {one.name for one in body if one.is_root and one.opcode == "tuple"}
    readers = _readers(body)
    return links | {
        one.name
        for one in body
        if one.opcode == "parameter" and {reader.name for reader, _ in readers[one.name]} <= links | at_root
    }


def _readers(body: list[Instruction]) -> dict[str, list[tuple[Instruction, int]]]:
    """Returns the readers of each value of a fusion, and the operand number; a bitcast or update stands for its
    operand.

    To return a value is to read it, unless it was updated: then it stays where it is.
    """
    same = {one.name: one for one in body if one.opcode in ("bitcast", _UPDATE, _SCATTER)}
    readers: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for one in body:
        if one.opcode == "bitcast" and not one.is_root:
            continue
        for place, name in enumerate(hlo.operand_names(one)):
            updated = False
            while name in same:
                updated |= same[name].opcode != "bitcast"
                name = hlo.operand_names(same[name])[0]
            if not (updated and one.is_root and one.opcode in ("bitcast", "tuple")):
                readers[name].append((one, place))
    return readers


def hbm_bytes(types: str) -> float:
    """Returns bytes of the arrays that live in HBM; S(n) in a layout means another memory."""
    return sum(hlo.bytes_of(one) for one in arrays(types) if "S(" not in one)
