"""Computes what a compiled program costs on a chip, from its scheduled text: a roofline, instruction by instruction.

An instruction takes the longer of its products at the peak rate and its bytes at the peak bandwidth; loops count their
length. A conditional is the longest of its branches; in the ticks of a pipeline, each as often as it is taken
(`branches.py`). A collective takes its bytes at the bandwidth of its mesh axis; those among the same devices follow one
another; what runs between its start and its done hides it. So it is with what moves between a device and its host's
memory, each way at the bandwidth of the link.
Nothing is faster than its roof, so this is a lower bound of the time, and shows where the time goes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.sharding import Mesh

from jaxfb import hlo
from jaxfb.hlo import Collective, Instruction
from jaxfb.planner.chips import Chip
from jaxfb.planner.program_cost.branches import TakenBranches, branch_of
from jaxfb.planner.program_cost.hlo_bytes import Bytes
from jaxfb.planner.program_cost.hlo_products import Products
from jaxfb.planner.program_cost.routing import Routed

HOST = "host"
"""Stands for the axes of a mesh where a device reads from its host's memory, or writes to it."""


@dataclass
class Cost:
    """The cost of a whole run of the program on one device.

    flops: of matrix products. bytes: read and written in HBM. work_seconds: sum of the instructions' roofs.
    product_seconds: the part of it that products take at the peak rate.
    traffic: (axes, kind) -> Traffic; (HOST, "read" or "write") -> that with the host's memory.
    """

    flops: float = 0
    bytes: float = 0
    work_seconds: float = 0
    product_seconds: float = 0
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        """Returns the time in which nothing runs but collectives and transfers from and to the host."""
        return sum(one.exposed_seconds for one in self.traffic.values())

    @property
    def seconds(self) -> float:
        """Returns work, and what it does not hide of the collectives."""
        return self.work_seconds + self.exposed_seconds

    def add(self, other: Cost, times: float) -> None:
        """Adds so many runs of another program."""
        for name in ("flops", "bytes", "work_seconds", "product_seconds"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for key, row in other.traffic.items():
            self.traffic.setdefault(key, Traffic()).add(row, times)


@dataclass
class Traffic:
    """The traffic of one kind of collective along one set of axes: how many, their bytes, their time, hidden or not.

    count: whole but for rounding, where branches run in a share of a loop's turns. bytes: of the arrays, as
    `jaxfb.hlo.Collective` counts. asynchronous: bytes whose start and done stand apart; beside_products: those of them
    between whose start and done there are matrix products.
    """

    count: float = 0
    bytes: float = 0
    seconds: float = 0
    exposed_seconds: float = 0
    asynchronous: float = 0
    beside_products: float = 0

    def add(self, other: Traffic, times: float = 1) -> None:
        """Adds so many times what another row counts."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


def wire_bytes(kind: str, size: float, group: int) -> float:
    """Returns what a device sends, for an array of `size` bytes among `group` devices on a ring."""
    share = (group - 1) / group if group else 1
    return size * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


def cost_of(
    text: str,
    mesh: Mesh,
    chip: Chip | None = None,
    routed: Routed | None = None,
    taken: TakenBranches | None = None,
) -> Cost:
    """Reads `compiled.as_text()`. Without a chip nothing takes time.

    routed: what a loop of unknown length and a kernel for experts works through; without it, one turn and all rows.
    taken: how often the ticks of a pipeline take their branches; without it, always the longest.
    """
    computations, entry = hlo.parse(text)
    return _Reader(computations, mesh, chip, routed or Routed(), taken).cost(entry)


class Executed(NamedTuple):
    """An instruction that runs by itself: its computation, the cost of one run, and how often it runs."""

    computation: str
    instruction: Instruction
    cost: Cost
    times: float

    @property
    def beside_products(self) -> float:
        """Returns the seconds, of all runs, that it takes longer than its products at the peak rate."""
        return self.times * (self.cost.work_seconds - self.cost.product_seconds)


def executed(text: str, chip: Chip, routed: Routed | None = None) -> Iterator[Executed]:
    """Yields the instructions of `compiled.as_text()`: of a loop with its length, of a conditional those of all
    branches.
    """
    computations, entry = hlo.parse(text)
    reader = _Reader(computations, None, chip, routed or Routed())

    def of(name: str, times: float) -> Iterator[Executed]:
        for one in computations[name]:
            if one.opcode in hlo.REGIONS:
                for callee, length in hlo.callees(one, computations):
                    yield from of(callee, times * (1 if length is None else length))
            else:
                yield Executed(name, one, reader.alone(one, name), times)

    return of(entry, 1)


def _rows_of(loop: Instruction) -> set[int]:
    """Returns the numbers of rows of the matrices that a loop carries."""
    return {int(rows) for rows in re.findall(r"\[(\d+),\d+\]", loop.result)}


class _Reader:
    def __init__(
        self,
        computations,
        mesh: Mesh | None,
        chip: Chip | None,
        routed: Routed,
        taken: TakenBranches | None = None,
    ):
        self._computations, self._mesh, self._chip = computations, mesh, chip
        self._routed, self._taken = routed, taken
        self._products, self._bytes = Products(computations, routed), Bytes(computations)
        self._costs: dict[str, Cost] = {}
        self._chains: dict[str, float] = {}

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh, which is needed for collectives alone."""
        assert self._mesh is not None
        return self._mesh

    def cost(self, name: str) -> Cost:
        """Returns the cost of one run of a computation."""
        if name not in self._costs:
            run = _Run(self, name)
            for instruction in self._computations[name]:
                run.step(instruction)
            self._costs[name] = run.end()
        return self._costs[name]

    def regions(self, instruction: Instruction, name: str) -> list[tuple[Cost, float]]:
        """Returns (cost of one run, how many) of what an instruction of a computation runs."""
        if instruction.opcode == "conditional":
            return self._branches(instruction, name)
        called = hlo.callees(instruction, self._computations)
        _, turns = self._routed.of(_rows_of(instruction))
        return [(self.cost(one), turns if length is None else length) for one, length in called]

    def _branches(self, conditional: Instruction, name: str) -> list[tuple[Cost, float]]:
        """Returns (cost, share of the runs that take it) of the branches; the longest, where that is not known."""
        *others, longest = self._by_length(conditional)
        share = self._share(conditional, name)
        if share is None or len(others) != 1:
            return [(longest, 1.0)]
        return [(others[0], 1 - share), (longest, share)]

    def _share(self, conditional: Instruction, name: str) -> float | None:
        """Returns how often the longest branch is taken, where it belongs to the ticks of a pipeline."""
        if self._taken is None or (branch := branch_of(conditional)) is None:
            return None
        beside = {one.what: two for two in self._computations[name] if (one := branch_of(two))}
        kinds = {what: self._by_length(two)[-1].seconds for what, two in beside.items() if what in "FBW"}
        return self._taken.share(branch, kinds)

    def _by_length(self, conditional: Instruction) -> list[Cost]:
        """Returns the costs of the branches, the longest last."""
        costs = [self.cost(one) for one, _ in hlo.callees(conditional, self._computations)]
        return sorted(costs, key=lambda one: (one.seconds, one.flops))

    def alone(self, instruction: Instruction, name: str) -> Cost:
        """Returns the cost of an instruction that runs no other computation, without collectives."""
        flops, size = self._products.of(instruction, name), self._bytes.of(instruction, name)
        if self._chip is None:
            return Cost(flops, size)
        beside = instruction.opcode.endswith("-start") or hlo.is_collective(instruction, self._computations)
        if beside:  # prefetches run beside the work; collectives are counted apart
            return Cost(flops, size)
        products = flops / self._chip.flops
        return Cost(flops, size, max(products, size / self._chip.bandwidth), products)

    def collectives(self, instruction: Instruction, name: str) -> Iterator[tuple[Collective, str | None]]:
        """Returns (collective, its chain) of an instruction, inside a fusion or an asynchronous call too."""
        if kind := hlo.collective_kind(instruction.opcode, name):
            one = hlo.collective(instruction, kind, self._computations[name], 1, name)
            yield one, hlo.chain_of(instruction)
        elif instruction.opcode == "fusion" or instruction.opcode.endswith("-start"):
            for inner, _ in hlo.callees(instruction, self._computations):
                for one in self._computations[inner]:
                    yield from self.collectives(one, inner)

    def key(self, one: Collective) -> tuple[str, str]:
        return "+".join(one.axes(self.mesh)) or "none", one.kind

    def wire_seconds(self, one: Collective) -> float:
        if self._chip is None:
            return 0.0
        groups = one.replica_groups or (tuple(range(self.mesh.size)),)
        rate = min(map(self._chip.group_bandwidth, groups))
        if one.kind == "collective-permute" and self._chip.torus:
            rate /= 2  # to one of the two neighbours along an axis
        return wire_bytes(one.kind, one.bytes, len(groups[0])) / rate

    def host_seconds(self, moved: hlo.HostTransfer) -> float:
        return moved.bytes / self._chip.host_bandwidth if self._chip else 0.0

    def is_first(self, chain: str) -> bool:
        """Returns whether no link of that chain of fusions was seen before."""
        return chain not in self._chains

    def hidden(self, one: Collective, chain: str, work: float) -> float:
        """Returns seconds of a collective that a link of its chain of fusions hides by its own work."""
        left = self._chains.setdefault(chain, self.wire_seconds(one))
        self._chains[chain] = max(0.0, left - work)
        return left - self._chains[chain]


@dataclass
class _Transfer:
    """A collective of `size` bytes on its way from `begin` to `over`; `before` is the last one among the same devices,
    `products` the seconds of products that lie before its start.
    """

    begin: float
    over: float
    row: Traffic
    before: _Transfer | None
    size: float
    products: float


class _Run:
    """Runs a computation, instruction by instruction, with a clock.

    wires:   the last collective among the same devices.
    waiting: collectives that were started without operands, as on the SparseCore of a TPU, and get them by an update.
    started: the others that are on their way. Both by the name of the start or its last update.
    """

    def __init__(self, reader: _Reader, name: str):
        self._reader, self._name = reader, name
        self._cost, self._clock = Cost(), 0.0
        self._wires: dict[tuple, _Transfer] = {}
        self._waiting: dict[str, list[Collective]] = {}
        self._started: dict[str, list[_Transfer]] = {}

    def step(self, instruction: Instruction) -> None:
        if instruction.opcode in hlo.REGIONS:
            for cost, times in self._reader.regions(instruction, self._name):
                self._cost.add(cost, times)
                self._clock += times * cost.seconds
            return
        cost = self._reader.alone(instruction, self._name)
        self._cost.add(cost, 1)
        self._clock += cost.work_seconds
        if instruction.opcode.endswith("-start"):
            found = [one for one, _ in self._reader.collectives(instruction, self._name)]
            if moved := hlo.host_transfer(instruction):
                self._started[instruction.name] = [self._send_to_host(moved)]
                return
            self._begin(instruction.name, found, hlo.operand_names(instruction))
        elif instruction.opcode.endswith("-update"):
            first, *operands = hlo.operand_names(instruction)
            self._started[instruction.name] = self._started.pop(first, [])
            self._begin(instruction.name, self._waiting.pop(first, []), operands)
        elif instruction.opcode.endswith("-done"):
            (first,) = hlo.operand_names(instruction)
            self._begin(first, self._waiting.pop(first, []), [first])
            for sent in self._started.pop(first, []):
                self._wait(sent)
        else:
            for one, chain in self._reader.collectives(instruction, self._name):
                if chain is None:
                    self._wait(self._send(one, 0))
                else:
                    self._link(one, chain, cost.work_seconds)

    def end(self) -> Cost:
        """Returns the cost, when everything that was started is done."""
        for sent in itertools.chain.from_iterable(self._started.values()):
            self._wait(sent)
        return self._cost

    def _send(self, one: Collective, apart: int) -> _Transfer:
        """Starts a collective; apart: bytes whose start and done are separate instructions."""
        wire = (one.kind == "collective-permute", one.replica_groups[:1])
        row = Traffic(1, one.bytes, self._reader.wire_seconds(one), 0.0, apart)
        return self._on_wire(wire, self._reader.key(one), row)

    def _send_to_host(self, moved: hlo.HostTransfer) -> _Transfer:
        key = HOST, moved.direction
        return self._on_wire(
            key, key, Traffic(1, moved.bytes, self._reader.host_seconds(moved), 0.0, moved.bytes)
        )

    def _on_wire(self, wire: tuple, key: tuple[str, str], sent: Traffic) -> _Transfer:
        """Starts what `sent` counts when the wire is free."""
        row = self._cost.traffic.setdefault(key, Traffic())
        row.add(sent)
        before = self._wires.get(wire)
        begin = max(self._clock, before.over) if before else self._clock
        products = self._cost.product_seconds
        self._wires[wire] = _Transfer(begin, begin + sent.seconds, row, before, sent.bytes, products)
        return self._wires[wire]

    def _wait(self, sent: _Transfer) -> None:
        """Waits for a collective; its exposed time includes that of the collectives it waited for."""
        if self._cost.product_seconds > sent.products:
            sent.row.beside_products += sent.size
        over, part = max(self._clock, sent.over), sent
        while part is not None and part.over > self._clock:
            part.row.exposed_seconds += part.over - max(self._clock, part.begin)
            part = part.before
        self._clock = over

    def _begin(self, name: str, found: list[Collective], operands: list[str]) -> None:
        """Sends what has its operands."""
        if operands:
            self._started.setdefault(name, []).extend(self._send(one, one.bytes) for one in found)
        else:
            self._waiting[name] = found

    def _link(self, one: Collective, chain: str, work: float) -> None:
        row = self._cost.traffic.setdefault(self._reader.key(one), Traffic())
        if self._reader.is_first(chain):
            seconds = self._reader.wire_seconds(one)
            row.add(Traffic(1, one.bytes, seconds, seconds, one.bytes))
        row.exposed_seconds -= self._reader.hidden(one, chain, work)
