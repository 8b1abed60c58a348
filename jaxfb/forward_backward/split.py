"""One backward as two: input gradients now, weight gradients later, with no product computed twice.

The traced backward is cut at equations: what the input gradient needs runs now; of the rest, what the weight
gradient needs runs later, from the values that the first part leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from jaxfb.compat import evaluate, inlined

PyTree = Any


class SplitBackward:
    """`backward(only_now, always) -> (weight gradient, input gradient)`, cut in two.

    only_now: pytree of arguments that are gone when the weight gradient is computed; what it needs of them
      is part of `saved`.
    """

    def __init__(self, backward: Callable, only_now: PyTree, always: PyTree):
        closed, shape = jax.make_jaxpr(backward, return_shape=True)(only_now, always)
        self._program: ClosedJaxpr = inlined(closed)
        self._weights, self._inputs = (jax.tree.structure(part) for part in shape)
        self._num_now = len(jax.tree.leaves(only_now))
        jaxpr = self._program.jaxpr
        self._weight_vars = jaxpr.outvars[: self._weights.num_leaves]
        self._input_vars = jaxpr.outvars[self._weights.num_leaves :]
        self._eqns_now = needed(jaxpr.eqns, self._input_vars)
        later = needed(jaxpr.eqns, self._weight_vars)
        self._eqns_later = [eqn for eqn in later if not any(eqn is other for other in self._eqns_now)]
        self._saved_vars = self._crossing()

    def now(self, only_now: PyTree, always: PyTree) -> tuple[list, PyTree]:
        """(saved, input gradient)."""
        jaxpr = self._program.jaxpr
        env = dict(zip(jaxpr.invars, jax.tree.leaves((only_now, always)), strict=True))
        out = evaluate(self._eqns_now, env, self._constants(), [*self._saved_vars, *self._input_vars])
        cut = len(self._saved_vars)
        return out[:cut], jax.tree.unflatten(self._inputs, out[cut:])

    def later(self, saved: list, always: PyTree) -> PyTree:
        """The weight gradient."""
        invars = self._program.jaxpr.invars[self._num_now :]
        env = dict(zip(invars, jax.tree.leaves(always), strict=True)) | dict(
            zip(self._saved_vars, saved, strict=True)
        )
        return jax.tree.unflatten(
            self._weights, evaluate(self._eqns_later, env, self._constants(), self._weight_vars)
        )

    def _constants(self) -> dict:
        return dict(zip(self._program.jaxpr.constvars, self._program.consts, strict=True))

    def _crossing(self) -> list[Var]:
        """Values that only the first part can know and the second reads, in a fixed order."""
        jaxpr = self._program.jaxpr
        made_now = {var for eqn in self._eqns_now for var in eqn.outvars}
        first = made_now | set(jaxpr.invars[: self._num_now])
        read = [v for eqn in self._eqns_later for v in eqn.invars] + list(self._weight_vars)
        return list(dict.fromkeys(v for v in read if not isinstance(v, Literal) and v in first))


def needed(eqns: list, outvars: list) -> list:
    """The equations on which those variables depend, in order."""
    wanted = {var for var in outvars if not isinstance(var, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if any(var in wanted for var in eqn.outvars):
            kept.append(eqn)
            wanted |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return kept[::-1]
