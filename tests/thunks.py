"""Reads what XLA:CPU runs in which order: the thunks of a compiled program and the buffers that order them.

A program is a sequence of thunks; loops, branches and calls contain further sequences. XLA:CPU starts a thunk when
those that it shares a buffer with have ended (unless both only read it). Collectives of one sequence wait for each
other too, because they block; a loop or branch with collectives in it is waited for only through its buffers.

Read from the serialized executable by the field numbers of XLA's thunk.proto, the same in jaxlib 0.10 and 0.12.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations

Slice = tuple[int, int, int]  # allocation, offset, size
READ, WRITTEN, SHAPED_READ, SHAPED_WRITTEN, INNER = (
    "read",
    "written",
    "shaped read",
    "shaped written",
    "inner",
)
# kind of thunk, as its field in ThunkProto -> the fields of its message that are slices or sequences
LAYOUT = {
    3: {1: INNER},  # call
    4: {1: INNER, 2: READ},  # conditional
    5: {5: SHAPED_WRITTEN},  # sort
    7: {2: SHAPED_READ, 3: SHAPED_READ, 4: SHAPED_WRITTEN},  # dot
    8: {2: WRITTEN},  # rng state
    9: {4: READ, 5: WRITTEN, 6: WRITTEN},  # top k
    10: {1: INNER, 2: INNER, 4: WRITTEN},  # while
    11: {5: SHAPED_READ, 6: SHAPED_WRITTEN},  # kernel (a ShapedSlice has its slice first)
    12: {1: SHAPED_READ, 2: SHAPED_WRITTEN},  # copy
    19: {1: WRITTEN},  # partition id
    20: {1: WRITTEN},  # replica id
    21: {3: SHAPED_READ, 4: SHAPED_WRITTEN},  # a fusion given to a library
}
KERNEL, CUSTOM_CALL, COLLECTIVE = 11, 16, 18


@dataclass(eq=False)
class Thunk:
    """One thunk: its name, what it reads and writes with all that is inside, and its collective, (channel, groups)."""

    name: str
    reads: set[Slice] = field(default_factory=set)
    writes: set[Slice] = field(default_factory=set)
    inner: list[list[Thunk]] = field(default_factory=list)
    collective: tuple | None = None

    @property
    def meetings(self) -> set[tuple]:
        """(channel, groups) of all collectives in it."""
        inside = set().union(*(thunk.meetings for sequence in self.inner for thunk in sequence))
        return inside | ({self.collective} if self.collective else set())


def thunks_of(compiled) -> list[Thunk]:
    """The outermost sequence of `jitted.lower(...).compile()`."""
    data = compiled.runtime_executable().serialize()
    length, begin = _varint(data, 0)
    executable = _fields(data[begin + length :])[1][0]
    return _sequence(_fields(executable)[6][0])


def unordered(sequence: list[Thunk], inside: str = "") -> list[str]:
    """Pairs of thunks that may run at the same time and have collectives of one channel and group in them."""
    before: list[set[int]] = []
    for index, thunk in enumerate(sequence):
        direct = [other for other in range(index) if _waits(thunk, sequence[other])]
        before.append(set(direct).union(*(before[other] for other in direct)))
    found = [
        f"{inside}/{sequence[a].name} and {sequence[b].name}"
        for a, b in combinations(range(len(sequence)), 2)
        if sequence[a].meetings & sequence[b].meetings
        and not (sequence[a].collective and sequence[b].collective)
        and a not in before[b]
    ]
    deeper = ((f"{inside}/{thunk.name}", part) for thunk in sequence for part in thunk.inner)
    return found + [pair for path, part in deeper for pair in unordered(part, path)]


def in_one_channel(sequence: list[Thunk]) -> list[Thunk]:
    """The same program with every collective in channel 1."""
    one = lambda met: met and (1, *met[1:])  # noqa: E731
    return [
        Thunk(
            thunk.name, thunk.reads, thunk.writes, [*map(in_one_channel, thunk.inner)], one(thunk.collective)
        )
        for thunk in sequence
    ]


def num_collectives(sequence: list[Thunk]) -> int:
    inside = (part for thunk in sequence for part in thunk.inner)
    return sum(thunk.collective is not None for thunk in sequence) + sum(map(num_collectives, inside))


def _waits(later: Thunk, earlier: Thunk) -> bool:
    return _overlap(earlier.writes, later.reads | later.writes) or _overlap(earlier.reads, later.writes)


def _overlap(some: set[Slice], others: set[Slice]) -> bool:
    by_allocation = defaultdict(list)
    for allocation, offset, size in some:
        by_allocation[allocation].append((offset, offset + size))
    return any(
        offset < end and begin < offset + size
        for allocation, offset, size in others
        for begin, end in by_allocation[allocation]
    )


def _sequence(data: bytes) -> list[Thunk]:
    return [_thunk(one) for one in _fields(data)[1]]


def _thunk(data: bytes) -> Thunk:
    fields = _fields(data)
    thunk = Thunk(_fields(fields[2][0])[1][0].decode())
    (kind,) = (number for number in fields if number > 2)
    message = _fields(fields[kind][0])
    if kind == COLLECTIVE:
        parameters = _fields(message[1][0])
        thunk.collective = (parameters[1][0] if parameters[1] else 0, tuple(parameters[4]))
        message, layout = _fields(message[2][0]), {1: SHAPED_READ, 2: SHAPED_WRITTEN}
    elif kind == CUSTOM_CALL:
        message, layout = _fields(message[4][0]), {1: SHAPED_READ, 2: SHAPED_WRITTEN}
    else:
        layout = LAYOUT[kind]
    for number, role in layout.items():
        for part in message[number]:
            if role == INNER:
                thunk.inner.append(_sequence(part))
            else:
                if role in (SHAPED_READ, SHAPED_WRITTEN):
                    part = _fields(part)[1 if kind == KERNEL else 2][0]
                (thunk.reads if role in (READ, SHAPED_READ) else thunk.writes).add(_slice(part))
    for inner in (one for sequence in thunk.inner for one in sequence):
        thunk.reads |= inner.reads
        thunk.writes |= inner.writes
    return thunk


def _slice(data: bytes) -> Slice:
    fields = _fields(data)
    return tuple(fields[number][0] if fields[number] else 0 for number in (3, 1, 2))


def _fields(data: bytes) -> dict[int, list]:
    """The fields of a protocol buffer message by number: ints, and bytes of whatever is not an integer."""
    found, at = defaultdict(list), 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        else:
            length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + length], at + length
        found[key >> 3].append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
