"""Forward and backward of a `Pipelined` model on one stage: each layer's gradients are added as soon as they exist.

Equals `accumulate` of the model as one loss function. Autodiff of that makes the gradients of all layers of a
microbatch before the first of them is added: one more array the size of the parameters, filled with zeros, written
and read again in every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.loss import as_loss_output
from jaxfb.forward_backward.sequential import num_layers, with_layers
from jaxfb.forward_backward.slot import Slot
from jaxfb.forward_backward.stage import Given, Layers, Stage, Target
from jaxfb.types import LossOutput, Pipelined, outer_params

PyTree = Any


@dataclass(frozen=True)
class InPlace:
    """One stage of all layers between the model's embedding and head.

    bring_outer: makes whole parameters beside the layers out of shards, once a microbatch (FSDP).
    """

    model: Pipelined
    stage: Stage
    bring_outer: Callable[[PyTree], PyTree]

    def takes(self, params: PyTree, microbatches: PyTree, keys: jax.Array | None) -> bool:
        """Whether there is something to add up, and all of hidden has a cotangent: integers have none to carry."""
        if jax.tree.leaves(microbatches)[0].shape[0] == 1:
            return False
        hidden = jax.eval_shape(self._embed, params, *_first(microbatches, keys))
        return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(hidden))

    def run(
        self,
        params: PyTree,
        microbatches: PyTree,
        keys: jax.Array | None,
        seeds: dict,
        accum_dtypes: PyTree,
    ) -> tuple[PyTree, LossOutput]:
        """As `accumulate`: gradients of this replica's rows, seeded and summed; and every microbatch's LossOutput."""

        def step(carry, inputs):
            (grads, kept), (microbatch, row_keys, seed) = carry, inputs
            return self._microbatch(params, grads, kept, Given(microbatch, row_keys), seed)

        zeros = jax.tree.map(lambda leaf, dtype: jnp.zeros(leaf.shape, dtype), params, accum_dtypes)
        kept = self._empty(params, *_first(microbatches, keys))
        (grads, _), out = lax.scan(step, (zeros, kept), (microbatches, keys, seeds))
        return grads, out

    def _microbatch(self, params, grads, kept, given: Given, seeds: dict):
        layers, slot = _layers_of(params), Slot(kept, jnp.int32(0))
        outer, to_shards = jax.vjp(self.bring_outer, outer_params(params))
        with jax.named_scope("forward"):
            with jax.named_scope("embed"):
                hidden, embed_vjp = jax.vjp(lambda o: self.model.embed(o, *given), outer)
            with jax.named_scope("layers"):
                hidden, of_layers, slot = self.stage.forward(layers, hidden, given, slot)
            with jax.named_scope("head"):
                totals, head_vjp, out = jax.vjp(lambda *a: self._head(*a, given), outer, hidden, has_aux=True)
        with jax.named_scope("backward"):
            with jax.named_scope("head"):
                outer_grads, cotangent = head_vjp(_seeded(totals, seeds))
            with jax.named_scope("layers"):
                totals = {name: term.total for name, term in of_layers.terms.items()}
                target = Target(
                    jax.tree.map(lambda leaf: leaf[None], grads["layers"]), jnp.int32(0), jnp.bool_(True)
                )
                sums, cotangent = self.stage.backward(
                    layers, slot, cotangent, _seeded(totals, seeds), given, target
                )
            with jax.named_scope("embed"):
                outer_grads = jax.tree.map(jnp.add, outer_grads, *embed_vjp(cotangent))
            (outer_grads,) = to_shards(outer_grads)
        with jax.named_scope("accumulate"):
            outer_sums = jax.tree.map(_add, outer_params(grads), outer_grads)
        grads = outer_sums | {"layers": jax.tree.map(lambda leaf: leaf[0], sums)}
        return (grads, slot.buffers), with_layers(out, of_layers)

    def _embed(self, params, microbatch, keys):
        return self.model.embed(self.bring_outer(outer_params(params)), microbatch, keys)

    def _head(self, outer, hidden, given: Given) -> tuple[dict, LossOutput]:
        out = as_loss_output(self.model.head(outer, hidden, *given))
        return {name: term.total for name, term in out.terms.items()}, out

    def _empty(self, params, microbatch, keys) -> PyTree:
        """Zeros for what the layers keep of one microbatch, [1, l, ...]."""
        hidden = jax.eval_shape(self._embed, params, microbatch, keys)
        layers = jax.eval_shape(_layers_of, params)
        shapes = self.stage.residual(layers, hidden, Given(microbatch, keys))
        return jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), shapes)


def _layers_of(params: PyTree) -> Layers:
    number = num_layers(params)
    return Layers(params["layers"], jnp.arange(number), jnp.ones(number, bool))


def _first(microbatches: PyTree, keys: jax.Array | None) -> tuple[PyTree, jax.Array | None]:
    """Shapes of one microbatch and its keys."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (microbatches, keys))


def _seeded(totals: dict, seeds: dict) -> dict:
    return {name: seeds[name].astype(total.dtype) for name, total in totals.items()}


def _add(sum_: jax.Array, grad: jax.Array) -> jax.Array:
    return sum_ + grad.astype(sum_.dtype)
