"""Tells whether a traced function draws random numbers from constants, so that every call draws the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from jaxfb.forward_backward.loss_function.summands import parts_of_scan
from jaxfb.platforms.compat import called, is_traced

WARNING = (
    "the loss function draws random numbers from a key that is a constant, such as that of an nnx.Dropout made with "
    "rngs, so that they are the same in every microbatch and update; draw them from rng, an array of one key a row: "
    "jax.vmap(lambda row, key: ...)(rows, rng), where an nnx.Dropout is called with rngs=nnx.Rngs(key)"
)


def repeats_draws(program: ClosedJaxpr, given: Sequence[bool]) -> bool:
    """Returns whether a program draws random numbers that depend on none of its inputs.

    given: for each input whether it varies from call to call.
    """
    return _followed(program, given)[0]


def _followed(program: ClosedJaxpr, given: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Returns whether a program repeats draws, and which of its results vary from call to call."""
    jaxpr = program.jaxpr
    varies = dict(zip(jaxpr.constvars, map(is_traced, program.consts), strict=True))
    varies |= zip(jaxpr.invars, given, strict=True)
    repeats = False
    for eqn in jaxpr.eqns:
        again, results = _of_equation(eqn, [_varies(var, varies) for var in eqn.invars])
        repeats |= again
        varies |= zip(eqn.outvars, results, strict=True)
    return repeats, [_varies(var, varies) for var in jaxpr.outvars]


def _of_equation(eqn: Any, read: list[bool]) -> tuple[bool, list[bool]]:
    """Returns the same of one equation; read: which of its inputs vary."""
    repeats = eqn.primitive.name == "random_bits" and not any(read)
    results = [any(read)] * len(eqn.outvars)
    for inner in _programs_in(eqn):
        again, of_inner = _followed(inner, _inside(eqn, read, len(inner.jaxpr.invars)))
        repeats |= again
        if called(eqn) is not None and len(of_inner) == len(results):
            results = of_inner
    return repeats, results


def _inside(eqn: Any, read: list[bool], number: int) -> list[bool]:
    """Returns which inputs of a program in an equation vary: those of the equation, or all if any where they differ."""
    if eqn.primitive.name == "cond":
        read = read[1:]  # without the choice of a branch
    if eqn.primitive.name == "scan":  # what it carries may vary from the second turn on
        constants, carried, _ = parts_of_scan(eqn)
        read = [*read[:constants], *[any(read)] * carried, *read[constants + carried :]]
    return read if len(read) == number else [any(read)] * number


def _programs_in(eqn: Any) -> list[ClosedJaxpr]:
    """Returns the programs of an equation: of a call, a loop or branches."""
    values = jax.tree.leaves([*eqn.params.values()], is_leaf=lambda value: hasattr(value, "eqns"))
    found = [one for one in values if hasattr(one, "eqns")]
    return [one if isinstance(one, ClosedJaxpr) else ClosedJaxpr(one, ()) for one in found]


def _varies(var: Any, varies: dict[Any, bool]) -> bool:
    return not isinstance(var, Literal) and varies[var]
