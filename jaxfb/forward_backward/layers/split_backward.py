"""Splits one backward in two: input gradients now, weight gradients later, with no product computed twice.

The traced backward is cut at equations: what the input gradient needs runs now; of the rest, what the weight
gradient needs runs later, from the values that the first part leaves behind. Those values wait in a slot of the
pipeline, so cheap equations move across the cut where that makes them fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from jaxfb.platforms.compat import evaluate, inlined
from jaxfb.types import PyTree


class SplitBackward:
    """`backward(only_now, always) -> (weight gradient, input gradient)`, cut in two.

    only_now: pytree of arguments that are gone when the weight gradient is computed; what it needs of them
      is part of `saved`. The first `num_cotangents` leaves are the cotangents.
    """

    def __init__(self, backward: Callable, only_now: PyTree, always: PyTree, num_cotangents: int):
        closed, shape = jax.make_jaxpr(backward, return_shape=True)(only_now, always)
        self._program: ClosedJaxpr = inlined(closed)
        self._weights, self._inputs = (jax.tree.structure(part) for part in shape)
        self._num_now = len(jax.tree.leaves(only_now))
        jaxpr = self._program.jaxpr
        self._weight_vars = jaxpr.outvars[: self._weights.num_leaves]
        self._input_vars = jaxpr.outvars[self._weights.num_leaves :]
        now = needed(jaxpr.eqns, self._input_vars)
        later = _without(needed(jaxpr.eqns, self._weight_vars), now)
        moved = _cheaper_now(
            now, later, jaxpr.invars[: self._num_now], jaxpr.invars[:num_cotangents], self._weight_vars
        )
        self._eqns_now, self._eqns_later = now + moved, _without(later, moved)
        self._saved_vars = self._crossing()

    def now(self, only_now: PyTree, always: PyTree) -> tuple[list, PyTree]:
        """Returns (saved, input gradient)."""
        jaxpr = self._program.jaxpr
        env = dict(zip(jaxpr.invars, jax.tree.leaves((only_now, always)), strict=True))
        out = evaluate(self._eqns_now, env, self._constants(), [*self._saved_vars, *self._input_vars])
        cut = len(self._saved_vars)
        return out[:cut], jax.tree.unflatten(self._inputs, out[cut:])

    def later(self, saved: list, always: PyTree) -> PyTree:
        """Returns the weight gradient."""
        known = [*self._program.jaxpr.invars[self._num_now :], *self._saved_vars]
        env = dict(zip(known, [*jax.tree.leaves(always), *saved], strict=True))
        out = evaluate(self._eqns_later, env, self._constants(), self._weight_vars)
        return jax.tree.unflatten(self._weights, out)

    def _constants(self) -> dict:
        return dict(zip(self._program.jaxpr.constvars, self._program.consts, strict=True))

    def _crossing(self) -> list[Var]:
        """Returns values that only the first part can know and the second reads, in a fixed order."""
        jaxpr = self._program.jaxpr
        made_now = {var for eqn in self._eqns_now for var in eqn.outvars}
        first = made_now | set(jaxpr.invars[: self._num_now])
        read = [v for eqn in self._eqns_later for v in eqn.invars] + list(self._weight_vars)
        return list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v in first))


def needed(eqns: list, outvars: list) -> list:
    """Returns the equations on which those variables depend, in order."""
    wanted = {var for var in outvars if not isinstance(var, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if any(var in wanted for var in eqn.outvars):
            kept.append(eqn)
            wanted |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return kept[::-1]


def _cheaper_now(now: list, later: list, only_now: list, cotangents: list, outvars: list) -> list:
    """Returns the equations of `later` that make fewer bytes cross if they run now.

    The products with a cotangent, which are the work to be put off, stay. Everything else that reads a value of
    the first part goes now, and from the end on comes back where its inputs are no larger than its outputs.
    """
    made = {var for eqn in now for var in eqn.outvars} | set(only_now)
    tainted = set(cotangents)
    for eqn in now:
        tainted |= set(eqn.outvars) if _reads(eqn, tainted) else set()
    moved, made_later = [], set()
    for eqn in later:
        product = _reads(eqn, tainted) and eqn.primitive.name in _PRODUCTS
        tainted |= set(eqn.outvars) if _reads(eqn, tainted) else set()
        if _reads(eqn, made) and not _reads(eqn, made_later) and not product:
            moved.append(eqn)
            made |= set(eqn.outvars)
        else:
            made_later |= set(eqn.outvars)
    # a gradient that is constantly zero is a literal of the program: nothing computes it and it has no hash
    results = {var for var in outvars if not isinstance(var, Literal)}
    read_later = {var for eqn in _without(later, moved) for var in _variables(eqn)} | results
    read_now, back = set(), []
    for eqn in reversed(moved):
        new = [var for var in _variables(eqn) if var in made and var not in read_later]
        if not read_now & set(eqn.outvars) and _bytes(new) <= _bytes(read_later & set(eqn.outvars)):
            back.append(eqn)
            read_later |= set(_variables(eqn))
        else:
            read_now |= set(_variables(eqn))
    return _without(moved, back)


_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond"}


def _without(eqns: list, others: list) -> list:
    return [eqn for eqn in eqns if not any(eqn is other for other in others)]


def _variables(eqn) -> list[Var]:
    return list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, Literal)))


def _reads(eqn, variables: set) -> bool:
    return any(var in variables for var in _variables(eqn))


def _bytes(variables) -> int:
    return sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in variables)
