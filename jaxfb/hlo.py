"""What a compiled program says between devices: every collective, its bytes, its group, how often it runs.

A witness beside the story and no step of it: tests count with it, and whoever prices a program can. It reads
the text of `compiled.as_text()`, of any backend, and nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

REGIONS = frozenset(("while", "conditional", "call"))
"""Instructions that run other computations, whose instructions are then read instead of theirs."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([\d,]*)\]")
_MESH_GROUPS = re.compile(r"@?mesh\[([^\]]*)\](?:,\s*device_ids=\((\[.*?)\))?\s*\{([^}]*)\}")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_CALLED = re.compile(r"(?:to_apply|calls|called_computations|branch_computations|\w+_computation)=")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    kind:           such as "all-reduce"; the start of an asynchronous pair counts, its end does not.
    arrays:         how many arrays it carries (XLA combines several into one instruction).
    bytes:          of the whole arrays on one device: the result of a gather, the operand of a scatter.
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
        """The axes of `mesh` along which it moves data, outermost first."""
        moved = set()
        for group in self.replica_groups or (tuple(range(mesh.size)),):
            places = np.unravel_index(group, mesh.devices.shape)
            moved |= {axis for axis, along in enumerate(places) if len(set(along.tolist())) > 1}
        return tuple(name for axis, name in enumerate(mesh.axis_names) if axis in moved)


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


def collectives(compiled_text: str) -> list[Collective]:
    """Every collective of a compiled program, with loop bodies multiplied by their trip counts.

    A branch of a conditional counts as if it were always taken. What a TPU compiler has fused is one collective as
    well: an all-reduce with the slice behind it (a reduce-scatter), and one that a chain of fusions carries out.

    Raises:
      ValueError: the text has no ENTRY computation, or a replica group is written in an unknown way.
    """
    computations, entry = parse(compiled_text)
    times, chains = _times(computations, entry), set()
    return [
        collective(instruction, kind, instructions, times.get(name, 0), name)
        for name, instructions in computations.items()
        for instruction in instructions
        if (kind := collective_kind(instruction.opcode, name)) and _is_first(instruction, chains)
    ]


