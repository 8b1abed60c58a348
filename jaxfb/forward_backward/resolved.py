"""Decides once what follows from mesh, options, model, parameters and plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward.arguments import check_reduce_dtype, specs_like
from jaxfb.forward_backward.head_placement import check_rows, choose_placement
from jaxfb.forward_backward.layers.ahead import gathers_ahead, halves_pay
from jaxfb.forward_backward.layers.execution import Execution
from jaxfb.forward_backward.layers.last_microbatch import (
    Obstacle,
    check_overlap,
    obstacle_to_overlap,
    overlaps,
)
from jaxfb.forward_backward.offered import counted_of
from jaxfb.forward_backward.options import EngineOptions
from jaxfb.forward_backward.sequential import num_layers
from jaxfb.forward_backward.strategies import Accumulation, Pipelining, Strategy
from jaxfb.mesh import axis_size, kind_of, shard_axes
from jaxfb.parallel import annotations, pipe, sharding
from jaxfb.parts import HEADS
from jaxfb.recomputation import Half, check_gathered_layers, check_remat_layers
from jaxfb.refusal import Refused
from jaxfb.schedules import Schedule
from jaxfb.trainable import like, pruned
from jaxfb.types import LossFn, Pipelined, PyTree, outer_params, restrict_to


@dataclass(frozen=True)
class Tree:
    """Holds a tree of hashable leaves so that it can be compared and hashed, as a static argument of `jax.jit` is."""

    leaves: tuple
    structure: Any

    @classmethod
    def of(cls, tree: PyTree) -> Tree:
        """Flattens a tree whose leaves may be PartitionSpecs."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(tuple(leaves), structure)

    @property
    def tree(self) -> PyTree:
        """Returns the tree itself."""
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclass(frozen=True)
class Resolved:
    """Holds what is decided about a call. All trees are like its parameters; those of gradients have None where a
    parameter is frozen.

    specs, grad_specs: PartitionSpecs, where each parameter and each gradient is placed.
    dtypes, sums:      the dtype that each parameter is cast to for the computation, and that its gradient is summed in.
    schedule, layout, placement: of a pipeline, which layers each stage has and where the head is; else None.
    """

    mesh: Mesh
    options: EngineOptions
    model: LossFn | Pipelined
    plan: BatchPlan
    specs: Tree
    grad_specs: Tree
    dtypes: Tree
    sums: Tree
    schedule: Schedule | None
    layout: pipe.Layout | None
    placement: str | None

    def shapes(self, params: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the parameters as the model's functions see them: each layer once."""
        cast = jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), params, self.dtypes.tree)
        if self.layout is None or self.layout.even:
            return cast
        number = self.layout.num_layers
        layers = jax.tree.map(lambda leaf: leaf.update(shape=(number, *leaf.shape[1:])), cast["layers"])
        return {**cast, "layers": layers}

    @property
    def gathers_ahead(self) -> bool | Half:
        """Returns whether FSDP gathers a layer's parameters while the layer before it computes; "half": those of its
        first half.
        """
        if not isinstance(self.model, Pipelined) or not shard_axes(self.mesh):
            return False
        options, kind = self.options, kind_of(self.mesh.abstract_mesh)
        asked, sizes = options.gather_ahead, (axis_size(self.mesh, axis) for axis in ("tensor", "context"))
        if not gathers_ahead(asked, kind, options.fsdp_gather, options.optimizer_sharding):
            return False
        by_default = asked is None and _names_halves(self.model) and halves_pay(kind, *sizes)
        return "half" if asked == "half" or by_default else True

    @property
    def overlaps_grad_reduce(self) -> bool:
        """Returns whether the last microbatch's backward reduces the layers' gradients over the devices."""
        if not isinstance(self.model, Pipelined):
            return False
        in_shards = self.options.fsdp_gather == "step" and bool(shard_axes(self.mesh))
        reduces = in_shards or axis_size(self.mesh, "data") > 1
        asked, kind = self.options.overlap_grad_reduce, kind_of(self.mesh.abstract_mesh)
        return overlaps(asked, kind, self.obstacle_to_overlap, reduces, axis_size(self.mesh, "pipe") > 1)

    @property
    def obstacle_to_overlap(self) -> Obstacle | None:
        """Returns what is in the way of reducing gradients beside the last microbatch, None if nothing is."""
        schedule, unfit = self.schedule, None
        if schedule is not None and not schedule.program.ends_with_first_chunk:
            unfit = schedule.name
        return obstacle_to_overlap(unfit, self.options.optimizer_sharding)

    def strategy(self, forward_only: bool) -> Strategy:
        """Returns the way from seeds to gradients on this mesh."""
        options, execution = self.options, self._execution(forward_only)
        model, schedule, layout, placement = self.model, self.schedule, self.layout, self.placement
        if (
            isinstance(model, Pipelined)
            and schedule is not None
            and layout is not None
            and placement is not None
        ):
            return Pipelining(model, execution, schedule, layout, placement, options.poison_bubbles)
        scattered = self.grad_specs.tree if options.optimizer_sharding == "gradients" else None
        return Accumulation(model, execution, scattered)

    def _execution(self, forward_only: bool) -> Execution:
        """Returns how parameters are cut, cast, gathered and recomputed."""
        options, gather = self.options, self.options.fsdp_gather
        keeps_gathered = bool(shard_axes(self.mesh)) and not forward_only
        return Execution(
            specs=self.specs.tree,
            dtypes=self.dtypes.tree,
            sums=self.dtypes.tree if forward_only else self.sums.tree,
            fsdp_gather="layer" if isinstance(gather, int) else gather,
            remat=options.remat or "none",
            ahead=self.gathers_ahead,
            kept=gather if isinstance(gather, int) and keeps_gathered else 0,
            reduce_dtype=options.reduce_dtype,
            overlap_grad_reduce=self.overlaps_grad_reduce,
        )


