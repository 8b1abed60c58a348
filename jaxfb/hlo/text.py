"""The text of a compiled program as instructions, in the order in which they run. Of any backend."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxfb.refusal import Refused

REGIONS = frozenset(("while", "conditional", "call"))
"""Instructions that run other computations, whose instructions are then read instead of theirs."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([\d,]*)\](?:\{[^}]*\})?")


@dataclass(frozen=True)
class Instruction:
    """`%name = result opcode(rest`: the types in `result`, operands and attributes in `rest`.

    is_root: whether its result is the one of its computation.
    """

    name: str
    result: str
    opcode: str
    rest: str
    is_root: bool = False


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses a program: (computation -> its instructions in the order in which they run, the name of the entry)."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _instruction(line)):
            current.append(found)
    if entry is None:
        raise Refused("no ENTRY computation in this text; pass compiled.as_text()")
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    """Splits `  ROOT %name = type opcode(operands), attributes`; a tuple type has brackets inside."""
    head, equals, tail = line.partition(" = ")
    if not equals or not line.startswith(" "):
        return None
    end = closing(tail) if tail.startswith("(") else tail.find(" ")
    opcode, bracket, rest = tail[end:].strip().partition("(")
    if not bracket:
        return None
    return Instruction(head.split()[-1].lstrip("%"), tail[:end], opcode, rest, head.split()[0] == "ROOT")


def operand_names(instruction: Instruction) -> list[str]:
    """Returns the names of the instructions whose results it is given, in order."""
    inside = instruction.rest[: closing("(" + instruction.rest) - 2]
    return re.findall(r"%([^\s,()]+)", inside)


def types(body: list[Instruction]) -> dict[str, str]:
    """Returns instruction -> type of its result, for one computation."""
    return {one.name: one.result for one in body}


def closing(text: str) -> int:
    """Returns position after the bracket that closes the first one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(text)


def bytes_of(types: str) -> int:
    """Returns the bytes of the arrays in a type such as `(f32[4], bf16[2,2])`."""
    return sum(_bits(dtype) * math.prod(_sizes(shape)) // 8 for dtype, shape in _ARRAY.findall(types))


def _bits(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else {"pred": 8}.get(dtype, 0)


def searched(pattern: str, text: str) -> re.Match[str]:
    """Returns the first match of what every compiler writes at this place.

    Raises:
      ValueError: it is not there, so the text is of another compiler.
    """
    found = re.search(pattern, text)
    if found is None:
        raise Refused(f"unknown HLO: nothing matches {pattern} in {text[:120]!r}")
    return found


def arrays(types: str) -> list[str]:
    """Returns the arrays in a type, each with its layout where it has one."""
    return [found[0] for found in _ARRAY.finditer(types)]


def shape_of(types: str) -> tuple[int, ...]:
    """Returns the shape of the first array in a type; () where there is none."""
    found = _ARRAY.search(types)
    return _sizes(found[2]) if found else ()


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(int(size) for size in shape.split(",") if size)