def traffic(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """kind -> (arrays moved, bytes moved) by one run of the program on one device."""
    arrays, size = Counter(), Counter()
    for one in found:
        if one.times is None:
            raise ValueError(
                f"{one.kind} in {one.computation} runs an unknown number of times; give the loop a length"
            )
        arrays[one.kind] += one.arrays * one.times
        size[one.kind] += one.bytes * one.times
    return {kind: (arrays[kind], size[kind]) for kind in sorted(arrays) if arrays[kind]}


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(computation -> its instructions, in the order in which they run; the name of the entry)."""
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
        raise ValueError("no ENTRY computation in this text; pass compiled.as_text()")
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
    """The names of the instructions whose results it is given, in order."""
    inside = instruction.rest[: closing("(" + instruction.rest) - 2]
    return re.findall(r"%([^\s,()]+)", inside)


def types(body: list[Instruction]) -> dict[str, str]:
    """Instruction -> the type of its result, of one computation."""
    return {one.name: one.result for one in body}


def closing(text: str) -> int:
    """Position after the bracket that closes the first one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(text)


def _times(computations: dict, entry: str) -> dict[str, int | None]:
    """How often each computation runs: once the entry, a while body its caller's times the loop's length."""
    calls: dict[str, list[tuple[str, int | None]]] = {}
    for caller, instructions in computations.items():
        for instruction in instructions:
            for callee, factor in callees(instruction, computations):
                calls.setdefault(callee, []).append((caller, factor))
    known: dict[str, int | None] = {entry: 1}

    def count(name: str) -> int | None:
        if name not in known:
            parts = [_times_or_unknown(count(caller), factor) for caller, factor in calls.get(name, [])]
            known[name] = None if None in parts else sum(parts)
        return known[name]

    return {name: count(name) for name in computations}


def _times_or_unknown(count: int | None, factor: int | None) -> int | None:
    if count == 0:
        return 0
    return None if count is None or factor is None else count * factor


def callees(instruction: Instruction, computations: dict) -> list[tuple[str, int | None]]:
    """(computation, how often one run of the instruction runs it, None if unknown).

    What an asynchronous instruction runs belongs to its start.
    """
    rest = instruction.rest
    if instruction.opcode.endswith(("-update", "-done")):
        return []
    if instruction.opcode == "while":
        length = _trip_count(rest, computations)
        condition, body = (re.search(rf"{role}=%?([^\s,)]+)", rest)[1] for role in ("condition", "body"))
        return [(body, length), (condition, None if length is None else length + 1)]
    names = []
    for found in _CALLED.finditer(rest):
        listed = re.match(r"\{([^}]*)\}|(%?[^\s,)]+)", rest[found.end() :])
        names += [name.strip().lstrip("%") for name in (listed[1] or listed[2]).split(",")]
    return [(name, 1) for name in names if name in computations]


def _trip_count(rest: str, computations: dict) -> int | None:
    """XLA's own count, or else the one constant that the condition of a counting loop compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest):
        return int(known[1])
    condition = computations.get(re.search(r"condition=%?([^\s,)]+)", rest)[1], [])
    constants = [i.rest for i in condition if i.opcode == "constant" and re.match(r"[su]\d+\[\]", i.result)]
    less = any("direction=LT" in i.rest for i in condition)
    return int(constants[0].split(")")[0]) if less and len(constants) == 1 else None


def collective_kind(opcode: str, computation: str = "") -> str | None:
    """Such as "all-reduce", of its start too; None for what is no collective."""
    opcode = opcode.removesuffix("-start")
    if opcode == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return opcode if opcode in KINDS else None


def chain_of(instruction: Instruction) -> str | None:
    """What the links of one collective that a chain of fusions carries out have in common: their channel."""
    link = "chain_id=" in instruction.rest and re.search(r"channel_id=\d+", instruction.rest)
    return link[0] if link else None


def _is_first(instruction: Instruction, chains: set[str]) -> bool:
    """Whether this is not a further link of a chain seen before."""
    chain = chain_of(instruction)
    first = chain is None or chain not in chains
    chains.add(chain)
    return first


def collective(instruction, kind, siblings, times, computation) -> Collective:
    """One instruction of that kind; `siblings` are the instructions beside it."""
    operands = _operands(instruction, siblings)
    moved, came = bytes_of(operands), bytes_of(instruction.result)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        came -= moved  # the result of a start holds its operands too
    op_name = re.search(r'op_name="([^"]*)"', instruction.rest)
    return Collective(
        kind=kind,
        arrays=len(_ARRAY.findall(operands)),
        bytes=moved if kind == "collective-permute" else max(moved, came),
        replica_groups=_groups(instruction.rest),
        times=times,
        computation=computation,
        op_name=op_name[1] if op_name else "",
    )


def _operands(instruction: Instruction, siblings: list[Instruction]) -> str:
    """Types of the operands; they are written in place, or only where the operand is defined."""
    inside = instruction.rest[: closing("(" + instruction.rest) - 2]
    if _ARRAY.search(inside):
        return inside
    types = {sibling.name: sibling.result for sibling in siblings}
    return " ".join(types[name.strip().lstrip("%")] for name in inside.split(","))


def bytes_of(types: str) -> int:
    """Of the arrays in a type such as `(f32[4], bf16[2,2])`."""
    return sum(
        _bits(dtype) * int(np.prod([int(size) for size in shape.split(",") if size], dtype=np.int64)) // 8
        for dtype, shape in _ARRAY.findall(types)
    )


def _bits(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else {"pred": 8}.get(dtype, 0)


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", rest):
        return _listed(pairs[1])
    found = re.search(r"replica_groups=(.*)", rest)
    if not found or found[1].startswith("{}"):
        return ()
    if found[1].startswith("{"):
        return _listed(re.match(r"\{(.*?\})\}", found[1])[1])
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", found[1]):
        return _iota(*(tuple(map(int, part.split(","))) if part else None for part in iota.groups()))
    if mesh := re.match(_MESH_GROUPS, found[1]):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return _named(sizes, mesh[2], mesh[3])
    raise ValueError(f"unknown way to write replica groups: {found[1][:120]}")


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))


def _iota(shape, dims, order) -> tuple[tuple[int, ...], ...]:
    """`[4,2]<=[2,4]T(1,0)`: count up to 8, shape it [2, 4], transpose, reshape to 4 groups of 2."""
    numbers = np.arange(np.prod(dims)).reshape(dims)
    return tuple(map(tuple, numbers.transpose(order).reshape(shape).tolist()))


def _named(sizes: dict[str, int], order: str | None, written: str) -> tuple[tuple[int, ...], ...]:
    """`mesh['data'=2,'fsdp'=4] {'fsdp'}`: positions that differ along the named axes only.

    written: the axes, of which some may be parts of an axis: `'fsdp':(2)4` is the part of size 4 behind a part of
    size 2, counted from the outermost. order: such as `[4,2]T(1,0)`, how the mesh counts its devices; None: in their
    own order.
    """
    parts = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(written)
    ]
    if len(parts) != written.count("'") // 2:
        raise ValueError(f"unknown way to write replica groups: {written}")
    shape, inner = [], []
    for name, whole in sizes.items():
        named = {(before, before * size) for axis, before, size in parts if axis == name}
        cuts = sorted({1, whole}.union(*named))
        for low, high in itertools.pairwise(cuts):
            if any(first <= low and high <= last for first, last in named):
                inner.append(len(shape))
            shape.append(high // low)
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    group = int(np.prod([shape[dim] for dim in inner]))
    numbers = _counted(list(sizes.values()), order).reshape(shape).transpose(outer + inner)
    return tuple(map(tuple, numbers.reshape(-1, group).tolist()))


def _counted(shape: list[int], written: str | None) -> np.ndarray:
    if written is None:
        return np.arange(np.prod(shape)).reshape(shape)
    dims, permutation = re.match(r"\[([\d,]+)\](?:T\(([\d,]+))?", written).groups()
    dims = [int(size) for size in dims.split(",")]
    numbers = np.arange(np.prod(dims)).reshape(dims)
    return (
        numbers.transpose(*map(int, permutation.split(","))).reshape(shape)
        if permutation
        else numbers.reshape(shape)
    )
