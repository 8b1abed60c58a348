"""How many bytes of temporaries a traced program needs at once: an estimate, without a compiler.

Walks a region in order and keeps account of what is live. Three rules stand for what XLA does: elementwise work, casts,
views and reductions are fused into what reads them, so their results exist only where something must find them in
memory; what is expensive and read twice is not computed twice, but by a TPU, whose products compute it from what they
read; and a result takes over the buffer of an operand of its size that dies with it, as loops do with what they carry.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from jaxfb.planner.program import Op, Region, Value

_FUSED = set(
    "add add_any sub mul div rem neg abs sign floor ceil round max min square sqrt rsqrt pow integer_pow exp exp2 log "
    "log1p expm1 sin cos tan tanh logistic erf eq ne lt le gt ge and or not xor is_finite select_n clamp "
    "convert_element_type broadcast_in_dim reshape transpose squeeze expand_dims copy copy_p stop_gradient "
    "sharding_constraint reduce_precision pvary pcast slice dynamic_slice pad concatenate iota rev shift_left "
    "shift_right_logical shift_right_arithmetic reduce_sum reduce_max reduce_min reduce_and reduce_or "
    "optimization_barrier axis_index split empty2 stack reshard gather".split()
)
_EXPENSIVE = frozenset("exp exp2 log log1p expm1 div rem pow sqrt rsqrt tanh logistic erf sin cos".split())
_PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
_IN_PLACE = {"scan", "while", "cond", "dynamic_update_slice", "scatter-add", "scatter", "psum", *_FUSED}


@dataclass
class Peak:
    """bytes: most that is live at once. live: the values then, each with what made it, but for those that lie where
    the loop around them keeps what it carries."""

    bytes: int = 0
    live: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)


def temporaries(region: Region, platform: str) -> Peak:
    """Returns the peak bytes of temporaries of a region whose inputs live elsewhere, results included."""
    return _Walk(region, [], [], frozenset() if platform == "tpu" else _EXPENSIVE).peak()


def in_memory(region: Region) -> set[Value]:
    """Returns the results of a region's operations that exist in memory."""
    walk = _Walk(region, [], [], _EXPENSIVE)
    return {value for op in region.ops for value in op.outputs if walk.real(value)}


