"""Makes one optimizer update from one global batch. The file to read first after the README:

    batch -> forward_backward -> unscale -> finite? -> clip -> optax update (once) -> TrainState

Everything behind `forward_backward` sees whole arrays; XLA cuts them as parameters and optimizer state are cut.
The rest of a step's interface: `states.py` makes states, `split_step.py` makes an update from several calls.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, Unpack

import jax
import optax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward import ForwardBackward, Packed, get_forward_backward_func
from jaxfb.forward_backward.offered import counted_of
from jaxfb.forward_backward.options import ScheduledKeywords, check_names
from jaxfb.optim import of_trained
from jaxfb.optim.loss_scale import DynamicLossScale, StaticLossScale
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.host_memory import check_memory
from jaxfb.parallel.set_mesh import on_its_mesh
from jaxfb.platforms.programs import per_options
from jaxfb.refusal import Refused, function_of
from jaxfb.types import LossFn, Pipelined, PyTree
from jaxfb.update.apply import Update
from jaxfb.update.arguments import check_apart, check_optimizer, check_options, check_rows, layer_order_of
from jaxfb.update.on_mesh import OnMesh
from jaxfb.update.programs import Programs
from jaxfb.update.split_step import SplitStep
from jaxfb.update.streamed import streamed
from jaxfb.update.train_state import Limits, StepMetrics, TrainState


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
    check_program: Callable[[jax.stages.Compiled], None] | None = None,
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
      check_program: is given the program of the first update, compiled, before it runs, such as to look at its
        `memory_analysis()`; what it raises ends that call, and the state is still the caller's. Not called where the
        parts of a batch have programs of their own, which is with `max_context`.
      forward_backward_options: as for `get_forward_backward_func`.

    Raises:
      ValueError: an option is illegal, model, mesh and plan do not fit together, or the devices reach no pinned memory
        of their host for optimizer_memory="host".
    """
    check_names("make_train_step", forward_backward_options, inspect.signature(make_train_step).parameters)
    check_optimizer(optimizer)
    check_options(max_grad_norm, clip_convention, loss_scale, dropout=dropout, count_zeros=count_zeros)
    _check_functions(change_gradients, check_program)
    fb = get_forward_backward_func(mesh, **forward_backward_options)
    fb.check_plan(model, plan)
    _check_dropout(plan, dropout)
    counted = counted_of(model)
    stores = layer_order_of(layer_order, optimizer, change_gradients, counted)
    options = (max_grad_norm, clip_convention, loss_scale, count_zeros, change_gradients)
    if fb.options.trainable is not None:
        optimizer = of_trained(optimizer, fb.trained)
    update = Update(optimizer, fb.trained, counted, *options)
    if check_memory(optimizer_memory, fb.mesh) == "host":
        update = streamed(update, model)
    return TrainStep(fb, model, plan, dropout, update, stores, optimizer_memory, check_program)


def _check_functions(change_gradients: Any, check_program: Any) -> None:
    """Raises ValueError for functions of the caller that do not take what they are given."""
    if change_gradients is not None:
        function_of("change_gradients", change_gradients, "(gradients, state)")
    if check_program is not None:
        function_of("check_program", check_program, "(compiled)")


def _check_dropout(plan: BatchPlan, dropout: bool) -> None:
    """Raises ValueError for dropout in packed rows: it is drawn by array row."""
    if plan.packing and dropout:
        raise Refused(
            "[train] dropout=True with packing=True would depend on how rows are packed; pass dropout=False to "
            "make_train_step, or a plan with packing=False",
            [{"dropout": False}],
        )


