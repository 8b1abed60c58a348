"""Keeps gradients in the dtype in which a layer's backward sums them, where it rounds them in its last step.

A gradient has the dtype of its parameter, bfloat16 where a layer is computed in that. But matrices of experts sum
theirs in float32 (`grouped_matmul.Kernels`), and the engine sums those of microbatches and devices in float32 as well.
Rounded in between they would lose bits, and be read and written once more: 0.5 of 15.6 s for a model like DeepSeek-V3
on v5p:8x8x8 (libtpu 0.0.48).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxfb.platforms.compat import evaluate, inlined
from jaxfb.types import PyTree


def unrounded(vjp: Callable, params: PyTree, cotangents: PyTree) -> Any:
    """Returns `vjp(cotangents)`, (gradients, *the rest), with gradients in the dtype that they are rounded from.

    params: those that the gradients are of.
    """
    if all(_bits(leaf) >= 32 for leaf in jax.tree.leaves(params)):
        return vjp(cotangents)
    traced, shapes = jax.make_jaxpr(vjp, return_shape=True)(cotangents)
    program = inlined(traced)
    jaxpr, number = program.jaxpr, len(jax.tree.leaves(shapes[0]))
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    wide = [_before_rounding(var, made) for var in jaxpr.outvars[:number]]
    if wide == jaxpr.outvars[:number]:
        return vjp(cotangents)  # not written out, for the program to be as it would be without this
    given = dict(zip(jaxpr.invars, jax.tree.leaves(cotangents), strict=True))
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    out = evaluate(jaxpr.eqns, given, constants, [*wide, *jaxpr.outvars[number:]])
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _before_rounding(var: Any, made: dict[Var, Any]) -> Any:
    """Returns the variable whose values this one rounds; itself, if it rounds none."""
    eqn = made.get(var) if isinstance(var, Var) else None
    if eqn is None or eqn.primitive.name != "convert_element_type":
        return var
    (before,) = eqn.invars
    rounds = jnp.issubdtype(before.aval.dtype, jnp.floating) and _bits(before.aval) > _bits(var.aval)
    return before if rounds else var


def _bits(leaf: Any) -> int:
    return jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.floating) else 64
