"""The usual JAX pipeline, to compare with: stages in `shard_map`, a scan over ticks, the backward by autodiff.

What MaxText and praxis do in essence: activations of all microbatches wait for the one backward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.sequential import outer_params


def gpipe_by_autodiff(model, mesh, remat: bool):
    """(params, batch [num_microbatches, rows, ...]) -> (loss, gradients), layers cut over pipe, no dropout.

    remat: every layer keeps its input alone. The head always keeps its input alone, microbatch by microbatch.
    """
    pipe = mesh.shape["pipe"]
    layer = jax.checkpoint(_layer(model), prevent_cse=False) if remat else _layer(model)

    def loss(params, batch):
        me, count = lax.axis_index("pipe"), len(jax.tree.leaves(batch)[0])
        at = lambda m: jax.tree.map(lambda leaf: leaf[jnp.clip(m, 0, count - 1)], batch)  # noqa: E731
        outer = outer_params(params)

        def tick(hidden, t):
            hidden = jnp.where(me == 0, model.embed(outer, at(t), None), hidden)
            hidden, _ = lax.scan(
                lambda h, weights: (layer(weights, h, at(t - me)), None), hidden, params["layers"]
            )
            return lax.ppermute(hidden, "pipe", [(d, (d + 1) % pipe) for d in range(pipe)]), hidden

        start = jnp.zeros_like(model.embed(outer, at(0), None))
        _, hidden = lax.scan(tick, start, jnp.arange(count + pipe - 1))

        def head(total, given):
            (term,) = jax.checkpoint(lambda o, h, m: model.head(o, h, m, None).terms)(outer, *given).values()
            return (total[0] + term.total, total[1] + term.weight), None

        (total, weight), _ = lax.scan(head, (jnp.float32(0), jnp.float32(0)), (hidden[pipe - 1 :], batch))
        return jnp.where(me == pipe - 1, total / weight, 0)

    def body(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        shared = jax.tree.map(lambda leaf: lax.psum(leaf, "pipe"), (value, outer_params(grads)))
        return shared[0], shared[1] | {"layers": grads["layers"]}

    def call(params, batch):
        specs = {name: jax.tree.map(lambda _: P(), value) for name, value in params.items()}
        specs["layers"] = jax.tree.map(lambda _: P("pipe"), params["layers"])
        return jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=False)(
            params, batch
        )

    return call


def _layer(model):
    return lambda weights, hidden, microbatch: model.layer(weights, hidden, microbatch, None)
