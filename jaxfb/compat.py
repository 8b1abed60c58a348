"""The one place that touches JAX names which are not part of its stable surface. Tested on both ends of the range."""

from __future__ import annotations

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr


def prune(closed: ClosedJaxpr, used_outputs: list[bool]):
    """Cuts a traced function down to some of its outputs.

    Returns (function over the inputs that remain, list of bool: which inputs those are). The dead part is
    gone from the program, collectives and all, and not just left for the compiler to find.
    """
    jaxpr, used_inputs = dce_jaxpr(closed.jaxpr, used_outputs)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), used_inputs


def is_traced(tree) -> bool:
    """Whether any leaf is an abstract value of a function being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {"remat2": "jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_CALLS |= {"custom_vjp_call": "call_jaxpr"}


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with calls (jit, remat, custom derivatives) written out, so that it can be cut at equations.

    For programs that are not differentiated any more.
    """

    def run(*leaves):
        jaxpr = closed.jaxpr
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return evaluate(
            jaxpr.eqns, dict(zip(jaxpr.invars, leaves, strict=True)), constants, jaxpr.outvars, True
        )

    return jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
    )


def evaluate(eqns: list, env: dict, constants: dict, outvars: list, inline: bool = False) -> list:
    """Runs equations on an environment Var -> value and returns the values of `outvars`."""
    env = {**constants, **env}
    read = lambda var: var.val if isinstance(var, Literal) else env[var]  # noqa: E731
    for eqn in eqns:
        values = [read(var) for var in eqn.invars]
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name)) if inline else None
        if inner is not None:
            jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            out = evaluate(
                jaxpr.eqns,
                dict(zip(jaxpr.invars, values, strict=True)),
                dict(zip(jaxpr.constvars, consts, strict=True)),
                jaxpr.outvars,
                True,
            )
        else:
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in outvars]
