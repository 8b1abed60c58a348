"""Runs all microbatches of a global batch through forward and backward in one call.

The function that does it and its checks; `spmd_program.py` is the program it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
from jax.sharding import Mesh

from jaxfb import schedules
from jaxfb.batch_plan import BatchPlan
from jaxfb.batch_plan.plan import UPDATES
from jaxfb.forward_backward import by_context, calls, resolved
from jaxfb.forward_backward.arguments import (
    check_accum_dtype,
    check_model,
    check_params,
    check_plan,
    checked_scale,
    checked_weights,
)
from jaxfb.forward_backward.microbatches import split
from jaxfb.forward_backward.offered import check_marks, check_offers_pieces, check_parts, counts_before
from jaxfb.forward_backward.options import EngineKeywords, EngineOptions, check_names, with_options
from jaxfb.forward_backward.packed import Packed
from jaxfb.forward_backward.pipeline.pieces import check_lengths
from jaxfb.forward_backward.resolved import Resolved, resolve
from jaxfb.forward_backward.sequential import num_layers
from jaxfb.mesh import axis_size, check_mesh, make_mesh
from jaxfb.output import ForwardBackwardOutput, recorded_scale
from jaxfb.parallel import pipe
from jaxfb.parallel.layers.order import LayerOrder
from jaxfb.parallel.set_mesh import on_its_mesh
from jaxfb.parts import HEADS
from jaxfb.platforms.compiler import Options, options_for
from jaxfb.refusal import Refused, boolean, shown
from jaxfb.trainable import pruned
from jaxfb.types import LossFn, Pipelined, PyTree, restrict_to


@with_options
def get_forward_backward_func(
    mesh: Mesh | None = None,
    schedule: str | schedules.Schedule | None = None,
    *,
    layer_order: str = "model",
    **options: Unpack[EngineKeywords],
) -> ForwardBackward:
    """Picks accumulation or, with pipe > 1, the pipeline, and returns one function over whole global batches.

    Its loss and gradient are those of the whole batch on one device, whatever the mesh, the schedule and the
    plan: in float64 to rounding. See `ForwardBackward.__call__` for the signature.

    Args:
      mesh: from `make_mesh`; None is one device. The rows are split over data, fsdp and expert.
      schedule, layer_order, options: the fields of `jaxfb.forward_backward.options.EngineOptions`, which describes
        them; `help(jaxfb.get_forward_backward_func)` lists them all.

    Raises:
      ValueError: an argument is not among the legal choices, or they do not fit together.
    """
    check_names("get_forward_backward_func", options)
    mesh = check_mesh(make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh)
    given: dict[str, Any] = {"schedule": schedule, "layer_order": layer_order, **options}
    chosen = EngineOptions(**given)
    chosen.check_mesh(mesh)
    return ForwardBackward(mesh, chosen)


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward over whole global batches on one mesh; made by `get_forward_backward_func`."""

    mesh: Mesh
    options: EngineOptions

    @on_its_mesh
    def __call__(
        self,
        model: LossFn | Pipelined,
        params: PyTree,
        batch: PyTree,
        plan: BatchPlan,
        rng: jax.Array | None = None,
        forward_only: bool = False,
        grad_scale: jax.Array | float = 1.0,
        weights: dict[str, Any] | None = None,
    ) -> ForwardBackwardOutput:
        """Runs every microbatch of `batch` and returns the loss and gradient of the whole of it.

        Equals, on one device, `jax.value_and_grad` of sum over terms of total / weight of all rows at once.
        It may be called directly or inside the caller's own `jax.jit`.

        Args:
          model: `loss_fn(params, microbatch, rng) -> LossOutput | Sum`, or a `Pipelined`.
          params: any pytree of float arrays; those that `trainable` freezes may have any dtype.
          batch: pytree of [rows, ...] arrays in global row order, or `Microbatches`. With a token budget a dict
            with `segments`, arranged on the host, so then the call is not part of the caller's own `jax.jit`.
          plan: of purpose "train" or "critic" (any purpose if forward_only).
          rng: None, one PRNG key or its int seed (row r gets `fold_in(rng, r)`), or keys [rows].
          forward_only: no backward; `grads` is None.
          grad_scale: float[]; gradients come out multiplied by it (fp16 loss scaling), the loss does not.
          weights: name -> number, what divides each term that has a weight, where the batch is a part of an update:
            the sum over all its calls of `weights(...)`. The loss is then this batch's share. None: the batch's own.

        Raises:
          ValueError: plan, mesh, batch and params do not fit, or the loss function breaks its contract.
        """
        boolean("forward_only", forward_only)
        grad_scale, weights = checked_scale(grad_scale), checked_weights(weights, self.options.normalize)
        self.check_plan(model, plan, forward_only)
        if plan.max_context:
            call = (model, params, batch, plan, rng, forward_only, grad_scale, weights)
            return by_context.run(self, *call)
        leaves, resolved = self._resolve(model, params, plan, forward_only)
        if not plan.by_tokens:
            arrays = self._arrays(resolved, leaves, batch, rng, forward_only)
            return self._run(resolved, params, arrays, forward_only, grad_scale, weights)
        packed = Packed(batch, plan)
        call = (packed.batch, packed.plan, packed.keys(rng), forward_only, grad_scale, weights)
        out = packed.restored(self(model, params, *call))
        return replace(out, origin=replace(out.origin, rows=plan.real_rows))

    def _run(
        self,
        resolved: Resolved,
        params: PyTree,
        arrays: tuple,
        forward_only: bool,
        grad_scale: Any,
        weights: dict[str, Any] | None,
    ) -> ForwardBackwardOutput:
        """Returns the output of the compiled program; arrays: as `_arrays` returns them. params: the caller's."""
        grad_scale, weights = calls.adopted(resolved, grad_scale), calls.adopted(resolved, weights)
        out = self._jitted(calls.run)(resolved, forward_only, *arrays, grad_scale, weights)
        facts = {"grad_scale": recorded_scale(grad_scale), "weights": weights}
        origin = replace(out.origin, rows=resolved.plan.real_rows, **facts)
        grads = None if forward_only else restrict_to(self.trained(params), out.grads)
        return replace(out, grads=grads, origin=origin)

    def _arrays(
        self, resolved: Resolved, leaves: PyTree, batch: PyTree, rng: Any, forward_only: bool
    ) -> tuple:
        """Returns (params, microbatches, keys) as the program of a call reads them, checked."""
        model, plan = resolved.model, resolved.plan
        microbatches = split(batch, plan, self.mesh).leaves
        check_lengths(microbatches, 1 if resolved.schedule is None else resolved.schedule.num_pieces)
        if not forward_only:
            cuts_rows = resolved.placement is not None and HEADS[resolved.placement].cuts_rows
            parts = self.pipe if cuts_rows else 1
            check_parts(model, microbatches, plan.data_parallel * parts)
        return calls.placed(resolved, leaves, microbatches, rng)

    @on_its_mesh
    def part(
        self,
        model: LossFn | Pipelined,
        params: PyTree,
        batch: PyTree,
        plan: BatchPlan,
        rng: jax.Array | None,
        forward_only: bool,
        grad_scale: jax.Array | float,
        weights: dict[str, Any] | None,
        sums: PyTree = None,
    ) -> tuple[ForwardBackwardOutput, PyTree]:
        """Returns the output of a part of an update without gradients, and each device's sums of them, unreduced.

        sums: of other parts, on a mesh of the same devices in the same order; they are overwritten. The other arguments
        are those of a call.
        """
        leaves, resolved = self._resolve(model, params, plan, forward_only)
        arrays = self._arrays(resolved, leaves, batch, rng, forward_only)
        return self._jitted(calls.add)(resolved, forward_only, *arrays, grad_scale, weights, sums)

    @on_its_mesh
    def reduced(self, model: LossFn | Pipelined, params: PyTree, plan: BatchPlan, sums: PyTree) -> PyTree:
        """Returns the gradients of an update from the sums of all its parts.

        plan: of this mesh, with as many microbatches and rows of one as that of some part.
        """
        _, resolved = self._resolve(model, params, plan, forward_only=False)
        return restrict_to(self.trained(params), self._jitted(calls.reduce)(resolved, sums))

    @on_its_mesh
    def weights(
        self,
        model: LossFn | Pipelined,
        params: PyTree,
        batch: PyTree,
        plan: BatchPlan,
        rng: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Returns what the rows of a batch count for each term that has a weight: name -> [].

        The arguments are those of a call, of which no forward pass is run. The sum of several batches' weights, name by
        name, is what each of their calls is given as `weights`, so that adding up their outputs is exact.

        Raises:
          ValueError: as for a call, or the model reads statistics of the whole batch before its backward.
        """
        # a plan of another purpose than an update is for calls without a backward
        leaves, resolved = self._resolve(model, params, plan, forward_only=plan.purpose not in UPDATES)
        if counts_before(model):
            raise Refused(
                "a model that reads statistics of the whole global batch before its backward (Counted.before) has no "
                "weights for a part of it; make one call of all rows"
            )
        if plan.max_context:
            return by_context.weights(self, model, params, batch, plan, rng)
        if plan.by_tokens:
            packed = Packed(batch, plan)
            return self.weights(model, params, packed.batch, packed.plan, packed.keys(rng))
        arrays = calls.placed(resolved, leaves, split(batch, plan, self.mesh).leaves, rng)
        return self._jitted(calls.weigh)(resolved, *arrays)

    def _jitted(self, function: Callable) -> Callable:
        return calls.JITTED[function](self.compiler_options)

    def check(
        self, model: LossFn | Pipelined, params: PyTree, plan: BatchPlan, forward_only: bool = False
    ) -> None:
        """Raises the ValueError of a call with these (possibly abstract) params and this plan, if it would."""
        self._resolve(model, params, plan, forward_only, concrete=False)

    def _resolve(
        self, model, params, plan, forward_only: bool, concrete: bool = True
    ) -> tuple[PyTree, Resolved]:
        """Returns params, those of a `Pipelined` as a plain dict, and what is decided about a call with them."""
        self.check_plan(model, plan, forward_only)
        check_params(params, forward_only, concrete, self.options.trainable)
        if isinstance(model, Pipelined):
            num_layers(params)  # refuses what is not a dict with layers
            params = dict(params)
            check_marks(model, params, self.mesh)
        return params, resolve(self.mesh, self.options, model, params, plan)

    def check_plan(self, model: LossFn | Pipelined, plan: BatchPlan, forward_only: bool = False) -> None:
        """Raises the ValueError of a call with this model and this plan, if it would with any params."""
        check_model(model)
        check_plan(plan, self.mesh, forward_only)
        check_accum_dtype(self.options.accum_dtype, plan)
        if plan.max_context:
            by_context.check(self.options.normalize, model)
        if self.pipe > 1 and not isinstance(model, Pipelined):
            raise Refused(
                f"a mesh with pipe={self.pipe} needs a model cut for stages, jaxfb.Pipelined(embed, layer, head), "
                f"got {shown(model)}; use pipe=1 for a plain loss function"
            )
        if plan.by_tokens:
            return
        schedule = self.schedule_for(plan.num_microbatches)
        if schedule is not None:
            check_offers_pieces(model, schedule.num_pieces)
        if not forward_only:
            _check_backward(schedule)

    def trained(self, params: PyTree) -> PyTree:
        """Returns the parameters that have a gradient, with None in place of each frozen one.

        Raises:
          ValueError: a pattern of `trainable` matches none.
        """
        return pruned(self.options.trainable, params)

    def param_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Returns where each parameter is placed: a tree of PartitionSpec over all axes but data."""
        placement = self.head_placement_for(model, params) if isinstance(model, Pipelined) else None
        return resolved.param_specs(self.mesh, self.options, model, params, placement)

    def grad_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Returns where each gradient is placed: as its parameter, under ZeRO-1 and ZeRO-2 cut over data as well.

        None where a parameter is frozen, as in the gradients themselves.
        """
        return resolved.grad_specs(self.mesh, self.options, params, self.param_specs(model, params))

    def grad_dtypes(self, params: PyTree) -> PyTree:
        """Returns the dtype of each gradient: that in which it is summed, a tree like the gradients."""
        return resolved.grad_dtypes(self.options, params)

    def layer_order(self, model: LossFn | Pipelined, params: PyTree, plan: BatchPlan) -> LayerOrder | None:
        """Returns the order in which devices hold the layers of these (possibly abstract) parameters in a call.

        None where it is the model's: without a pipeline, or with one chunk and stages of even length.

        params: in the model's order.
        """
        return None if not isinstance(model, Pipelined) else self.order_of_layers(num_layers(params), plan)

    def order_of_layers(self, number: int, plan: BatchPlan) -> LayerOrder | None:
        """Returns what `layer_order` returns for a `Pipelined` with so many layers."""
        # where a kind of schedule puts its chunks is asked of any number of microbatches if the plan leaves it open
        given = getattr(self.options.schedule, "num_microbatches", 1)
        schedule = self.schedule_for(given if plan.by_tokens else plan.num_microbatches)
        if schedule is None:
            return None
        layout = pipe.layout_of(number, schedule.placement, self.options.layers_per_stage)
        return LayerOrder(self.mesh, layout) if layout.exchanges or not layout.even else None

    def schedule_for(self, num_microbatches: int) -> schedules.Schedule | None:
        """Returns the schedule that a plan with so many microbatches runs under; None without a pipeline."""
        return None if self.pipe == 1 else self.options.schedule_for(self.pipe, num_microbatches)

    def head_placement_for(self, model: Pipelined, params: PyTree) -> str | None:
        """Returns where a pipeline computes this model's head: "vocabulary", "rows" or "last"; None without one."""
        return None if self.pipe == 1 else resolved.placement_for(self.mesh, self.options, model, params)

    @property
    def compiler_options(self) -> Options:
        """Returns the options of XLA that programs over this mesh are compiled with: (name, value) of each."""
        return options_for(self.mesh, self.options.compiler_options)

    @property
    def pipe(self) -> int:
        """Returns the number of devices along the pipe axis."""
        return axis_size(self.mesh, "pipe")


def _check_backward(schedule: schedules.Schedule | None) -> None:
    if schedule is not None and not schedule.has_backward:
        raise Refused(
            f"schedule {schedule.name!r} has no backward, so it only serves forward_only=True; pass one with B for "
            'every F, such as schedules.make("1f1b", num_stages, num_microbatches)'
        )
