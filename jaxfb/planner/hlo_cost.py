"""What a compiled program costs on a chip, read from its scheduled text: a roofline, instruction by instruction.

An instruction takes the longer of its products at the peak rate and its bytes at the peak bandwidth; loops count their
length; a collective takes its bytes at the bandwidth of its mesh axis, less what runs between its start and its done.
Nothing is slower than its roof, so this is a lower bound of the time, and says where it goes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

from jax.sharding import Mesh

from jaxfb import hlo
from jaxfb.hlo import Collective, Instruction
from jaxfb.planner import gpu_calls
from jaxfb.planner.chips import Chip
from jaxfb.planner.kernels import kernel_flops
from jaxfb.planner.routing import Routed

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota add-dependency "
    "opt-barrier async-done async-update domain".split()
)
_TYPED = re.compile(r"\b([a-z]+[0-9a-z]*)\[([\d,]*)\](\{[^}]*\})?")
_PARTIAL = {"dynamic-slice", "gather", "slice", "dynamic-update-slice"}
_REGIONS = {"while", "conditional", "call"}


@dataclass
class Cost:
    """Of a whole run of the program on one device.

    flops: of matrix products. bytes: read and written in HBM. work_seconds: sum of the instructions' roofs.
    traffic: (axes, kind) -> Traffic.
    """

    flops: float = 0
    bytes: float = 0
    work_seconds: float = 0
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        return sum(one.exposed_seconds for one in self.traffic.values())


@dataclass
class Traffic:
    """Of one kind of collective along one set of axes: how many, their bytes, and their time, hidden or not.

    bytes: of the arrays, as `jaxfb.hlo.Collective` counts. asynchronous: bytes whose start and done stand apart.
    """

    count: int = 0
    bytes: float = 0
    seconds: float = 0
    exposed_seconds: float = 0
    asynchronous: float = 0


def wire_bytes(kind: str, size: float, group: int) -> float:
    """What a device sends, for an array of `size` bytes among `group` devices on a ring."""
    share = (group - 1) / group if group else 1
    return size * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


def cost_of(text: str, mesh: Mesh, chip: Chip | None = None, routed: Routed | None = None) -> Cost:
    """Reads `compiled.as_text()`. Without a chip nothing takes time.

    routed: what a loop of unknown length and a kernel for experts work through; without it, one turn and all rows.
    """
    computations, entry = hlo.parse(text)
    reader = _Reader(computations, mesh, chip, routed or Routed())
    cost = Cost()
    cost.work_seconds = reader.seconds(entry)
    reader.add_up(cost, entry, 1)
    return cost


class _Reader:
    def __init__(self, computations, mesh: Mesh, chip: Chip | None, routed: Routed):
        self._computations, self._mesh, self._chip = computations, mesh, chip
        self._routed = routed
        self._types = {
            name: {i.name: i.result for i in instructions} for name, instructions in computations.items()
        }
        self._products: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._chains: dict[str, float] = {}

    def seconds(self, name: str) -> float:
        """Work of one run of a computation, collectives apart."""
        if name not in self._seconds:
            self._seconds[name] = sum(self._work(i, name) for i in self._computations[name])
        return self._seconds[name]

    def add_up(self, cost: Cost, name: str, times: int) -> None:
        clock, started = 0.0, {}
        for instruction in self._computations[name]:
            for inner, length in self._regions(instruction):
                self.add_up(cost, inner, times * length)
            cost.flops += times * self._products_of(instruction, name)
            cost.bytes += times * self._bytes_of(instruction, name)
            work = self._work(instruction, name)
            clock += work
            for one, chain in self._collectives(instruction, name):
                seconds = self._wire_seconds(one)
                if chain is not None:
                    self._link(cost, one, chain, times, seconds, work)
                elif instruction.opcode.endswith("-start"):
                    started[instruction.name] = (clock, seconds, one)
                    self._record(cost, one, times, seconds, 0.0, one.bytes)
                else:
                    self._record(cost, one, times, seconds, seconds, 0)
            if instruction.opcode.endswith("-done") and (first := _first_operand(instruction)) in started:
                began, seconds, one = started[first]
                self._row(cost, one).exposed_seconds += times * max(0.0, seconds - (clock - began))

    def _link(self, cost: Cost, one: Collective, chain: str, times: int, seconds: float, work: float) -> None:
        """One fusion of a chain: the first brings the collective in, each hides some of it."""
        if chain not in self._chains:
            self._chains[chain] = seconds
            self._record(cost, one, times, seconds, seconds, one.bytes)
        hidden = min(work, self._chains[chain])
        self._chains[chain] -= hidden
        self._row(cost, one).exposed_seconds -= times * hidden

    def _record(self, cost, one: Collective, times: int, seconds: float, exposed: float, apart: int) -> None:
        row = self._row(cost, one)
        row.count += times
        row.bytes += times * one.bytes
        row.seconds += times * seconds
        row.exposed_seconds += times * exposed
        row.asynchronous += times * apart

    def _row(self, cost: Cost, one: Collective) -> Traffic:
        return cost.traffic.setdefault(("+".join(one.axes(self._mesh)) or "none", one.kind), Traffic())

    def _wire_seconds(self, one: Collective) -> float:
        if self._chip is None:
            return 0.0
        groups = one.replica_groups or (tuple(range(self._mesh.size)),)
        rate = min(map(self._chip.group_bandwidth, groups))
        return wire_bytes(one.kind, one.bytes, len(groups[0])) / rate

    def _collectives(self, instruction: Instruction, name: str) -> list[tuple[Collective, str | None]]:
        """(collective, its chain) of an instruction, inside a fusion or an asynchronous call too."""
        kind = hlo.collective_kind(instruction.opcode, name)
        if kind is not None:
            one = hlo.collective(instruction, kind, self._computations[name], 1, name)
            return [(one, hlo.chain_of(instruction))]
        if instruction.opcode not in ("fusion", "async-start"):
            return []
        inner = [callee for callee, _ in hlo.callees(instruction, self._computations)]
        return [
            found for name in inner for i in self._computations[name] for found in self._collectives(i, name)
        ]

    def _regions(self, instruction: Instruction) -> list[tuple[str, int]]:
        if instruction.opcode not in _REGIONS:
            return []
        called = hlo.callees(instruction, self._computations)
        return [(name, self._routed.turns if length is None else length) for name, length in called]

    def _work(self, instruction: Instruction, name: str) -> float:
        regions = self._regions(instruction)
        if regions:
            return sum(length * self.seconds(inner) for inner, length in regions)
        if instruction.opcode.endswith("-start") or hlo.collective_kind(instruction.opcode):
            return 0.0  # prefetches run beside the work; collectives are counted apart
        if self._chip is None:
            return 0.0
        products = self._products_of(instruction, name) / self._chip.flops
        return max(products, self._bytes_of(instruction, name) / self._chip.bandwidth)

    def _products_of(self, instruction: Instruction, name: str) -> float:
        if instruction.opcode in _REGIONS:
            return 0.0
        if instruction.opcode in ("dot", "convolution"):
            left, right = _operand_types(instruction, self._types[name])
            return _flops(instruction.opcode, instruction.result, left, right, instruction.rest)
        if instruction.opcode == "custom-call":
            operands = [self._types[name].get(one, "") for one in _operand_names(instruction)]
            of_kernel = kernel_flops(instruction.name, [_shape(one) for one in operands], self._routed.rows)
            return of_kernel or gpu_calls.flops(instruction, next(iter(operands), ""))
        return sum(self._products_inside(inner) for inner, _ in hlo.callees(instruction, self._computations))

    def _products_inside(self, name: str) -> float:
        if name not in self._products:
            self._products[name] = sum(self._products_of(i, name) for i in self._computations[name])
        return self._products[name]

    def _bytes_of(self, instruction: Instruction, name: str) -> float:
        if instruction.opcode in _FREE or instruction.opcode in _REGIONS:
            return 0.0
        if instruction.opcode.endswith("-done"):
            return 0.0
        types = self._types[name]
        operands = [types.get(one, "") for one in _operand_names(instruction)]
        if instruction.opcode == "dynamic-slice":
            return 2 * _hbm_bytes(instruction.result)
        if instruction.opcode == "dynamic-update-slice":
            return 2 * _hbm_bytes(operands[1])
        if instruction.opcode == "fusion":
            inner = hlo.callees(instruction, self._computations)[0][0]
            return self._fusion_bytes(instruction, inner, operands)
        result = gpu_calls.result(instruction)
        return _hbm_bytes(result) + sum(map(_hbm_bytes, operands))

    def _fusion_bytes(self, instruction: Instruction, inner: str, operands: list[str]) -> float:
        """Operands of which only slices are read count as the slices; results updated in place, as the updates."""
        body = self._computations[inner]
        places, readers = {_number(i): i.name for i in body if i.opcode == "parameter"}, _readers(body)
        total, in_place = 0.0, 0.0
        for index, operand in enumerate(operands):
            used = readers.get(places.get(index, ""), [])
            if not used or not all(at == 0 and i.opcode in _PARTIAL for i, at in used):
                total += _hbm_bytes(operand)
            elif _hbm_bytes(operand):
                updating = [i for i, _ in used if i.opcode == "dynamic-update-slice"]
                updates = [self._types[inner].get(_operand_names(i)[1], "") for i in updating]
                total += sum(_hbm_bytes(i.result) for i, _ in used if i not in updating)
                total += sum(map(_any_bytes, updates))
                in_place += _hbm_bytes(operand) if updating else 0.0
        return total + max(0.0, _hbm_bytes(instruction.result) - in_place)


def _readers(body: list[Instruction]) -> dict[str, list[tuple[Instruction, int]]]:
    """Who reads each value of a fusion, and as which operand; a bitcast is what it casts."""
    casts = {i.name: _first_operand(i) for i in body if i.opcode == "bitcast"}
    readers: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for one in body:
        for place, name in enumerate(_operand_names(one) if one.name not in casts else ()):
            while name in casts:
                name = casts[name]
            readers[name].append((one, place))
    return readers


def _number(instruction: Instruction) -> int:
    return int(instruction.rest.split(")")[0])


def _operand_names(instruction: Instruction) -> list[str]:
    inside = instruction.rest[: hlo.closing("(" + instruction.rest) - 2]
    return re.findall(r"%([^\s,()]+)", inside)


def _first_operand(instruction: Instruction) -> str:
    return next(iter(_operand_names(instruction)), "")


def _operand_types(instruction: Instruction, types: dict[str, str]) -> list[str]:
    return [types[name] for name in _operand_names(instruction)[:2]]


def _hbm_bytes(types: str) -> float:
    """Bytes of the arrays that live in HBM; S(n) in a layout says another memory."""
    return sum(
        hlo.bytes_of(f"{dtype}[{shape}]")
        for dtype, shape, layout in _TYPED.findall(types)
        if "S(" not in layout
    )


def _any_bytes(types: str) -> float:
    return sum(hlo.bytes_of(f"{dtype}[{shape}]") for dtype, shape, _ in _TYPED.findall(types))


def _shape(types: str) -> tuple[int, ...]:
    found = _TYPED.search(types)
    return tuple(int(size) for size in found[2].split(",") if size) if found else ()


@cache
def _flops(opcode: str, result: str, left: str, right: str, rest: str) -> float:
    """2 x multiplications of a product; a TPU writes most of them as convolutions."""
    out = _shape(result)
    if opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2.0 * math.prod(out) * math.prod(_shape(left)[dim] for dim in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    image, kernel, out_labels = labels[1], labels[2], labels[3]
    fixed = math.prod(out[out_labels.index(label)] for label in "bf")
    fixed *= _shape(right)[kernel.index("i")]
    spatial = [label for label in out_labels if label.isdigit()]
    window = _window(rest, len(spatial))
    pairs = 1
    for axis, label in enumerate(spatial):
        sizes = (
            _shape(left)[image.index(label)],
            _shape(right)[kernel.index(label)],
            out[out_labels.index(label)],
        )
        pairs *= _valid_pairs(*sizes, *window[axis])
    return 2.0 * fixed * pairs


def _window(rest: str, dims: int) -> list[tuple[int, int, int, int]]:
    """(stride, low padding, dilation of the image, of the kernel) of each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    read = lambda name, default: given[name].split("x") if name in given else [default] * dims  # noqa: E731
    stride, image, kernel = (map(int, read(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = (int(low.split("_")[0]) for low in read("pad", "0_0"))
    return list(zip(stride, padding, image, kernel, strict=True))


@cache
def _valid_pairs(size, kernel, out, stride, padding, image_dilation, kernel_dilation) -> int:
    """(result, kernel) positions that meet a number and not padding."""
    length, count = (size - 1) * image_dilation + 1, 0
    for position in range(out):
        at = (position * stride + tap * kernel_dilation - padding for tap in range(kernel))
        count += sum(0 <= place < length and place % image_dilation == 0 for place in at)
    return count
