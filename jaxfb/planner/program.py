"""A traced step as a tree of operations on values: what the estimates of memory, work and traffic walk over.

Calls (jit, remat, custom derivatives) are written out; loops and branches stay, as regions; a kernel is one operation.
Sizes are those that one device sees, because only the inside of `shard_map` is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jax.extend.core import Literal

_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LOOPS = ("scan", "while", "cond")


@dataclass(eq=False)
class Value:
    """bytes: of the array. maker: the Op that made it; None for what a region is given."""

    bytes: int
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    maker: Op | None = None
    uses: list[Op] = field(default_factory=list)
    returned: bool = False


@dataclass(eq=False)
class Op:
    """name: the primitive's. regions: of a loop its body, of a branch each of them. params: the primitive's."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any]
    regions: list[Region] = field(default_factory=list)
    position: int = 0


@dataclass(eq=False)
class Region:
    """Straight-line operations. `length`: how often one run of what holds it runs it."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]
    length: int = 1


def region_of(jaxpr: Any, length: int = 1) -> Region:
    """Returns the region of a (closed or open) jaxpr."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict = {var: _value(var) for var in [*jaxpr.constvars, *jaxpr.invars]}
    inputs = [env[var] for var in jaxpr.invars]
    region = Region(inputs, [], [], length)
    region.outputs = _run(jaxpr, env, region)
    for value in region.outputs:
        value.returned = True
    region.ops = _needed(region.ops)
    for position, op in enumerate(region.ops):
        op.position = position
    return region


def sharded_part(closed: Any) -> Region:
    """Returns the work of one device inside the step's `shard_map`s, in order: the loop over microbatches and, where
    the loss depends on what all of them count first, the pass that counts.

    Raises:
      LookupError: there is none.
    """
    passes = [region_of(eqn.params["jaxpr"]) for eqn in _find(getattr(closed, "jaxpr", closed), "shard_map")]
    if not passes:
        raise LookupError("no shard_map in this program")
    parts = zip(*((one.inputs, one.ops, one.outputs) for one in passes), strict=True)
    joined = Region(*(list(chain.from_iterable(part)) for part in parts))
    for position, op in enumerate(joined.ops):
        op.position = position
    return joined


def walk(region: Region, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Returns (op, how often it runs) of every operation that is no loop or branch, inside them too."""
    for op in region.ops:
        if not op.regions:
            yield op, times
        for inner in run_regions(op):
            yield from walk(inner, times * inner.length)


def run_regions(op: Op) -> list[Region]:
    """Returns the regions that one run of a loop or branch runs: of branches the one with the most data."""
    return [max(op.regions, key=_bytes_made)] if op.name == "cond" else op.regions


def _bytes_made(region: Region) -> int:
    return sum(times * value.bytes for op, times in walk(region) for value in op.outputs)


def _run(jaxpr: Any, env: dict, region: Region) -> list[Value]:
    """Adds the equations of a jaxpr to a region; the values of its outputs."""
    for eqn in jaxpr.eqns:
        inputs = [_read(env, var) for var in eqn.invars]
        inner = _branch_of_platform(eqn) or (None if eqn.primitive.name in _LOOPS else _inner(eqn))
        if inner is not None:
            opened = getattr(inner, "jaxpr", inner)
            inside = {var: _value(var) for var in opened.constvars}
            inside |= dict(zip(opened.invars, inputs[len(inputs) - len(opened.invars) :], strict=True))
            results = _run(opened, inside, region)
        else:
            results = _add(eqn, inputs, region)
        env.update(zip(eqn.outvars, results, strict=True))
    return [_read(env, var) for var in jaxpr.outvars]


def _needed(ops: list[Op]) -> list[Op]:
    """Drops operations whose results nothing reads, as a compiler does."""
    kept = []
    for op in reversed(ops):
        if any(value.returned or value.uses for value in op.outputs):
            kept.append(op)
        else:
            for value in op.inputs:
                value.uses = [use for use in value.uses if use is not op]
    return kept[::-1]


def _add(eqn: Any, inputs: list[Value], region: Region) -> list[Value]:
    op = Op(eqn.primitive.name, inputs, [_value(var) for var in eqn.outvars], eqn.params, _regions(eqn))
    for value in op.outputs:
        value.maker = op
    for value in inputs:
        value.uses.append(op)
    region.ops.append(op)
    return op.outputs


def _regions(eqn: Any) -> list[Region]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return [region_of(params["jaxpr"], params["length"])]
    if name == "while":
        return [region_of(params["body_jaxpr"])]
    if name == "cond":
        return [region_of(branch) for branch in params["branches"]]
    return []


def _branch_of_platform(eqn: Any) -> Any:
    """Returns the generic branch of a `lax.platform_dependent`; its branches differ in form, not in work."""
    return eqn.params["branches"][-1] if eqn.params.get("branches_platforms") else None


def _inner(eqn: Any) -> Any:
    """Returns the program of a call; None where there is none, or it is a kernel's, whose values are blocks on the
    chip.
    """
    if eqn.primitive.name == "pallas_call":
        return None
    found = (eqn.params.get(name) for name in _INNER)
    return next((one for one in found if hasattr(getattr(one, "jaxpr", one), "eqns")), None)


def _find(jaxpr: Any, name: str) -> Iterator[Any]:
    """Equations of that primitive, those inside them apart."""
    for eqn in jaxpr.eqns:
        inner = _inner(eqn)
        if eqn.primitive.name == name:
            yield eqn
        elif inner is not None:
            yield from _find(getattr(inner, "jaxpr", inner), name)


def _read(env: dict, var: Any) -> Value:
    return _value(var) if isinstance(var, Literal) else env[var]


def _value(var: Any) -> Value:
    if isinstance(var, Literal):
        return Value(0)
    aval = var.aval
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    itemsize = getattr(dtype, "itemsize", 0)
    return Value(math.prod(shape) * itemsize, tuple(shape), itemsize)
