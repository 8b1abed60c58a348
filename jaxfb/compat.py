"""The one place that touches JAX names which are not part of its stable surface. Tested on both ends of the range."""

from __future__ import annotations

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
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
