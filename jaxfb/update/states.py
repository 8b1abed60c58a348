"""Decides where the state of a train step lives: how leaves are cut over the mesh, in which order layers are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward import ForwardBackward
from jaxfb.forward_backward.arguments import check_params
from jaxfb.forward_backward.sequential import num_layers
from jaxfb.parallel.annotations import tensor_specs, warn_if_whole
from jaxfb.parallel.host_memory import on_host, put_back
from jaxfb.parallel.layers.order import LayerOrder
from jaxfb.parallel.set_mesh import on_its_mesh
from jaxfb.parallel.sharding import abstract, cut_over_pipe, moment_specs, shardings
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused, boolean, instance
from jaxfb.types import LossFn, Pipelined, PyTree
from jaxfb.update.apply import Update
from jaxfb.update.arguments import (
    check_alive,
    check_changed_gradients,
    check_init_function,
    check_state,
    one_key,
)
from jaxfb.update.pipeline_state import PipelineState, closed, in_model_order, in_pipeline_order, opened
from jaxfb.update.train_state import TrainState, is_init_function


class StepStates:
    """A train step's methods that make states, and that move states to where it keeps them.

    forward_backward: the engine; it learns from the first parameters how they are cut over "tensor", if they are
      annotated.
    layer_order:      "pipeline" or "model", as for `make_train_step`.
    optimizer_memory: "device" or "host", as for `make_train_step`.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        model: LossFn | Pipelined,
        plan: BatchPlan,
        update: Update,
        layer_order: str,
        optimizer_memory: str,
    ):
        self.forward_backward, self.model, self.plan = forward_backward, model, plan
        self._change, self._layer_order, self._optimizer_memory = update, layer_order, optimizer_memory
        self._own_specs, self._looked = None, False

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of the states."""
        return self.forward_backward.mesh

    def _compile(self) -> None:
        """Forgets what was traced, and where states live."""
        self._shardings: dict = {}
        self._copied = jax.jit(self._create)

    @on_its_mesh
    def init(
        self,
        params: PyTree | Callable[[jax.Array], PyTree],
        rng: int | jax.Array = 0,
        *,
        donate: bool = False,
    ) -> TrainState:
        """Returns a fresh state on the mesh, whose arrays are its own: `params` stay the caller's.

        Args:
          params: the parameters, any pytree of float arrays; a model that can be called, such as an Equinox module, is
            one. Or a function key -> parameters (see `is_init_function`), which is then run sharded, so that no device
            ever holds them whole.
          rng: a seed, or a PRNG key.
          donate: the state takes over the arrays of `params`, which must not be used again: there is no second copy.

        Raises:
          ValueError: a leaf is not a float array, or is one that Flax does not keep as a parameter.
        """
        key = one_key(rng)
        if is_init_function(params):
            check_init_function(params)
            create = self._creator(params)
            shapes = jax.eval_shape(create, key)
            self._look_at(shapes.params, concrete=False)
            return self._donated(jax.jit(create, out_shardings=self.state_shardings(shapes))(key))
        self._look_at(params)
        donated = (0,) if boolean("donate", donate) else ()
        if donate:
            _check_apart(params)
        mesh = self.forward_backward.mesh
        places = shardings(self.forward_backward.param_specs(self.model, params), mesh)
        if jax.process_count() > 1:  # device_put does not reach devices of other processes; a jit does
            shapes = jax.eval_shape(self._create, params, key)
            made = jax.jit(self._create, out_shardings=self.state_shardings(shapes), donate_argnums=donated)
            state = made(jax.tree.map(_on_the_host, params), key)
        else:
            create = jax.jit(self._create, donate_argnums=donated) if donate else self._copied
            state = create(*jax.device_put((params, key), (places, NamedSharding(mesh, P()))))
        # on CPU devices an array of the host is read where it lies: the caller may change it as soon as this returns
        return self._donated(jax.block_until_ready(state))

    def abstract_state(self, params: Callable[[jax.Array], PyTree]) -> TrainState:
        """Returns what `init` would return for a function key -> parameters, as shapes, dtypes and shardings.

        Raises:
          ValueError: `params` is not such a function, or a leaf that it makes is not a float array.
        """
        check_init_function(params)
        shapes = jax.eval_shape(self._creator(params), jax.random.key(0))
        return abstract(shapes, self.state_shardings(shapes))

    def _creator(self, params: Callable[[jax.Array], PyTree]) -> Callable[[jax.Array], TrainState]:
        def create(key):
            return self._new_state(params(jax.random.fold_in(key, 0)), key)

        return create

    def _new_state(self, params: PyTree, key: jax.Array) -> TrainState:
        options = (self._change.loss_scale, self.forward_backward.options.trainable)
        return TrainState.create(params, self._change.optimizer, key, *options)

    @on_its_mesh
    def place(self, state: TrainState) -> TrainState:
        """Returns the state moved to where this step keeps it; nothing happens to what is there already.

        Raises:
          ValueError: it is not a TrainState, or a step has overwritten it.
        """
        return self._as_stored(self._placed(state))

    def _donated(self, state: TrainState) -> TrainState:
        """Returns what `place` returns; the state that is given is overwritten."""
        placed = self._placed(state)
        order = None if is_traced(placed) else self._order_of(placed)
        if order is None or isinstance(placed, PipelineState):
            return placed
        return self._in_order(placed, order, donate=True)

    def _placed(self, state: TrainState) -> TrainState:
        """Returns the state on this step's mesh, its layers in the order that they have or, if that is another
        step's, in the model's.
        """
        instance("state", state, TrainState, "a jaxfb.TrainState, such as init(params) returns")
        if is_traced(state):
            return state
        check_alive(state)
        stored, order = opened(state)
        if order is not None and order != self._order_of(state):
            stored, order = in_model_order(state), None
        return self._moved(closed(stored, order))

    def _in_order(self, state: TrainState, order: LayerOrder, donate: bool) -> TrainState:
        """Returns a state in the order in which this step stores layers, from one in the model's order."""
        moved = in_pipeline_order(state, order, donate)
        return moved if order.layout.even else jax.device_put(moved, self.state_shardings(moved))

    def _moved(self, state: TrainState) -> TrainState:
        """Returns a state on this step's mesh in the order that it has."""
        leaves, structure = jax.tree.flatten(state)
        shapes = (structure, tuple(jnp.shape(leaf) for leaf in leaves))
        if shapes not in self._shardings:
            stored = opened(state)[0]
            self._look_at(stored.params)
            check_state(stored, self._change.optimizer, self._change.loss_scale)
            if self._change.change_gradients is not None:
                fb = self.forward_backward
                trained, dtypes = fb.trained(stored.params), fb.grad_dtypes(stored.params)
                check_changed_gradients(self._change.change_gradients, stored, trained, dtypes)
            self._shardings[shapes] = self.state_shardings(state)
        targets = self._shardings[shapes]
        if all(
            getattr(x, "sharding", None) == y for x, y in zip(leaves, jax.tree.leaves(targets), strict=True)
        ):
            return state
        return jax.device_put(state, targets)

    def _as_stored(self, state: TrainState) -> TrainState:
        """Returns a (possibly abstract) state in the order in which this step stores layers."""
        instance("state", state, TrainState, "a jaxfb.TrainState, such as init(params) returns")
        if isinstance(state, PipelineState) or is_traced(state):
            return state
        order = self._order_of(state)
        if order is None:
            return state
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            moved = in_pipeline_order(state, order, donate=False)
            return abstract(moved, self.state_shardings(moved))
        return self._in_order(state, order, donate=False)

    def _order_of(self, state: TrainState) -> LayerOrder | None:
        """Returns the order in which this step stores the layers of a state; None: the model's."""
        if self._layer_order == "model" or self.forward_backward.pipe == 1:
            return None
        stored, order = opened(state)
        number = num_layers(stored.params) if order is None else order.layout.num_layers
        return self.forward_backward.order_of_layers(number, self.plan)

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns NamedShardings of a (possibly abstract) state: params over fsdp, expert, context and tensor, moments
        as the gradients.
        """
        fb, (stored, order) = self.forward_backward, opened(state)
        if order is not None:
            fb = replace(fb, options=replace(fb.options, layer_order="pipeline"))
        params, grads = fb.param_specs(self.model, stored.params), fb.grad_specs(self.model, stored.params)
        if order is None and (other := self._order_of(state)) is not None and not other.layout.even:
            # until they are moved; the engine would have all layers on each device
            params, grads = (cut_over_pipe(specs, stored.params, fb.mesh) for specs in (params, grads))
        moments = moment_specs(stored.opt_state, fb.trained(stored.params), grads)
        specs = replace(jax.tree.map(lambda _: P(), stored), params=params, opt_state=moments)
        places = shardings(specs, fb.mesh)
        if self._optimizer_memory == "host":
            places = replace(places, opt_state=on_host(places.opt_state, stored.opt_state))
        return closed(places, order)

    def _look_at(self, params: PyTree, concrete: bool = True) -> None:
        """Checks parameters and takes over how they are cut over "tensor", which they do not tell while traced."""
        fb = self.forward_backward
        check_params(params, False, concrete, fb.options.trainable)
        pipelined = isinstance(self.model, Pipelined)
        asked = fb.options.param_specs if self._own_specs is None else None
        if not asked and not (pipelined and self.model.param_specs):
            found = tensor_specs(params, fb.mesh, stacked=pipelined)
            if found is not None and found != self._own_specs:
                self._own_specs = found
                self.forward_backward = fb = replace(
                    fb, options=replace(fb.options, param_specs=lambda params: found)
                )
                self._compile()
        if not self._looked:
            self._looked = True
            warn_if_whole(fb.param_specs(self.model, params), fb.mesh)

    def _create(self, params: PyTree, key: jax.Array) -> TrainState:
        """Makes a fresh state of copies: it will be donated, and where `device_put` moved nothing the arrays are the
        caller's.
        """
        state = self._new_state(jax.tree.map(jnp.copy, params), key)
        return put_back(state, self.state_shardings(state))


def _on_the_host(leaf: jax.Array) -> Any:
    """Returns an array that one process has for itself as numpy, which any jit takes; others as they are."""
    return np.asarray(leaf) if getattr(leaf, "is_fully_addressable", True) else leaf


def _check_apart(params: PyTree) -> None:
    """Raises ValueError where one array stands at two places of parameters that are to be donated."""
    names: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if (first := names.setdefault(id(leaf), name)) != name:
            raise Refused(
                f"donate=True takes over each array once, but {first} and {name} are the same array; copy one of them, "
                "or use donate=False",
                [{"donate": False}],
            )
