"""A train state whose layers are stored where a pipeline's devices use them, and which is read like any other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import jax

from jaxfb.parallel.layers.order import LayerOrder
from jaxfb.types import Counted, PyTree
from jaxfb.update.train_state import TrainState


class PipelineState(TrainState):
    """A `TrainState` that stores its layers in the order in which the devices of a pipeline hold them.

    `params` and `opt_state` are in the model's order. They are made when they are read, which moves layers between
    devices, so every process of a job has to read them. `dataclasses.replace` makes a plain TrainState, in the model's
    order. As a pytree it consists of the arrays that are stored, under the names of a TrainState.

    stored: a TrainState in the pipeline's order. order: the way from there to the model's order.
    """

    stored: TrainState
    order: LayerOrder

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Makes a plain state, for `dataclasses.replace`."""
        return TrainState(*args, **fields)

    @classmethod
    def of(cls, stored: TrainState, order: LayerOrder) -> PipelineState:
        """Returns the state whose layers are in that order already."""
        self = object.__new__(cls)
        rest = {name: value for name, value in vars(stored).items() if name not in ("params", "opt_state")}
        vars(self).update(rest, stored=stored, order=order)
        return self

    @property
    def params(self) -> PyTree:
        """Returns the parameters in the model's order."""
        return self.order.to_model(self.stored.params)

    @property
    def opt_state(self) -> PyTree:
        """Returns the optimizer's state in the model's order."""
        return self.order.moments(self.stored.opt_state, self.stored.params, back=True)

    def __repr__(self) -> str:
        return f"PipelineState({self.stored!r})"


def opened(state: TrainState) -> tuple[TrainState, LayerOrder | None]:
    """Returns the arrays of a state as they are stored, and their order; None: the model's."""
    return (state.stored, state.order) if isinstance(state, PipelineState) else (state, None)


def shapes_of_params(state: TrainState) -> PyTree:
    """Returns the shapes and dtypes of a state's parameters in the model's order, without moving any."""
    stored, order = opened(state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored.params)
    return shapes if order is None else order.to_model(shapes)


def closed(stored: TrainState, order: LayerOrder | None) -> TrainState:
    """Returns the state of arrays that are stored in an order."""
    return stored if order is None else PipelineState.of(stored, order)


def in_model_order(state: TrainState, donate: bool = False) -> TrainState:
    """Returns the state with its layers in the model's order, as a checkpoint contains them.

    donate: the arrays are overwritten one after the other, so that there is never a second copy of the state.
    """
    stored, order = opened(state)
    if order is None:
        return state
    opt_state = order.moments(stored.opt_state, stored.params, back=True, donate=donate)
    return replace(stored, params=order.to_model(stored.params, donate), opt_state=opt_state)


def as_saved(tree: PyTree) -> PyTree:
    """Returns a pytree in which every state, abstract ones too, has its layers in the model's order."""
    is_state = lambda node: isinstance(node, PipelineState)  # noqa: E731
    return jax.tree.map(lambda node: in_model_order(node) if is_state(node) else node, tree, is_leaf=is_state)


def in_pipeline_order(state: TrainState, order: LayerOrder, donate: bool) -> PipelineState:
    """Returns a state with its layers in that order, from one in the model's; donate: as for `in_model_order`."""
    opt_state = order.moments(state.opt_state, state.params, back=False, donate=donate)
    params = order.to_pipeline(state.params, donate)
    return PipelineState.of(replace(state, params=params, opt_state=opt_state), order)


def counted_in(order: LayerOrder | None, counted: Counted | None) -> Counted | None:
    """Returns the counted leaves of parameters whose layers are in that order; the function sees the model's."""
    if order is None or counted is None or counted.after is None:
        return counted
    after = counted.after

    def of_pipeline(params: PyTree, metrics: dict) -> PyTree:
        changed = order.to_pipeline(after(order.to_model(params), metrics))
        # the others did not change, and taken from `changed` they would go to the model's order and back
        return jax.tree.map(
            lambda mine, new, old: new if mine else old, counted.leaves(params), changed, params
        )

    return replace(counted, after=of_pipeline)


def _flatten(state: PipelineState) -> tuple[list, LayerOrder]:
    stored = [(jax.tree_util.GetAttrKey(one.name), getattr(state.stored, one.name)) for one in FIELDS]
    return stored, state.order


def _unflatten(order: LayerOrder, values: Iterable) -> PipelineState:
    names = (one.name for one in FIELDS)
    return PipelineState.of(TrainState(**dict(zip(names, values, strict=True))), order)


FIELDS = fields(TrainState)
jax.tree_util.register_pytree_with_keys(PipelineState, _flatten, _unflatten)