def resolve(
    mesh: Mesh, options: EngineOptions, model: LossFn | Pipelined, params: PyTree, plan: BatchPlan
) -> Resolved:
    """Decides how a call runs.

    Raises:
      ValueError: the parameters do not fit the mesh or the options, or the plan's rows do not fit the head's placement.
    """
    pipe_size, placement, schedule, layout = axis_size(mesh, "pipe"), None, None, None
    if isinstance(model, Pipelined) and pipe_size > 1:
        placement = placement_for(mesh, options, model, params)
    specs = param_specs(mesh, options, model, params, placement)
    if placement is not None and not plan.by_tokens:  # the plan that it is arranged into is resolved again
        schedule = options.schedule_for(pipe_size, plan.num_microbatches)
        layout = layout_for(options, params, schedule)
        check_rows(placement, plan.rows_per_microbatch, pipe_size)
    sums = grad_dtypes(options, params)
    _check_options(options, model, params, pipe_size, layout, sums)
    resolved = Resolved(
        mesh,
        options,
        model,
        plan,
        specs=Tree.of(specs),
        grad_specs=Tree.of(grad_specs(mesh, options, params, specs)),
        dtypes=Tree.of(_compute_dtypes(options, model, params)),
        sums=Tree.of(sums),
        schedule=schedule,
        layout=layout,
        placement=placement,
    )
    check_overlap(options.overlap_grad_reduce, isinstance(model, Pipelined), resolved.obstacle_to_overlap)
    return resolved


def _check_options(
    options: EngineOptions,
    model: LossFn | Pipelined,
    params: PyTree,
    pipe_size: int,
    layout: pipe.Layout | None,
    sums: PyTree,
) -> None:
    """Raises ValueError for options that do not go with the model, its layers or the dtypes of its gradients.

    layout: None without a pipeline, and in one for a plan of tokens that is not arranged yet.
    """
    if not isinstance(model, Pipelined):
        _check_loss_fn(options)
    elif layout is not None:
        _check_layers(options, layout.longest)
    elif pipe_size == 1:
        _check_layers(options, num_layers(params))
    _check_halves(options, model)
    for dtype in sorted(set(jax.tree.leaves(sums)), key=str):
        check_reduce_dtype(options.reduce_dtype, dtype)


def _check_loss_fn(options: EngineOptions) -> None:
    """Raises ValueError for an option that only a `Pipelined` has."""
    if isinstance(options.fsdp_gather, int):
        raise Refused(
            f"fsdp_gather={options.fsdp_gather} is a number of layers, which only a Pipelined model has; use "
            'fsdp_gather="layer"',
            [{"fsdp_gather": "layer"}],
        )


def _check_layers(options: EngineOptions, number: int) -> None:
    """Raises ValueError for options that count more layers than the longest stage has."""
    check_remat_layers(options.remat or "none", number)
    check_gathered_layers(options.fsdp_gather, number)