class _Walk:
    """One pass over a region.

    carried: inputs that are counted from the start, since results may take their place.
    sliced:  inputs that are counted from their first use on, where something must find them in memory.
    kept:    elementwise operations that are not computed twice.
    """

    def __init__(self, region: Region, carried: list[Value], sliced: list[Value], kept: Set[str]):
        self._region, self._carried, self._kept = region, carried, kept
        self._sliced = {value for value in sliced if self._copied(value)}
        self._ancestors: dict[Value, frozenset[Value]] = {}
        self._last_use = self._last_uses()

    def peak(self) -> Peak:
        live = {value: value.bytes for value in self._carried if value.bytes}
        total, best, given = sum(live.values()), Peak(), set(live)
        for op in self._region.ops:
            for value in self._sliced.intersection(op.inputs) - live.keys():
                live[value] = value.bytes
                total += value.bytes
            dying = [v for v in live if self._last_use.get(v, -1) <= op.position]
            made = [v for v in op.outputs if self.real(v) and v.bytes]
            over = set(dying)
            for value, old in _taken_over(dying, made) if op.name in _IN_PLACE else ():
                total -= live.pop(old)
                over.remove(old)
                if old in given:
                    given.add(value)
            for value in made:
                live[value] = value.bytes
                total += value.bytes
            inner = self._branches(op, dying, over) if op.name == "cond" else self._inside(op)
            if total + inner.bytes > best.bytes:
                best = Peak(total + inner.bytes, [_named(v) for v in live if v not in given] + inner.live)
            for value in dying:
                if value in live:
                    total -= live.pop(value)
        return best

    def _inside(self, op: Op) -> Peak:
        """Returns what a loop needs beside its operands and results."""
        best = Peak()
        for region in op.regions:
            carried, sliced = carried_of(op, region)
            inner = _Walk(region, carried, sliced, self._kept).peak()
            extra = inner.bytes - sum(value.bytes for value in carried)
            if extra > best.bytes:
                best = Peak(extra, inner.live)
        return best

    def _branches(self, op: Op, dying: list[Value], left: set[Value]) -> Peak:
        """Returns what a branch needs beside its results, which may lie where operands do that nothing else reads.

        left: of what dies, what no result has taken over.
        """
        best = Peak()
        for region in op.regions:
            operands = list(zip(op.inputs[len(op.inputs) - len(region.inputs) :], region.inputs, strict=True))
            carried = [seen for given, seen in operands if given in dying]
            counted = sum(value.bytes for value in {given for given, _ in operands} & left)
            counted += sum(value.bytes for value in op.outputs)
            inner = _Walk(region, carried, [], self._kept).peak()
            if inner.bytes - counted > best.bytes:
                best = Peak(inner.bytes - counted, inner.live)
        return best

    def _copied(self, value: Value) -> bool:
        """Returns whether a loop's slice of a stacked operand is made by itself before it is used."""
        return any(use.name not in _FUSED for use in value.uses)

    def real(self, value: Value) -> bool:
        """Returns whether a result exists in memory."""
        if value.maker is None or value.maker.name not in _FUSED:
            return True
        if value.returned or (value.maker.name in self._kept and len(value.uses) > 1):
            return True
        return any(use.name not in _FUSED and not self._fused_into(value, use) for use in value.uses)

    def _fused_into(self, value: Value, use: Op) -> bool:
        """Products and loops read slices and casts of what is in memory; anything more is computed before."""
        return use.name in _PRODUCTS and value.maker.name in _VIEWS and len(value.uses) == 1

    def _roots(self, value: Value) -> frozenset[Value]:
        """Returns what must be in memory for a value to be read."""
        if value not in self._ancestors:
            if self.real(value):
                self._ancestors[value] = frozenset([value])
            else:
                parts = [self._roots(one) for one in value.maker.inputs]
                self._ancestors[value] = frozenset().union(*parts)
        return self._ancestors[value]

    def _last_uses(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for op in self._region.ops:
            for value in op.inputs:
                for root in self._roots(value):
                    last[root] = op.position
        end = len(self._region.ops)
        return last | {root: end for value in self._region.outputs for root in self._roots(value)}


_VIEWS = set(
    "reshape transpose squeeze expand_dims broadcast_in_dim convert_element_type slice dynamic_slice copy "
    "sharding_constraint".split()
)


def _taken_over(dying: list[Value], made: list[Value]) -> list[tuple[Value, Value]]:
    """Returns (result, what dies and leaves it its buffer, of the same size)."""
    left, taken = list(dying), []
    for value in made:
        same = next((one for one in left if one.bytes == value.bytes), None)
        if same is not None:
            left.remove(same)
            taken.append((value, same))
    return taken


def carried_of(op: Op, region: Region) -> tuple[list[Value], list[Value]]:
    """Returns (inputs that a loop hands from one turn to the next, slices that it takes of stacked operands)."""
    if op.name == "scan":
        # told by shapes, since the names of the counts differ between versions of JAX: stacks have one dim more
        stacked = sum(a.shape != b.shape for a, b in zip(op.inputs, region.inputs, strict=True))
        carried = sum(a.shape == b.shape for a, b in zip(op.outputs, region.outputs, strict=True))
        last = len(region.inputs) - stacked
        return region.inputs[last - carried : last], region.inputs[last:]
    if op.name == "while":
        return region.inputs[op.params["body_nconsts"] :], []
    return [], []


def _named(value: Value) -> tuple[int, str, tuple[int, ...]]:
    return value.bytes, value.maker.name if value.maker else "carried", value.shape
