"""Finds what a traced total adds up, and which inputs each summand reads.

A total such as error.sum() + 0.1 * (w**2).sum() is not a sum over rows: the second summand reads no row, so it would be
counted once for each microbatch, or for each device that computes a share of the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxfb.platforms.compat import called, equations, is_traced

CLOSED_OVER = "closed over"
"""Stands for traced values that are not inputs: of a surrounding `jax.jit`, or frozen parameters."""
MOST = 64
"""Totals of more summands are taken as one."""
_ADD = {"add", "sub", "add_any"}
_KEEP = {"neg", "convert_element_type", "copy", "stop_gradient", "reshape", "squeeze", "reduce_precision"}


class Summand(NamedTuple):
    """A summand of a result.

    reads: numbers of the inputs that it depends on, names of the mesh axes along which it communicates, and CLOSED_OVER
      where it depends on a traced value that is not an input.
    text:  the same for the same computation in programs for other sizes of data; "" where data are read.
    over:  names of the mesh axes over whose devices it is a sum already, so that each of them has all of it.
    """

    reads: frozenset
    text: str
    over: frozenset = frozenset()


Summands = tuple[Summand, ...]


def summands(program: ClosedJaxpr, is_data: Sequence[bool]) -> list[Summands]:
    """Returns the summands of each result; those of an array, and whatever a loop adds up, are taken as one.

    is_data: for each input, whether it is data, which makes texts needless.
    """
    data = frozenset(number for number, one in enumerate(is_data) if one)
    given = [
        (Summand(frozenset([number]), "" if number in data else f"input {number}"),)
        for number in range(len(is_data))
    ]
    return _Walk(data).results(program, given)


class _Walk:
    def __init__(self, data: frozenset):
        self._data = data

    def results(self, program: ClosedJaxpr, given: Sequence[Summands]) -> list[Summands]:
        known: dict[Any, Summands] = {}
        known.update(zip(program.jaxpr.constvars, map(_of_constant, program.consts), strict=True))
        known.update(zip(program.jaxpr.invars, given, strict=True))

        def read(var) -> Summands:
            return _of_constant(var.val) if isinstance(var, Literal) else known[var]

        for eqn in program.jaxpr.eqns:
            known.update(zip(eqn.outvars, self._of_equation(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, program.jaxpr.outvars)]

    def _of_equation(self, eqn: Any, values: list[Summands]) -> list[Summands]:
        name, inner = eqn.primitive.name, called(eqn)
        if inner is not None and len(inner.jaxpr.invars) == len(values):
            return self.results(inner, values)
        if name == "scan":
            return self._of_scan(eqn, values)
        if name == "reduce_sum" and len(values[0]) > 1:  # of what each layer returned
            return [values[0]]
        scalar = all(not var.aval.shape for var in eqn.outvars)
        if name.startswith("psum") and scalar:
            over = frozenset(_axes(eqn))
            return [tuple(one._replace(over=over) for one in found) for found in self._as_one(eqn, values)]
        if name in _KEEP and (scalar or len(values[0]) > 1):
            return [values[0]]
        if name in _ADD and scalar:
            return [self._few(_distinct((*values[0], *values[1])))]
        if name == "mul" and scalar:
            products = (self._product(a, b) for a in values[0] for b in values[1])
            return [self._few(_distinct(products))]
        if name == "div" and scalar:
            shares = (self._joined(name, (a, *values[1]))._replace(over=a.over) for a in values[0])
            return [self._few(_distinct(shares))]
        return self._as_one(eqn, values)

    def _of_scan(self, eqn: Any, values: list[Summands]) -> list[Summands]:
        """Returns a loop's results; summands of a number that each turn returns stay apart, such as of each layer."""
        whole = self._as_one(eqn, values)
        constants, carried, body = parts_of_scan(eqn)
        carries = whole[:carried]
        given: list[Summands] = [(self._joined("scan", each),) for each in values]
        given[constants : constants + carried] = carries
        length = str(eqn.params["length"])
        returned = self.results(body, given)[carried:]

        def of_all_turns(one: Summand) -> Summand:
            return one._replace(text=one.text and _digest("scan", length, one.text))

        stacked = [
            tuple(map(of_all_turns, found)) if var.aval.ndim == 1 else together
            for var, found, together in zip(eqn.outvars[carried:], returned, whole[carried:], strict=True)
        ]
        return [*carries, *stacked]

    def _as_one(self, eqn: Any, values: list[Summands]) -> list[Summands]:
        each = [one for found in values for one in found]
        reads = frozenset().union(*(one.reads for one in each), _axes(eqn))
        text = self._text(eqn, each) if reads.isdisjoint(self._data) else ""
        return [(Summand(reads, text and f"{text} {number}"),) for number in range(len(eqn.outvars))]

    def _text(self, eqn: Any, each: Iterable[Summand]) -> str:
        shapes = [str(var.aval) for var in eqn.outvars]
        return _digest(eqn.primitive.name, str(eqn.params), *shapes, *(one.text for one in each))

    def _joined(self, name: str, each: Sequence[Summand]) -> Summand:
        reads = frozenset().union(*(one.reads for one in each))
        return Summand(
            reads, _digest(name, *(one.text for one in each)) if reads.isdisjoint(self._data) else ""
        )

    def _product(self, a: Summand, b: Summand) -> Summand:
        """Returns a product, which is a sum over devices if one factor is and the other is the same on all of them."""
        alike = a.reads.isdisjoint(self._data) or b.reads.isdisjoint(self._data)
        return self._joined("mul", (a, b))._replace(over=a.over | b.over if alike else a.over & b.over)

    def _few(self, found: Summands) -> Summands:
        return found if len(found) <= MOST else (self._joined("many", found),)


def parts_of_scan(eqn: Any) -> tuple[int, int, ClosedJaxpr]:
    """Returns how many inputs of a loop are the same for each turn, how many are carried, and the program of a turn.

    By dimensions, since versions of JAX name the numbers differently: what is not carried has one more outside.
    """
    body = eqn.params["jaxpr"]
    inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    carried = len(eqn.outvars) - _further(eqn.outvars, inner.outvars)
    constants = len(eqn.invars) - carried - _further(eqn.invars, inner.invars)
    return constants, carried, body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _further(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(out.aval.shape) > len(one.aval.shape) for out, one in zip(outside, inside, strict=True))


def _of_constant(value: Any) -> Summands:
    if is_traced(value):  # its number is not known yet
        return (Summand(frozenset([CLOSED_OVER]), f"{CLOSED_OVER} {id(value)}"),)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return (Summand(frozenset(), f"keys {id(value)}"),)  # numpy takes none
    array = np.asarray(value)
    if array.shape == () and array == 0:
        return ()
    numbers = hashlib.sha1(array.tobytes()).hexdigest()
    return (Summand(frozenset(), _digest(str(array.shape), str(array.dtype), numbers)),)


def _distinct(found: Iterable[Summand]) -> Summands:
    return tuple(dict.fromkeys(found))


def _axes(eqn: Any) -> set[str]:
    """Returns the mesh axes along which an equation, or one inside of it, communicates."""
    found = set()
    for one in (eqn, *equations([*eqn.params.values()])):
        for value in (one.params.get("axis_name"), one.params.get("axes")):
            names = value if isinstance(value, (tuple, list)) else (value,)
            found |= {name for name in names if isinstance(name, str)}
    return found


def _digest(*texts: str) -> str:
    return hashlib.sha1("\n".join(texts).encode()).hexdigest()
