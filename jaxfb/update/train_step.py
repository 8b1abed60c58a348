"""Makes one optimizer update from one global batch. The file to read first after the README:

    batch -> forward_backward -> unscale -> finite? -> clip -> optax update (once) -> TrainState

Everything behind `forward_backward` sees whole arrays; XLA cuts them as parameters and optimizer state are cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward import ForwardBackward, Packed, get_forward_backward_func
from jaxfb.forward_backward.offered import counted_of
from jaxfb.forward_backward.options import ScheduledKeywords
from jaxfb.optim import of_trained
from jaxfb.optim.loss_scale import DynamicLossScale, StaticLossScale
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.host_memory import check_memory
from jaxfb.parallel.sharding import adopt
from jaxfb.platforms.compiler import per_options
from jaxfb.refusal import INT32, Refused, function, instance, integer
from jaxfb.types import LossFn, Pipelined
from jaxfb.update.apply import Update
from jaxfb.update.arguments import (
    check_gradients,
    check_limits,
    check_optimizer,
    check_options,
    check_rows,
    layer_order_of,
)
from jaxfb.update.pipeline_state import (
    closed,
    counted_in,
    opened,
    shapes_of_params,
)
from jaxfb.update.placement import StatePlacement
from jaxfb.update.streamed import streamed
from jaxfb.update.train_state import Limits, StepMetrics, TrainState

PyTree = Any


def make_train_step(
    model: LossFn | Pipelined,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    plan: BatchPlan,
    *,
    max_grad_norm: float | None = None,
    clip_convention: str = "exact",
    loss_scale: DynamicLossScale | StaticLossScale | None = None,
    dropout: bool = True,
    count_zeros: bool = False,
    change_gradients: Callable[[PyTree, TrainState], PyTree] | None = None,
    layer_order: str | None = None,
    optimizer_memory: str = "device",
    **forward_backward_options: Unpack[ScheduledKeywords],
) -> TrainStep:
    """Compiles `(TrainState, batch) -> (TrainState, StepMetrics)`; the state is donated.

    Args:
      model: `loss_fn(params, microbatch, rng)` or a `Pipelined`.
      optimizer: `make_optimizer(...)` or any optax transformation; applied once a call. One that takes extra arguments
        is given `value`, the loss, and `samples`, the rows of the updates before.
      plan: of purpose "train", or "critic" for a policy's value model; every batch has its rows.
      max_grad_norm: global norm to clip to; None does not clip.
      clip_convention: "exact" min(1, max/norm), "torch" min(1, max/(norm + 1e-6)).
      loss_scale: for float16; the loss itself is reported unscaled.
      dropout: False hands None to the model as rng; a plan that packs rows asks for that.
      count_zeros: fills in `StepMetrics.num_zeros`, at the price of another pass over the gradients.
      change_gradients: (gradients, state) -> gradients of the same shapes and dtypes, called after the gradients of the
        global batch are reduced, divided and unscaled, before they are measured and clipped: to scale some, to add
        noise. A frozen parameter's is None. It is traced, and may be called twice for an update.
      layer_order: "pipeline" stores the layers of the state in the order in which the devices of a pipeline hold them,
        so that an update moves none of them between devices; see `PipelineState`. The optimizer must then treat all
        layers alike: nothing it does to one may depend on its place among [num_layers, ...], and what it keeps of one
        must have the parameter's shape. "model" stores them in the model's order and moves them in every update. None:
        "pipeline" for `make_optimizer`'s adamw, lion, muon and sgd where nothing needs "model".
      optimizer_memory: "host" keeps the optimizer's state in the host's memory between updates and moves it through the
        devices during each; the numbers are those of "device", to rounding. With `make_optimizer`'s adamw, lion, muon
        and sgd, without functions of your own, and a `Pipelined`: one layer's at a time. Any other optimizer's state is
        whole on the devices during the update.
      forward_backward_options: as for `get_forward_backward_func`.

    Raises:
      ValueError: an option is illegal, model, mesh and plan do not fit together, or the devices reach no pinned memory
        of their host for optimizer_memory="host".
    """
    check_optimizer(optimizer)
    check_options(max_grad_norm, clip_convention, loss_scale, dropout=dropout, count_zeros=count_zeros)
    if change_gradients is not None:
        function("change_gradients", change_gradients, "from (gradients, state) to gradients")
    fb = get_forward_backward_func(mesh, **forward_backward_options)
    fb.check_plan(model, plan)
    if plan.packing and dropout:
        raise Refused(
            "[train] dropout=True with packing=True would depend on how rows are packed; pass dropout=False to "
            "make_train_step, or a plan with packing=False",
            [{"dropout": False}],
        )
    counted = counted_of(model)
    stores = layer_order_of(layer_order, optimizer, change_gradients, counted)
    options = (max_grad_norm, clip_convention, loss_scale, count_zeros, change_gradients)
    if fb.options.trainable is not None:
        optimizer = of_trained(optimizer, fb.trained)
    update = Update(optimizer, fb.trained, counted, *options)
    if check_memory(optimizer_memory, fb.mesh) == "host":
        update = streamed(update, model)
    return TrainStep(fb, model, plan, dropout, update, stores, optimizer_memory)


class TrainStep:
    """A compiled update, and where its state lives; made by `make_train_step`.

    check_program: is given the program of the first update, compiled, before it runs; what it raises ends the call, and
      the state is still the caller's.
    """

    check_program: Callable[[jax.stages.Compiled], None] | None = None

    def __init__(
        self,
        forward_backward: ForwardBackward,
        model: LossFn | Pipelined,
        plan: BatchPlan,
        dropout: bool,
        update: Update,
        layer_order: str = "model",
        optimizer_memory: str = "device",
    ):
        self.model, self.plan, self.optimizer = model, plan, update.optimizer
        self._dropout, self._change = dropout, update
        stores = layer_order, optimizer_memory
        self._placement = StatePlacement(forward_backward, model, plan, update, *stores, self._compile)
        self._numbers: dict[int, jax.Array] = {}
        self._compile()

    def _compile(self) -> None:
        """Forgets what was traced."""
        donating = {"donate_argnums": 0}
        self._updated = per_options(self._update, static_argnums=3, **donating)
        self._applied = per_options(self._apply_given, **donating)
        self._finished = per_options(self._apply, **donating)
        self._differentiated = per_options(self._give, static_argnums=(4, 5))
        self._differentiated_as_stored = per_options(self._differentiate, static_argnums=(4, 5))

    @property
    def forward_backward(self) -> ForwardBackward:
        """Returns the engine, which knows how parameters are cut over the mesh."""
        return self._placement.forward_backward

    def __call__(
        self, state: TrainState, batch: PyTree, rows: int | None = None, limits: Limits | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies one update. `state` is donated: use the one that comes back.

        batch: as the plan specifies; with a token budget [rows, ...] leaves on the host, or them as `Packed`.
        rows: how many of the batch's rows are real, if fewer than the plan's (a short last window).
        limits: beyond them the update is skipped, and the state that comes back is the same bits.

        Raises:
          ValueError: the state was given to a step before, batch or rows do not fit the plan, or limits are no numbers.
        """
        state, batch, plan, real_rows, bounds = self._checked(state, batch, rows, limits)
        if plan.max_context:
            out = self._differentiate(state, batch, None, None, self.model, plan)
            return self._finish(state, out, real_rows, bounds)
        return self._checked_first(self._jitted, state, batch, real_rows, plan, bounds)

    def timed(
        self, state: TrainState, batch: PyTree, rows: int | None = None, limits: Limits | None = None
    ) -> tuple[TrainState, StepMetrics, dict[str, float]]:
        """Applies one update as a call does, in two programs, and returns the seconds of each too.

        The numbers are those of a call, bit for bit; with optimizer_memory="host" to rounding. The host waits for the
        devices after each program and does nothing else meanwhile; the first call's seconds include compilation.

        Returns:
          The new state, its numbers, and name -> seconds of "forward_backward" and of "optimizer": whatever follows
          the gradients of the global batch.
        Raises:
          ValueError: as for a call.
        """
        state, batch, plan, real_rows, bounds = self._checked(state, batch, rows, limits)
        began = time.monotonic()
        arguments = (state, batch, None, None, self.model, plan)
        if plan.max_context:
            out = jax.block_until_ready(self._differentiate(*arguments))
        else:
            program = self._differentiated_as_stored(self._options)
            out = jax.block_until_ready(self._checked_first(program, *arguments))
        between = time.monotonic()
        new, metrics = jax.block_until_ready(self._finish(state, out, real_rows, bounds))
        return new, metrics, {"forward_backward": between - began, "optimizer": time.monotonic() - between}

    def _checked(self, state: TrainState, batch: PyTree, rows: int | None, limits: Limits | None) -> tuple:
        """Returns state, batch, the batch's plan, rows and limits as the programs take them."""
        plan = self.plan
        real_rows = plan.real_rows if rows is None else check_rows(rows, plan.real_rows)
        state = self._placement.taken(state)
        bounds = None if limits is None else self._everywhere(np.array(check_limits(limits), np.float32))
        if plan.max_context:  # each part of the batch has a program of its own, and a place on its devices
            return state, batch, plan, self._rows(real_rows), bounds
        if plan.by_tokens:
            packed = batch if isinstance(batch, Packed) else Packed(batch, plan)
            batch, plan = packed.batch, packed.plan
        batch = adopt(batch, NamedSharding(self.forward_backward.mesh, P()))
        return state, batch, plan, self._rows(real_rows), bounds

    def _checked_first(self, program: Any, *arguments: Any) -> Any:
        """Calls a program, the first one after `check_program` saw it compiled; the call finds it compiled then."""
        check, self.check_program = self.check_program, None
        if check is not None:
            check(program.lower(*arguments).compile())
        return program(*arguments)

    def _finish(
        self, state: TrainState, out: ForwardBackwardOutput, rows: jax.Array, bounds: jax.Array | None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies gradients whose layers are in the order in which the state stores them."""
        return self._finished(self._options)(state, self._to_apply(out), rows, bounds)

    def gradients(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        model: LossFn | Pipelined | None = None,
        plan: BatchPlan | None = None,
        first_row: int = 0,
        weights: dict[str, Any] | None = None,
    ) -> ForwardBackwardOutput:
        """Returns loss, gradients and records of one batch, and leaves the state as it is.

        The results of several calls are added, `g = a + b`, and applied in one update, `apply(state, g)`. One call and
        `apply` do, bit for bit, what a call of the step does; with optimizer_memory="host" to rounding.

        Args:
          batch: [rows, ...] leaves, as many rows as the plan has.
          model: another loss function or `Pipelined` over the same parameters; None: the step's.
          plan: for a batch of another size; None: the step's.
          first_row: the number of the batch's first row in the update, so that each row draws its own dropout.
          weights: what divides each term, where an update consists of several calls whose terms have different weights:
            the sum, name by name, of what `weights` returns for each of their batches.

        Raises:
          ValueError: as for a call of the step, or weights are not those of the terms.
        """
        state = self._placement.placed(state)
        model, cut, keys = self._of_call(state, model, plan, first_row)
        rows, packed = cut.real_rows, None
        if cut.max_context:
            out = self._give(state, batch, keys, weights, model, cut)
            return replace(out, origin=replace(out.origin, rows=rows, weights=weights))
        if cut.by_tokens:
            packed = Packed(batch, cut)
            batch, cut, keys = packed.batch, packed.plan, packed.keys(keys)
        everywhere = NamedSharding(self.forward_backward.mesh, P())
        run = self._differentiated(self._options)
        out = run(state, adopt(batch, everywhere), keys, weights, model, cut)
        outputs = out.outputs if packed is None else packed.restore(out.outputs)
        return replace(out, outputs=outputs, origin=replace(out.origin, rows=rows, weights=weights))

    def weights(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        model: LossFn | Pipelined | None = None,
        plan: BatchPlan | None = None,
        first_row: int = 0,
    ) -> dict[str, jax.Array]:
        """Returns what a batch counts for each term that has a weight, name -> []; arguments as for `gradients`."""
        state = opened(self._placement.placed(state))[0]  # weights depend on the data alone
        model, cut, keys = self._of_call(state, model, plan, first_row)
        keys = self.key_of(state) if keys is None else keys
        return self.forward_backward.weights(model, state.params, batch, cut, keys)

    def _of_call(
        self, state: TrainState, model: Any, plan: Any, first_row: int
    ) -> tuple[LossFn | Pipelined, BatchPlan, jax.Array | None]:
        """Returns the model and the plan of one call, and the keys of its rows unless they are the first."""
        model = self.model if model is None else model
        plan = instance("plan", self.plan if plan is None else plan, BatchPlan, "a jaxfb.BatchPlan")
        self.forward_backward.check_plan(model, plan)
        first_row = integer("first_row", first_row, least=0)
        key = self.key_of(state) if first_row else None
        keys = None if key is None else _keys_of_rows(key, first_row, plan.rows)
        return model, plan, keys

    def apply(
        self, state: TrainState, gradients: ForwardBackwardOutput, rows: int | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies one update by gradients that were computed before. `state` is donated, `gradients` are not.

        Args:
          gradients: what `gradients` or a forward_backward function returned for the state's parameters, or a sum.
          rows: how many rows they are of, if fewer than those of the plans.

        Raises:
          ValueError: the state was given to a step before, or the gradients are not like its parameters, or they do not
            consist of all calls whose weights divided them.
        """
        state = self._placement.taken(state)
        check_gradients(gradients, self.forward_backward.trained(shapes_of_params(state)))
        applied_rows = gradients.origin.rows if rows is None else check_rows(rows, INT32)
        out = self._to_apply(gradients)
        return self._applied(self._options)(state, out, self._rows(applied_rows))

    def _to_apply(self, gradients: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Returns of an output what an update needs, on the mesh."""
        out = adopt(replace(gradients, outputs=None), NamedSharding(self.forward_backward.mesh, P()))
        names = () if out.origin.normalize == "global" else out.terms
        used = {name: out.per_microbatch[name] for name in names}
        # a copy, because the scale may be the state's array, which is donated
        scale = jax.tree.map(jnp.copy, out.origin.grad_scale)
        origin = replace(out.origin, rows=None, weights=None, grad_scale=scale)
        return replace(out, per_microbatch=used, origin=origin)

    @property
    def _jitted(self):
        return self._updated(self._options)

    @property
    def _options(self):
        return self.forward_backward.compiler_options

    def _rows(self, rows: int | jax.Array) -> jax.Array:
        """Returns a number of rows on the mesh, moved there once, so that no later call moves anything."""
        if not isinstance(rows, int):
            return rows
        if rows not in self._numbers:
            self._numbers[rows] = self._everywhere(np.array(rows, np.int32))
        return self._numbers[rows]

    def _everywhere(self, numbers: np.ndarray) -> jax.Array:
        everywhere = NamedSharding(self.forward_backward.mesh, P())
        return jax.make_array_from_callback(numbers.shape, everywhere, lambda _: numbers)

    def lower(self, state: TrainState, batch: PyTree):
        """Lowers the step for these (abstract) arguments, for ahead-of-time compilation."""
        return self._jitted.lower(self._placement.as_stored(state), batch, self.plan.real_rows, self.plan)

    def trace(self, state: TrainState, batch: PyTree):
        """Traces the step for these arguments, which may live on an `AbstractMesh`; `.jaxpr` is its program."""
        return self._jitted.trace(self._placement.as_stored(state), batch, self.plan.real_rows, self.plan)

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
          ValueError: a leaf is no float array, or is one that Flax does not keep as a parameter.
        """
        return self._placement.init(params, rng, donate)

    def abstract_state(self, params: Callable[[jax.Array], PyTree]) -> TrainState:
        """Returns what `init` would return for a function key -> parameters, as shapes, dtypes and shardings."""
        return self._placement.abstract_state(params)

    def place(self, state: TrainState) -> TrainState:
        """Returns the state moved to where this step keeps it; nothing happens to what is there already.

        Raises:
          ValueError: it is no TrainState, or a step has overwritten it.
        """
        return self._placement.place(state)

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns NamedShardings of a (possibly abstract) state: params over fsdp, expert, context and tensor, moments
        as the gradients.
        """
        return self._placement.state_shardings(state)

    def _update(
        self, state: TrainState, batch: PyTree, rows: Any, plan: BatchPlan, limits: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        out = self._differentiate(state, batch, None, None, self.model, plan)
        return self._apply(state, out, rows, limits)

    def _differentiate(
        self, state: TrainState, batch: PyTree, keys: Any, weights: Any, model: Any, plan: BatchPlan
    ) -> ForwardBackwardOutput:
        """Returns loss and gradients, whose layers are in the order in which the state stores them."""
        stored, order = opened(state)
        fb, params = self.forward_backward, stored.params
        in_place = order is not None and order == fb.order_of_layers(order.layout.num_layers, plan)
        if in_place:
            fb = replace(fb, options=replace(fb.options, layer_order="pipeline"))
        elif order is not None:
            params = order.to_model(params)
        rng = self.key_of(stored) if keys is None else keys
        scale = 1.0 if stored.loss_scale is None else stored.loss_scale.scale
        out = fb(model, params, batch, plan, rng, grad_scale=scale, weights=weights)
        return out if in_place or order is None else replace(out, grads=order.to_pipeline(out.grads))

    def _give(self, state: TrainState, *call: Any) -> ForwardBackwardOutput:
        """Returns what `_differentiate` returns, with gradients in the model's order."""
        out, order = self._differentiate(state, *call), opened(state)[1]
        return out if order is None else replace(out, grads=order.to_model(out.grads))

    def _apply_given(
        self, state: TrainState, out: ForwardBackwardOutput, rows: Any
    ) -> tuple[TrainState, StepMetrics]:
        """Applies gradients in the model's order."""
        order = opened(state)[1]
        out = out if order is None else replace(out, grads=order.to_pipeline(out.grads))
        return self._apply(state, out, rows)

    def key_of(self, state: TrainState) -> jax.Array | None:
        """Returns the PRNG key of the next update, None without dropout."""
        return jax.random.fold_in(state.rng, state.attempts) if self._dropout else None

    def _apply(
        self, state: TrainState, out: ForwardBackwardOutput, rows: Any, limits: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        stored, order = opened(state)
        change = replace(self._change, counted=counted_in(order, self._change.counted))
        new, metrics = change.apply(stored, out, rows, opened(self.state_shardings(state))[0], limits)
        if order is not None and metrics.num_zeros is not None:
            empty = order.empty(self.forward_backward.trained(stored.params))
            metrics = replace(metrics, num_zeros=metrics.num_zeros - empty)
        return closed(new, order), metrics


@partial(jax.jit, static_argnums=2)
def _keys_of_rows(key: jax.Array, first_row: int, num_rows: int) -> jax.Array:
    """Returns the PRNG keys that those rows of a global batch have, whatever call they are in."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first_row + jnp.arange(num_rows))
