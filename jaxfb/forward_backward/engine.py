"""Runs all microbatches of a global batch through forward and backward in one call.

The function that does it and its checks; `frame.py` is the program it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxfb import cpu, schedules
from jaxfb.batch_plan import BatchPlan
from jaxfb.compat import is_traced
from jaxfb.forward_backward.arguments import (
    check_accum_dtype,
    check_model,
    check_params,
    check_plan,
    checked_scale,
    checked_weights,
    float_dtype,
    layer_counts,
    specs_like,
)
from jaxfb.forward_backward.cores import Accumulation, Core, Execution, Pipelining
from jaxfb.forward_backward.ends import check_placement, check_rows, choose_placement
from jaxfb.forward_backward.frame import Frame
from jaxfb.forward_backward.loss import check_parts
from jaxfb.forward_backward.microbatches import merge, row_keys, rows_spec, specs_of, split, split_keys
from jaxfb.forward_backward.packed import Packed, is_arranged
from jaxfb.forward_backward.padding import check_padding
from jaxfb.forward_backward.remat import REMAT_POLICIES
from jaxfb.forward_backward.sequential import as_loss_fn, num_layers
from jaxfb.forward_backward.weights import NORMALIZATIONS
from jaxfb.mesh import axis_size, check_mesh, make_mesh
from jaxfb.output import ForwardBackwardOutput, Origin
from jaxfb.parallel import annotations, data, pipe, sharding
from jaxfb.refusal import Refused, boolean, choice, function, shown
from jaxfb.types import Counted, LossFn, Pipelined, outer_params, restrict_to

PyTree = Any
OPTIMIZER_SHARDINGS = ("none", "data", "gradients")


def get_forward_backward_func(
    mesh: Mesh | None = None,
    schedule: str | schedules.Schedule | None = None,
    *,
    num_chunks: int = 1,
    normalize: str = "global",
    accum_dtype: Any = None,
    compute_dtype: Any = None,
    remat: str | None = None,
    fsdp_gather: str = "layer",
    optimizer_sharding: str = "none",
    param_specs: Callable[[PyTree], PyTree] | None = None,
    head_placement: str | None = None,
    layers_per_stage: Sequence[int] | None = None,
    poison_bubbles: bool = False,
) -> ForwardBackward:
    """Picks accumulation or, with pipe > 1, the pipeline, and returns one function over whole global batches.

    Its loss and gradient are those of the whole batch on one device, whatever the mesh, the schedule and the
    plan: in float64 to rounding. See `ForwardBackward.__call__` for the signature.

    Args:
      mesh: from `make_mesh`; None is one device. The rows are split over data, fsdp and expert.
      schedule: with pipe > 1, "gpipe", "1f1b", "interleaved", "zero_bubble", "v_shape", or a `Schedule` of
        one's own for the plan's number of microbatches. None: "1f1b", or "interleaved" if num_chunks > 1.
      num_chunks: stages a device of the pipeline holds; the layers are cut into pipe * num_chunks stages.
      normalize: "global" divides each term by its weight over the whole global batch; "microbatch" is
        Megatron's mean over microbatches and replicas of total / weight; "none" sums.
      accum_dtype: of the gradient sum; None is float32, or float64 for float64 params.
      compute_dtype: params are cast to it once a call, before the microbatch loop; None leaves them.
      remat: "none" (or None), "selective", "layer" or "full": what a layer of a `Pipelined` recomputes in its
        backward. "layer" keeps its input and computes it again; "full" is the same, but under a pipeline keeps
        a stage's input alone and computes its forward twice more.
      fsdp_gather: "layer" gathers shards where they are used, in every microbatch (ZeRO-3): a layer at a
        time for a `Pipelined`, all params for a plain loss function. "step" gathers all once a call, so the
        number of gathers does not depend on the number of microbatches.
      optimizer_sharding: "data" returns gradients cut over data as well, by one reduce-scatter (ZeRO-1).
        "gradients" cuts the sum over microbatches too, by a reduce-scatter in each (ZeRO-2); not in a pipeline.
      param_specs: params -> tree of PartitionSpec naming "tensor" only; default: the `Pipelined`'s own.
      head_placement: where a pipeline computes head and loss: "vocabulary" (each stage its share, for models
        that offer it), "rows" (each stage its share of the microbatch's rows: for heads whose terms are sums
        over rows, and rows that pipe divides) or "last" (every device spends the time of the whole head in a
        tick, the last stage's answer counts). None: "vocabulary" where it is possible, else "last".
      layers_per_stage: number of layers of each of the pipe * num_chunks stages, where they do not divide
        evenly. Every device then holds all layers' parameters and spends the time of the longest stage.
      poison_bubbles: fills what a pipeline computes in its bubbles with NaN; for tests, it changes nothing.

    Raises:
      ValueError: an argument is not among the legal choices, or they do not fit together.
    """
    mesh = check_mesh(make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh)
    layers_per_stage = layer_counts(layers_per_stage)
    _check_pipeline(mesh, schedule, num_chunks, head_placement, layers_per_stage)
    if param_specs is not None:
        function("param_specs", param_specs, "from params to PartitionSpecs")
    if (
        isinstance(optimizer_sharding, str)
        and optimizer_sharding == "gradients"
        and axis_size(mesh, "pipe") > 1
    ):
        raise Refused('optimizer_sharding="gradients" needs a mesh with pipe=1; in a pipeline use "data"')
    return ForwardBackward(
        mesh,
        schedules.default_name(num_chunks) if schedule is None else schedule,
        num_chunks,
        choice("normalize", normalize, NORMALIZATIONS),
        float_dtype("accum_dtype", accum_dtype),
        float_dtype("compute_dtype", compute_dtype),
        choice("remat", "none" if remat is None else remat, REMAT_POLICIES),
        choice("fsdp_gather", fsdp_gather, data.GATHERS),
        choice(
            "optimizer_sharding",
            "none" if optimizer_sharding is None else optimizer_sharding,
            OPTIMIZER_SHARDINGS,
        ),
        param_specs,
        head_placement,
        layers_per_stage,
        boolean("poison_bubbles", poison_bubbles),
    )


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward over whole global batches on one mesh; made by `get_forward_backward_func`."""

    mesh: Mesh
    schedule: str | schedules.Schedule
    num_chunks: int
    normalize: str
    accum_dtype: Any
    compute_dtype: Any
    remat: str
    fsdp_gather: str
    optimizer_sharding: str
    tensor_specs: Callable[[PyTree], PyTree] | None
    head_placement: str | None
    layers_per_stage: tuple[int, ...] | None
    poison_bubbles: bool

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
          params: any pytree of float arrays.
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
        grad_scale, weights = checked_scale(grad_scale), checked_weights(weights, self.normalize)
        self.check(model, params, plan, forward_only)
        check_params(params, forward_only, concrete=True)
        if plan.by_tokens:
            packed = Packed(batch, plan)
            call = (packed.batch, packed.plan, packed.keys(rng), forward_only, grad_scale, weights)
            out = self(model, params, *call)
            outputs, origin = packed.restore(out.outputs), replace(out.origin, rows=plan.real_rows)
            return replace(out, outputs=outputs, origin=origin)
        microbatches = split(batch, plan, self.mesh).leaves
        if not forward_only:
            by_rows = self.pipe > 1 and self.head_placement_for(model, params) == "rows"
            check_parts(model, microbatches, plan.data_parallel * (self.pipe if by_rows else 1))
        arrays = self._placed(model, params, microbatches, plan, rng)
        out = self._jitted(_run)(self, model, plan, forward_only, *arrays, grad_scale, weights)
        scale = None if isinstance(grad_scale, float) and grad_scale == 1 else grad_scale
        return replace(
            out, origin=replace(out.origin, rows=plan.real_rows, grad_scale=scale, weights=weights)
        )

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
        self.check(model, params, plan)
        check_params(params, forward_only=False, concrete=True)
        if _counts_before(model):
            raise Refused(
                "a model that reads statistics of the whole global batch before its backward (Counted.before) has no "
                "weights for a part of it; make one call of all rows"
            )
        if plan.by_tokens:
            packed = Packed(batch, plan)
            return self.weights(model, params, packed.batch, packed.plan, packed.keys(rng))
        arrays = self._placed(model, params, split(batch, plan, self.mesh).leaves, plan, rng)
        return self._jitted(_weigh)(self, model, plan, *arrays)

    def _placed(self, model, params, microbatches, plan, rng) -> tuple:
        """Returns (params, microbatches, keys) where the program of a call reads them."""
        keys = split_keys(row_keys(rng, plan), plan)
        targets = sharding.shardings(specs_of(microbatches, self.mesh), self.mesh)
        microbatches = sharding.adopt(microbatches, targets)
        keys = sharding.adopt(keys, NamedSharding(self.mesh, rows_spec(self.mesh)))
        specs = self.param_specs(model, params)
        if not is_traced(params):
            annotations.warn_if_whole(specs, self.mesh)
        return _place(params, sharding.shardings(specs, self.mesh)), microbatches, keys

    def _jitted(self, function: Callable) -> Callable:
        return _JITTED[function, cpu.wants_options(self.mesh)]

    def check(
        self, model: LossFn | Pipelined, params: PyTree, plan: BatchPlan, forward_only: bool = False
    ) -> None:
        """Raises the ValueError of a call with these (possibly abstract) params and this plan, if it would."""
        self.check_plan(model, plan, forward_only)
        check_params(params, forward_only)
        if isinstance(model, Pipelined):
            num_layers(params)
            if not plan.by_tokens:  # the plan that it is arranged into comes here again
                _check_stages(self, model, params, plan)

    def check_plan(self, model: LossFn | Pipelined, plan: BatchPlan, forward_only: bool = False) -> None:
        """Raises the ValueError of a call with this model and this plan, if it would with any params."""
        check_model(model)
        check_plan(plan, self.mesh, forward_only)
        check_accum_dtype(self.accum_dtype, plan)
        if self.pipe > 1 and not isinstance(model, Pipelined):
            raise Refused(
                f"a mesh with pipe={self.pipe} needs a model cut for stages, jaxfb.Pipelined(embed, layer, head), "
                f"got {shown(model)}; use pipe=1 for a plain loss function"
            )
        if not plan.by_tokens and not forward_only:
            _check_backward(self.schedule_for(plan.num_microbatches))

    def param_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Returns where each parameter is placed: a tree of PartitionSpec over pipe, fsdp and tensor."""
        pipelined = isinstance(model, Pipelined)
        rule = self.tensor_specs or (model.param_specs if pipelined else None)
        tensor_specs = (
            specs_like(params, rule(params))
            if rule
            else annotations.tensor_specs(params, self.mesh, stacked=pipelined)
        )
        pipe_dims = (
            restrict_to(params, self._pipe_dims(model, params)) if pipelined and self.pipe > 1 else None
        )
        return sharding.param_specs(params, self.mesh, tensor_specs, pipe_dims, stacked=pipelined)

    def grad_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Returns where each gradient is placed: as its parameter, under ZeRO-1 and ZeRO-2 cut over data as well."""
        specs = self.param_specs(model, params)
        if self.optimizer_sharding == "none":
            return specs
        return sharding.optimizer_specs(specs, params, self.mesh)

    def grad_dtypes(self, params: PyTree) -> PyTree:
        """Returns the dtype of each gradient: that in which it is summed, a tree like params."""
        return jax.tree.map(lambda leaf: jnp.dtype(_accum_dtype(leaf.dtype, self.accum_dtype)), params)

    def schedule_for(self, num_microbatches: int) -> schedules.Schedule | None:
        """Returns the schedule that a plan with so many microbatches runs under; None without a pipeline."""
        if self.pipe == 1:
            return None
        if isinstance(self.schedule, schedules.Schedule):
            return _check_schedule(self.schedule, self.pipe, num_microbatches)
        return _make_schedule(self.schedule, self.pipe, num_microbatches, self.num_chunks)

    def head_placement_for(self, model: Pipelined, params: PyTree) -> str:
        """Returns where a pipeline computes this model's head: "vocabulary", "rows" or "last"."""
        tensor = axis_size(self.mesh, "tensor")
        return choose_placement(self.head_placement, model, outer_params(params), self.pipe, tensor)

    def _pipe_dims(self, model: Pipelined, params: PyTree) -> PyTree:
        """Returns the dim of each leaf that the stages share out, -1 where each holds all of it."""
        even = self.layers_per_stage is None or len(set(self.layers_per_stage)) == 1
        outer = outer_params(params)
        if self.head_placement_for(model, params) == "vocabulary":
            dims = model.vocabulary.dims(outer)
        else:
            dims = jax.tree.map(lambda _: -1, outer)
        return dims | {"layers": jax.tree.map(lambda _: 0 if even else -1, params["layers"])}

    @property
    def pipe(self) -> int:
        """Returns number of devices along the pipe axis."""
        return axis_size(self.mesh, "pipe")


def _run(
    fb, model, plan, forward_only, params, microbatches, keys, grad_scale, weights
) -> ForwardBackwardOutput:
    counted = _counted(model)
    complete = dict(params) if isinstance(model, Pipelined) else params
    if plan.padding_rows or (plan.remainder == "pad" and is_arranged(microbatches)):
        check_padding(as_loss_fn(model), params, microbatches, keys)
    if counted is not None and counted.before is not None:
        with jax.named_scope("count"):
            metrics = _one_pass(fb, model, plan, True, complete, microbatches, keys, 1.0, None).metrics
        complete = counted.before(complete, metrics)
    out = _one_pass(fb, model, plan, forward_only, complete, microbatches, keys, grad_scale, weights)
    return replace(out, grads=None if forward_only else restrict_to(params, out.grads))


def _weigh(fb, model, plan, params, microbatches, keys) -> dict:
    return _program(fb, model, plan, True, params).weights(params, microbatches, keys)


_STATIC = {_run: (0, 1, 2, 3), _weigh: (0, 1, 2)}
_JITTED = {
    (function, in_order): jax.jit(
        function, static_argnums=static, compiler_options=cpu.IN_ORDER if in_order else None
    )
    for function, static in _STATIC.items()
    for in_order in (False, True)
}


def _one_pass(
    fb, model, plan, forward_only, params, microbatches, keys, grad_scale, weights
) -> ForwardBackwardOutput:
    program = _program(fb, model, plan, forward_only, params)
    *results, of_tokens, undivided = program.run(params, microbatches, keys, grad_scale, weights)
    grads, loss, terms, metrics, per_microbatch, outputs = results
    outputs = merge(outputs, of_tokens, plan, fb.mesh)
    names = (undivided, (tuple(sorted(terms)),))
    origin = Origin(None, None, None, fb.normalize, *names, _counts_before(model))
    return ForwardBackwardOutput(loss, terms, grads, metrics, per_microbatch, outputs, origin)


def _program(fb, model, plan, forward_only, params) -> Frame:
    specs = fb.param_specs(model, params)
    grad_specs = None if forward_only else fb.grad_specs(model, params)
    core = _core(fb, model, plan, specs, params, forward_only)
    return Frame(fb.mesh, core, model, fb.normalize, specs, grad_specs)


def _counts_before(model: LossFn | Pipelined) -> bool:
    counted = _counted(model)
    return counted is not None and counted.before is not None


def _core(
    fb: ForwardBackward,
    model: LossFn | Pipelined,
    plan: BatchPlan,
    specs: PyTree,
    params: PyTree,
    forward_only: bool,
) -> Core:
    """Returns the way from seeds to gradients that this mesh asks for."""
    dtypes = _compute_dtypes(fb, model, params)
    how = Execution(
        specs, dtypes, dtypes if forward_only else fb.grad_dtypes(params), fb.fsdp_gather, fb.remat
    )
    schedule = fb.schedule_for(plan.num_microbatches)
    if schedule is None:
        scattered = fb.grad_specs(model, params) if fb.optimizer_sharding == "gradients" else None
        return Accumulation(model, how, scattered)
    placement = fb.head_placement_for(model, params)
    return Pipelining(model, how, schedule, _layout(fb, schedule, params), placement, fb.poison_bubbles)


def _compute_dtypes(fb: ForwardBackward, model: LossFn | Pipelined, params: PyTree) -> PyTree:
    """Returns the dtype that each leaf is cast to, a tree like params; leaves that are counted stay as they are."""
    counted = _counted(model)
    stays = jax.tree.map(lambda _: False, params) if counted is None else counted.leaves(params)
    return jax.tree.map(
        lambda leaf, stay: jnp.dtype(leaf.dtype if stay else fb.compute_dtype or leaf.dtype), params, stays
    )


def _counted(model: LossFn | Pipelined) -> Counted | None:
    return model.counted if isinstance(model, Pipelined) else None


def _layout(fb: ForwardBackward, schedule: schedules.Schedule, params: PyTree) -> pipe.Layout:
    return pipe.layout_of(num_layers(params), schedule.placement, fb.layers_per_stage)


@lru_cache(maxsize=64)
def _make_schedule(name: str, pipe: int, num_microbatches: int, num_chunks: int) -> schedules.Schedule:
    return schedules.make(name, pipe, num_microbatches, num_chunks)


def _check_schedule(schedule: schedules.Schedule, pipe: int, num_microbatches: int) -> schedules.Schedule:
    if (schedule.num_stages, schedule.num_microbatches) != (pipe, num_microbatches):
        raise Refused(
            f"schedule {schedule.name!r} is for pipe={schedule.num_stages} and {schedule.num_microbatches} "
            f"microbatches, the call has pipe={pipe} and {num_microbatches}; make it for these"
        )
    return schedule


def _check_pipeline(
    mesh: Mesh, schedule: Any, num_chunks: int, head_placement: Any, layers_per_stage: Any
) -> None:
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
        raise Refused(f"num_chunks must be a positive int, got {shown(num_chunks)}; 1 is one stage a device")
    given = {
        "schedule": schedule,
        "num_chunks": num_chunks if num_chunks > 1 else None,
        "head_placement": head_placement,
        "layers_per_stage": layers_per_stage,
    }
    if axis_size(mesh, "pipe") == 1:
        set_ = {name: value for name, value in given.items() if value is not None}
        if set_:
            names = " and ".join(f"{name}={shown(value)}" for name, value in set_.items())
            raise Refused(
                f"{names} belong to a pipeline: they need a mesh with pipe > 1, this one has pipe=1; "
                "make the mesh with pipe=2 or more, or leave them out",
                [{name: 1 if name == "num_chunks" else None for name in set_}],
            )
    if head_placement is not None:
        check_placement(head_placement)
    if isinstance(schedule, schedules.Schedule):
        _check_schedule(schedule.validate(), axis_size(mesh, "pipe"), schedule.num_microbatches)
    elif axis_size(mesh, "pipe") > 1:
        name = schedules.default_name(num_chunks) if schedule is None else schedule
        schedules.check_name(name)
        _make_schedule(name, axis_size(mesh, "pipe"), 1, num_chunks)


def _place(params: PyTree, shardings: PyTree) -> PyTree:
    """Moves parameters that live elsewhere, such as on one device or the host, onto the mesh."""

    def move(leaf, target):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == target.device_set:
            return leaf
        return jax.device_put(leaf, target)

    return params if is_traced(params) else jax.tree.map(move, params, shardings)


def _check_backward(schedule: schedules.Schedule | None) -> None:
    if schedule is not None and not schedule.has_backward:
        raise Refused(
            f"schedule {schedule.name!r} has no backward, so it serves forward_only=True alone; pass one with B for "
            'every F, such as schedules.make("1f1b", num_stages, num_microbatches)'
        )


def _check_stages(fb: ForwardBackward, model: Pipelined, params: PyTree, plan: BatchPlan) -> None:
    schedule = fb.schedule_for(plan.num_microbatches)
    if schedule is None:
        return
    _layout(fb, schedule, params)
    check_rows(fb.head_placement_for(model, params), plan.rows_per_microbatch, fb.pipe)


def _accum_dtype(dtype: Any, asked: Any) -> Any:
    return asked or (jnp.float64 if dtype == jnp.float64 else jnp.float32)
