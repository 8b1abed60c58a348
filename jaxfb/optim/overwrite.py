"""An optax update that overwrites the optimizer's state where it is. Part of "one update".

The updates are computed from the moments that are kept, which are the new ones wherever the updates count. Were both
computed from the old moments, nothing would say which comes first: XLA for CPU, whose fusions have one output each,
then copies all moments before the loop over microbatches, lest one be overwritten before its last reader.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxfb.compat import evaluate
from jaxfb.types import PyTree


def overwrite(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    applied: jax.Array,
    **extra_args,
) -> tuple[PyTree, PyTree, PyTree]:
    """`optimizer.update` where applied, bool[]; elsewhere the state stays, bit for bit, and the updates mean nothing.

    Returns:
      (updates, the state that is kept, the state for what it says of this update, such as its learning rate, whose
      scalars are the new ones even where nothing is applied).
    """
    update = optax.with_extra_args_support(optimizer).update
    arguments = (grads, state, params, extra_args)
    traced, shape = jax.make_jaxpr(lambda g, s, p, extra: update(g, s, p, **extra), return_shape=True)(
        *arguments
    )
    jaxpr, (updates, after) = traced.jaxpr, map(jax.tree.structure, shape)
    old = list(zip(jaxpr.outvars[updates.num_leaves :], jax.tree.leaves(state), strict=True))
    moments = {id(var): leaf for var, leaf in old if jnp.ndim(leaf) > 0}

    def keep(var, value):
        return jnp.where(applied, value, moments[id(var)]) if id(var) in moments else value

    env = dict(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    made = evaluate(jaxpr.eqns, env, constants, jaxpr.outvars, seen=keep)
    said = made[updates.num_leaves :]
    kept = [
        new if moments.get(id(var)) is leaf else jnp.where(applied, new, leaf)
        for (var, leaf), new in zip(old, said, strict=True)
    ]
    return updates.unflatten(made[: updates.num_leaves]), after.unflatten(kept), after.unflatten(said)