def _check_halves(options: EngineOptions, model: LossFn | Pipelined) -> None:
    """Raises ValueError where the second half of a layer is to be gathered apart, and the model does not name it."""
    if options.gather_ahead == "half" and not (isinstance(model, Pipelined) and _names_halves(model)):
        raise Refused(
            'gather_ahead="half" needs a Pipelined model whose halves name the parameters of the second one '
            "(Halves.second_params), which this model lacks; use gather_ahead=True",
            [{"gather_ahead": True}],
        )


def _names_halves(model: Pipelined) -> bool:
    return model.halves is not None and bool(model.halves.second_params)


def layout_for(options: EngineOptions, params: PyTree, schedule: Schedule) -> pipe.Layout:
    """Returns which layers of the given parameters each device has.

    Raises:
      ValueError: they do not divide, or are not as many as the stages take.
    """
    number, counts, placement = num_layers(params), options.layers_per_stage, schedule.placement
    if options.cuts_layers and not options.even:
        layout = pipe.layout_of(sum(counts or ()), placement, counts)
        if number != layout.num_places:
            raise Refused(
                f'with layer_order="pipeline" and layers_per_stage={list(counts or ())} the stacked layers must be '
                f"{layout.num_places}, as many as the longest stage has for each, got {number}; use "
                "fb.layer_order(model, params, plan).to_pipeline(params)"
            )
    else:
        layout = pipe.layout_of(number, placement, counts)
    return replace(layout, arranged=options.layer_order == "pipeline")


def placement_for(mesh: Mesh, options: EngineOptions, model: Pipelined, params: PyTree) -> str:
    """Returns where a pipeline computes this model's head: "vocabulary", "rows" or "last"."""
    sizes = axis_size(mesh, "pipe"), axis_size(mesh, "tensor")
    return choose_placement(options.head_placement, model, outer_params(params), *sizes)


def param_specs(
    mesh: Mesh, options: EngineOptions, model: LossFn | Pipelined, params: PyTree, placement: str | None
) -> PyTree:
    """Returns where each parameter is placed: a tree of PartitionSpec over all axes but data."""
    pipelined = isinstance(model, Pipelined)
    rule = options.param_specs or (model.param_specs if pipelined else None)
    tensor_specs = (
        specs_like(params, rule(params))
        if rule
        else annotations.tensor_specs(params, mesh, stacked=pipelined)
    )
    dims = None
    if isinstance(model, Pipelined) and placement is not None:
        dims = restrict_to(params, _pipe_dims(options, model, params, placement))
    return sharding.param_specs(params, mesh, tensor_specs, dims, stacked=pipelined)


def grad_specs(mesh: Mesh, options: EngineOptions, params: PyTree, specs: PyTree) -> PyTree:
    """Returns where each gradient is placed: as its parameter, under ZeRO-1 and ZeRO-2 cut over data as well."""
    trained = pruned(options.trainable, params)
    specs = like(trained, specs)
    return specs if options.optimizer_sharding == "none" else sharding.optimizer_specs(specs, trained, mesh)


def grad_dtypes(options: EngineOptions, params: PyTree) -> PyTree:
    """Returns the dtype of each gradient, that in which it is summed."""

    def one(leaf):
        widest = jnp.float64 if leaf.dtype == jnp.float64 else jnp.float32
        return jnp.dtype(options.accum_dtype or widest)

    return jax.tree.map(one, pruned(options.trainable, params))


def _pipe_dims(options: EngineOptions, model: Pipelined, params: PyTree, placement: str) -> PyTree:
    """Returns the dim of each leaf that the stages share out, -1 where each has all of it."""
    outer = outer_params(params)
    if HEADS[placement].cuts_vocabulary and model.vocabulary is not None:
        dims = model.vocabulary.dims(outer)
    else:
        dims = jax.tree.map(lambda _: -1, outer)
    return dims | {"layers": jax.tree.map(lambda _: 0 if options.cuts_layers else -1, params["layers"])}


def _compute_dtypes(options: EngineOptions, model: LossFn | Pipelined, params: PyTree) -> PyTree:
    """Returns what each leaf is cast to. What is counted stays as it is, and so do integers, which are frozen."""
    counted = counted_of(model)
    stays = jax.tree.map(lambda _: False, params) if counted is None else counted.leaves(params)

    def one(leaf, stay):
        is_cast = options.compute_dtype and not stay and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.dtype(options.compute_dtype if is_cast else leaf.dtype)

    return jax.tree.map(one, params, stays)