class TrainStep(SplitStep):
    """A compiled update, and where its state lives; made by `make_train_step`."""

    def __init__(
        self,
        forward_backward: ForwardBackward,
        model: LossFn | Pipelined,
        plan: BatchPlan,
        dropout: bool,
        update: Update,
        layer_order: str = "model",
        optimizer_memory: str = "device",
        check_program: Callable[[jax.stages.Compiled], None] | None = None,
    ):
        super().__init__(forward_backward, model, plan, update, layer_order, optimizer_memory)
        self.optimizer, self._check_program = update.optimizer, check_program
        self._programs = Programs(self, dropout, update)
        self._on_mesh = OnMesh(forward_backward.mesh)
        self._compile()

    def _compile(self) -> None:
        """Forgets what was traced."""
        super()._compile()
        self._updated = per_options(self._update, static_argnums=3, donate_argnums=0)
        self._differentiated_as_stored = per_options(self._programs.differentiate, static_argnums=(4, 5))
        self._applied_as_stored = per_options(self._programs.apply, donate_argnums=0)

    def _update(
        self, state: TrainState, batch: PyTree, rows: Any, plan: BatchPlan, limits: Any = None
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after one update; it is traced and compiled into one program."""
        out = self._programs.differentiate(state, batch, None, None, self.model, plan)  # forward_backward
        return self._programs.apply(state, out, rows, limits)  # unscale, finite?, clip, optax update

    @on_its_mesh
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
        state, batch, plan, real_rows, bounds = self._taken(state, batch, rows, limits)
        if plan.max_context:  # not one program: the batch is cut on the host
            out = self._gradients_as_stored(state, batch, plan)
            return self._apply_as_stored(state, out, real_rows, bounds)
        program = self._updated(self.compiler_options)
        return self._on_mesh.with_rate(*self._checked_first(program, state, batch, real_rows, plan, bounds))

    @on_its_mesh
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
        state, batch, plan, real_rows, bounds = self._taken(state, batch, rows, limits)
        began = time.monotonic()
        out = jax.block_until_ready(self._gradients_as_stored(state, batch, plan))
        between = time.monotonic()
        new, metrics = jax.block_until_ready(self._apply_as_stored(state, out, real_rows, bounds))
        return new, metrics, {"forward_backward": between - began, "optimizer": time.monotonic() - between}

    def _taken(self, state: TrainState, batch: PyTree, rows: int | None, limits: Limits | None) -> tuple:
        """Returns state, batch, the batch's plan, rows and limits as the programs take them."""
        plan = self.plan
        real_rows = plan.real_rows if rows is None else check_rows(rows, plan.real_rows)
        state, bounds = self._donated(state), self._on_mesh.limits(limits)
        if plan.max_context:  # each part of the batch has a program of its own, and a place on its devices
            return state, batch, plan, self._on_mesh.rows(real_rows), bounds
        if plan.by_tokens:
            packed = batch if isinstance(batch, Packed) else Packed(batch, plan)
            batch, plan = packed.batch, packed.plan
        batch = self._on_mesh.batch(batch)
        check_apart(state, batch)
        return state, batch, plan, self._on_mesh.rows(real_rows), bounds

    def _gradients_as_stored(
        self, state: TrainState, batch: PyTree, plan: BatchPlan
    ) -> ForwardBackwardOutput:
        """Returns loss and gradients, whose layers are in the order in which the state stores them."""
        arguments = (state, batch, None, None, self.model, plan)
        if plan.max_context:
            return self._programs.differentiate(*arguments)
        return self._checked_first(self._differentiated_as_stored(self.compiler_options), *arguments)

    def _apply_as_stored(
        self, state: TrainState, out: ForwardBackwardOutput, rows: jax.Array, bounds: jax.Array | None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies gradients whose layers are in the order in which the state stores them."""
        out = self._on_mesh.gradients(out)
        program = self._applied_as_stored(self.compiler_options)
        return self._on_mesh.with_rate(*program(state, out, rows, bounds))

    def _checked_first(self, program: Any, *arguments: Any) -> Any:
        """Calls a program, the first one after `check_program` saw it compiled; the call finds it compiled then."""
        check, self._check_program = self._check_program, None
        if check is not None:
            check(program.compile(*arguments))
        return program(*arguments)

    def lower(self, state: TrainState, batch: PyTree):
        """Lowers the step for these (abstract) arguments, for ahead-of-time compilation."""
        return self._updated(self.compiler_options).lower(
            self._as_stored(state), batch, self.plan.real_rows, self.plan
        )

    def trace(self, state: TrainState, batch: PyTree):
        """Traces the step for these arguments, which may live on an `AbstractMesh`; `.jaxpr` is its program."""
        return self._updated(self.compiler_options).trace(
            self._as_stored(state), batch, self.plan.real_rows, self.plan
        )
