"""Makes the direction of Adafactor, of optax's parts, with every layer of a stacked leaf for itself.

optax factors the two largest dims of a leaf. In a stacked one [num_layers, ...] these may be the layers and another,
and one layer's second moments would then be estimated from the gradients of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfb.optim.leaves import stacked
from jaxfb.types import PyTree


def adafactor(
    decay_rate=0.8, clipping_threshold=1.0, scale_by_parameter=True, min_dim_size_to_factor=128, eps=1e-30
):
    """Returns the direction of Adafactor; see `make_optimizer`."""
    factored = optax.scale_by_factored_rms(
        decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor, epsilon=eps
    )
    clip = optax.identity() if clipping_threshold is None else optax.clip_by_block_rms(clipping_threshold)
    scale = optax.scale_by_param_block_rms() if scale_by_parameter else optax.identity()
    return optax.chain(_factored_per_layer(factored), _per_layer(clip), _per_layer(scale))


class _OfLeaf(NamedTuple):
    """An update of a leaf and its averages of squared gradients: over columns, over rows, or of each number."""

    update: Any
    row: Any
    column: Any
    each: Any


def _factored_per_layer(of_leaf: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `optax.scale_by_factored_rms`, with a state of its kind, to every layer of a stacked leaf by itself."""

    def init(params):
        def one(param, in_stack):
            make: Any = of_leaf.init
            if in_stack:
                make = jax.vmap(make, out_axes=_averages(None, *_axes_of_layers(of_leaf, param)))
            return _OfLeaf(None, *make(param)[1:])

        return _state(jnp.zeros([], jnp.int32), jax.tree.map(one, params, stacked(params)))

    def update(updates, state: Any, params: Any = None):
        def one(grad, row, column, each, param, in_stack):
            def apply(grad, row, column, each, param):
                after: Any
                new, after = of_leaf.update(grad, _averages(state.count, row, column, each), param)
                return _OfLeaf(new, *after[1:])

            if in_stack:
                axes = _axes_of_layers(of_leaf, param)
                apply = jax.vmap(apply, in_axes=(0, *axes, 0), out_axes=_OfLeaf(0, *axes))
            return apply(grad, row, column, each, param)

        found = jax.tree.map(one, updates, *state[1:], params, stacked(params))
        return _field(found, "update"), _state(optax.safe_increment(state.count), found)

    return optax.GradientTransformation(init, update)


def _axes_of_layers(of_leaf: optax.GradientTransformation, param: jax.Array) -> tuple[int | None, ...]:
    """Returns in which dim of row, column and each the layers are; None: it is not used, and has no layers."""
    layer = jax.ShapeDtypeStruct(param.shape[1:], param.dtype)
    of_layer: Any = jax.eval_shape(of_leaf.init, layer)
    is_factored = of_layer.v.shape != layer.shape
    return (0, 0, None) if is_factored else (None, None, 0)


def _state(count: Any, found: PyTree) -> optax.FactoredState:
    return _averages(count, *(_field(found, name) for name in _OfLeaf._fields[1:]))


def _averages(count: Any, row: Any, column: Any, each: Any) -> optax.FactoredState:
    return optax.FactoredState(count, row, column, each)


def _field(found: PyTree, name: str) -> PyTree:
    return jax.tree.map(
        lambda leaf: getattr(leaf, name), found, is_leaf=lambda node: isinstance(node, _OfLeaf)
    )


def _per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a stateless leafwise transformation to every layer of a stacked leaf by itself."""

    def apply(update, param):
        return transform.update(update, optax.EmptyState(), param)[0]

    def one(update, param, in_stack):
        return (jax.vmap(apply) if in_stack else apply)(update, param)

    return optax.stateless(lambda updates, params: jax.tree.map(one, updates, params, stacked(params)))
