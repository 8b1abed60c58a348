"""Decides which leaves of a layer's VJP are stored, and which are recomputed from parameters and microbatch.

The VJP of a layer is a pytree. Some of its leaves are parameters, or made of parameters and microbatch alone: a
transposed kernel, one cast to bfloat16, an attention mask. Kept, they would be there once for each microbatch in
flight; so they are made again from what is at hand. Whatever depends on hidden is kept, once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.extend.core import Literal

from jaxfb.forward_backward.layers.split_backward import needed
from jaxfb.platforms.compat import evaluate, inlined
from jaxfb.types import PyTree

# what may be done again: views, casts, elementwise work, sums; not products, random bits, loops, collectives
_CHEAP = set(
    "reshape transpose convert_element_type broadcast_in_dim squeeze expand_dims copy copy_p slice dynamic_slice rev "
    "concatenate pad gather iota select_n clamp stop_gradient sharding_constraint reduce_precision pvary pcast "
    "eq ne lt le gt ge and or not xor is_finite shift_left shift_right_logical shift_right_arithmetic "
    "add add_any sub mul div rem neg abs sign floor ceil round max min square sqrt rsqrt pow integer_pow "
    "exp exp2 log log1p expm1 sin cos tan tanh logistic erf "
    "reduce_sum reduce_max reduce_min reduce_and reduce_or".split()
)


class Residual:
    """Tells which leaves of a VJP are kept, and rebuilds the others.

    vjp_of: (at_hand, hidden) -> VJP, traced once to see what depends on what.
    """

    def __init__(self, vjp_of: Callable[[PyTree, PyTree], Callable], at_hand: PyTree, hidden: PyTree):
        traced, shapes = jax.make_jaxpr(vjp_of, return_shape=True)(at_hand, hidden)
        self._tree, self._program = jax.tree.structure(shapes), inlined(traced)
        self._num_at_hand = len(jax.tree.leaves(at_hand))
        lasting = self._lasting()
        self._leaves = self._program.jaxpr.outvars
        kept = [not isinstance(var, Literal) and var in lasting for var in self._leaves]
        self._kept = list(dict.fromkeys(var for var, keep in zip(self._leaves, kept, strict=True) if keep))
        again = [var for var, keep in zip(self._leaves, kept, strict=True) if not keep]
        self._eqns = needed(self._program.jaxpr.eqns, again)

    def kept(self, vjp: Callable) -> list:
        """Returns the leaves to keep of a VJP that the same function gave."""
        values = dict(zip(self._names(), jax.tree.leaves(vjp), strict=True))
        return [values[var] for var in self._kept]

    def rebuilt(self, kept: list, at_hand: PyTree) -> Callable:
        """Rebuilds the VJP."""
        jaxpr = self._program.jaxpr
        env = dict(zip(jaxpr.invars, jax.tree.leaves(at_hand), strict=False))
        env |= dict(zip(self._kept, kept, strict=True))
        constants = dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        return jax.tree.unflatten(self._tree, evaluate(self._eqns, env, constants, self._leaves))

    def _names(self) -> list:
        """Returns the leaves as keys of a dict; a literal has no hash."""
        return [id(var) if isinstance(var, Literal) else var for var in self._leaves]

    def _lasting(self) -> set:
        """Returns the variables that depend on hidden, or on work that is not cheap."""
        jaxpr = self._program.jaxpr
        lasting = set(jaxpr.invars[self._num_at_hand :])
        for eqn in jaxpr.eqns:
            reads = any(not isinstance(var, Literal) and var in lasting for var in eqn.invars)
            if reads or eqn.primitive.name not in _CHEAP:
                lasting |= set(eqn.outvars)
        return lasting
