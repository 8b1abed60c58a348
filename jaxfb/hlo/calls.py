"""Finds which computations an instruction runs, and how often."""

from __future__ import annotations

import math
import re

from jaxfb.hlo.text import Instruction, operand_names, searched

_CALLED = re.compile(r"(?:to_apply|calls|called_computations|branch_computations|\w+_computation)=")
SELDOM = "seldom_loop"
"""The named scope of loops that do not turn in an even run; whatever counts a program takes them not to."""
FIRST_TURNS = "first_turns"
"""The named scope of a loop that a second loop continues; whatever counts a program adds its turns to the second's."""

_SAME = ("copy", "bitcast", "convert")


def callees(instruction: Instruction, computations: dict) -> list[tuple[str, int | None]]:
    """Returns (computation, how often one run of the instruction runs it, None if unknown).

    What an asynchronous instruction runs belongs to its start.
    """
    rest = instruction.rest
    if instruction.opcode.endswith(("-update", "-done")):
        return []
    if instruction.opcode == "while":
        length = trip_count(instruction, computations)
        condition, body = (_named(role, rest) for role in ("condition", "body"))
        return [(body, length), (condition, None if length is None else length + 1)]
    names = []
    for found in _CALLED.finditer(rest):
        listed = searched(r"^\{([^}]*)\}|^(%?[^\s,)]+)", rest[found.end() :])
        names += [name.strip().lstrip("%") for name in (listed[1] or listed[2]).split(",")]
    return [(name, 1) for name in names if name in computations]


def times_run(computations: dict, entry: str) -> dict[str, int | None]:
    """Returns how often each computation runs: the entry once, a while body its caller's count times the loop's
    length.
    """
    calls: dict[str, list[tuple[str, int | None]]] = {}
    for caller, instructions in computations.items():
        for instruction in instructions:
            for callee, factor in callees(instruction, computations):
                calls.setdefault(callee, []).append((caller, factor))
    known: dict[str, int | None] = {entry: 1}

    def count(name: str) -> int | None:
        if name not in known:
            parts = [_times_or_unknown(count(caller), factor) for caller, factor in calls.get(name, [])]
            counted = [part for part in parts if part is not None]
            known[name] = sum(counted) if len(counted) == len(parts) else None
        return known[name]

    return {name: count(name) for name in computations}


def _times_or_unknown(count: int | None, factor: int | None) -> int | None:
    if count == 0:
        return 0
    return None if count is None or factor is None else count * factor


def trip_count(loop: Instruction, computations: dict[str, list[Instruction]]) -> int | None:
    """Returns XLA's own count of a loop's iterations, else that of a loop that counts up to a constant; None if
    unknown.

    A loop that XLA has unrolled counts by more than one. One in a scope `SELDOM` or `FIRST_TURNS` is taken not to turn.
    """
    # `jvp(...)` where what it is in was differentiated
    if re.search(rf"[/(]({SELDOM}|{FIRST_TURNS})[/)]", loop.rest):
        return 0
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(known[1])
    condition, body = (computations.get(_named(role, loop.rest), []) for role in ("condition", "body"))
    limits = [one for one in map(_scalar, condition) if one is not None]
    if len(limits) != 1 or not any("direction=LT" in one.rest for one in condition):
        return None
    indices = [_index(one) for one in condition if one.opcode == "get-tuple-element"]
    if len(indices) != 1:
        return limits[0]
    given = _given(loop, computations)
    start, step = given.get(indices[0]) or 0, _step(body, indices[0], given)
    return math.ceil(max(0, limits[0] - start) / step)


def _named(role: str, rest: str) -> str:
    return searched(rf"\b{role}=%?([^\s,)]+)", rest)[1]


def _scalar(instruction: Instruction) -> int | None:
    """Returns the value of an integer constant."""
    if instruction.opcode != "constant" or not re.match(r"[su]\d+\[\]", instruction.result):
        return None
    return int(instruction.rest.split(")")[0])


def _index(instruction: Instruction) -> int:
    return int(searched(r"\bindex=(\d+)", instruction.rest)[1])


def _given(loop: Instruction, computations: dict[str, list[Instruction]]) -> dict[int, int]:
    """Returns the integer constants among what a loop is given, by their place in its tuple."""
    name = operand_names(loop)[0]
    for body in computations.values():
        made = {one.name: one for one in body}
        if name in made and made[name].opcode == "tuple":
            values = (_value(operand, made, {}) for operand in operand_names(made[name]))
            return {place: value[1] for place, value in enumerate(values) if value and not value[0]}
    return {}


def _step(body: list[Instruction], counter: int, given: dict[int, int]) -> int:
    """Returns by how much an iteration moves the counter; 1 where that cannot be read."""
    made = {one.name: one for one in body}
    root = next((one for one in body if one.is_root and one.opcode == "tuple"), None)
    if root is None or counter >= len(operand_names(root)):
        return 1
    moved = _value(operand_names(root)[counter], made, given, counter)
    return moved[1] if moved and moved[0] and moved[1] > 0 else 1


def _value(name: str, made: dict, given: dict[int, int], counter: int = -1) -> tuple[bool, int] | None:
    """Returns (whether it is the counter plus a number, the number) of a value; None if it is anything else."""
    one = made.get(name)
    if one is None:
        return None
    if one.opcode in _SAME:
        return _value(operand_names(one)[0], made, given, counter)
    if one.opcode == "get-tuple-element" and made[operand_names(one)[0]].opcode == "parameter":
        index = _index(one)
        return (True, 0) if index == counter else (False, given[index]) if index in given else None
    if one.opcode == "add":
        operands = operand_names(one)
        parts = [part for name in operands if (part := _value(name, made, given, counter)) is not None]
        counters = sum(is_counter for is_counter, _ in parts)
        known = len(parts) == len(operands) and counters <= 1
        return (counters == 1, sum(number for _, number in parts)) if known else None
    value = _scalar(one)
    return None if value is None else (False, value)
