"""Finds the layer in which the first value that is not finite appears, in the forward pass or in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.loss_function.loss import as_loss_output
from jaxfb.forward_backward.sequential import layer_keys, layer_output, num_layers
from jaxfb.types import LossOutput, Pipelined, outer_params

PyTree = Any


@dataclass(frozen=True)
class Place:
    """The place where a value that is not finite appears first.

    part: "embed", "layer" or "head". layer: its number from 0, None elsewhere. backward: in the gradient of what that
    part returns, all values of the forward pass being finite.
    """

    part: str
    layer: int | None = None
    backward: bool = False

    def __str__(self) -> str:
        name = self.part if self.layer is None else f"layer {self.layer}"
        return f"the gradient of what {name} returns" if self.backward else f"what {name} returns"


def first_nonfinite(model: Pipelined, params: PyTree, microbatch: PyTree, keys: Any = None) -> Place | None:
    """Returns the first place, in the order of computation, with a nan or an inf; None if there is none.

    Args:
      model: embed, layers, head, run without a pipeline. params: in the dtype of computing, sharded in any way.
      microbatch: leaves [rows, ...]. keys: one PRNG key a row, or None without dropout.
    """
    embed, layers, head, backward = jax.device_get(_flags(model, params, microbatch, keys))
    if not embed:
        return Place("embed")
    if not layers.all():
        return Place("layer", int(layers.argmin()))
    if not head:
        return Place("head")
    if backward.all():
        return None
    # index 0 is what embed returns, index n what layer n - 1 does; the backward pass comes to the last one first
    last = int((~backward).nonzero()[0].max())
    return Place("embed", None, True) if last == 0 else Place("layer", last - 1, True)


def _flags(model: Pipelined, params: PyTree, microbatch: PyTree, keys: Any) -> tuple:
    """Returns bools, which values are finite: embed's, each layer's, the head's, and the gradients of each hidden.

    Shapes: [], [layers], [], [layers + 1].
    """

    @jax.jit
    def run(params, microbatch, keys):
        outer = outer_params(params)
        embedded = model.embed(outer, microbatch, keys)
        zeros = jax.tree.map(lambda leaf: jnp.zeros((num_layers(params), *leaf.shape), leaf.dtype), embedded)

        def after(embedded, added):
            def step(hidden, inputs):
                index, weights, more = inputs
                hidden, _ = layer_output(model.layer(weights, hidden, microbatch, layer_keys(keys, index)))
                return jax.tree.map(jnp.add, hidden, more), _is_finite(hidden)

            numbers = jnp.arange(num_layers(params))
            hidden, layers = lax.scan(step, embedded, (numbers, params["layers"], added))
            out = as_loss_output(model.head(outer, hidden, microbatch, keys))
            return _objective(out), (layers, _is_finite(out.terms))

        gradients, (layers, head) = jax.grad(after, argnums=(0, 1), has_aux=True, allow_int=True)(
            embedded, zeros
        )
        of_layers = jax.vmap(_is_finite)(gradients[1])
        backward = jnp.concatenate([_is_finite(gradients[0])[None], of_layers])
        return _is_finite(embedded), layers, head, backward

    return run(params, microbatch, keys)


def _objective(out: LossOutput) -> jax.Array:
    """Returns the terms divided by their weights, as a global batch of this one microbatch would be."""
    values = (term.value.astype(jnp.float32) for term in out.terms.values())
    return sum(values)  # pyright: ignore[reportReturnType]  # there is at least one term


def _is_finite(tree: PyTree) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
