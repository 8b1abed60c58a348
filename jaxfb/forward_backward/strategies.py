"""The two ways from seeds to gradients, with one interface: accumulation on one stage, and the pipeline.

prepare -> forward_backward (or forward) -> reduce. Everything here runs on one device inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward import accumulate
from jaxfb.forward_backward.in_place import InPlace
from jaxfb.forward_backward.layers.execution import Execution, is_cut_over
from jaxfb.forward_backward.layers.last_microbatch import LastMicrobatch, cuts_layers
from jaxfb.forward_backward.layers.remat import checkpoint_layer
from jaxfb.forward_backward.layers.stage import layers_written_out
from jaxfb.forward_backward.loss_function.loss import checked
from jaxfb.forward_backward.pipeline.buffers import Weights
from jaxfb.forward_backward.pipeline.executor import Executor
from jaxfb.forward_backward.pipeline.last_tick import LastTick
from jaxfb.forward_backward.pipeline.piece_executor import PieceExecutor
from jaxfb.forward_backward.sequential import num_layers, sequential
from jaxfb.parallel import data, pipe
from jaxfb.parallel.annotations import unconstrained
from jaxfb.parts import HEADS
from jaxfb.recomputation import remat_parts
from jaxfb.schedules import Schedule
from jaxfb.trainable import joined, like
from jaxfb.types import CheckedLossFn, LossFn, LossOutput, Pipelined, PyTree, outer_params


class Strategy(Protocol):
    """The interface of accumulation and pipeline that the engine calls."""

    @property
    def execution(self) -> Execution: ...

    def prepare(self, params: PyTree) -> PyTree:
        """Returns the parameters as the loop over microbatches reads them, made once a call."""
        ...

    def forward_backward(
        self, prepared, microbatches, keys, seeds, accum_dtypes, so_far=None
    ) -> tuple[PyTree, LossOutput]:
        """Returns local gradients of `prepared`, and every microbatch's records, [num_microbatches, ...] leaves.

        so_far: local gradients of other rows of the update, to which these are added.
        """
        ...

    def reduced(
        self, prepared, microbatches, keys, seeds, accum_dtypes, grad_specs: PyTree, axes: tuple[str, ...]
    ) -> tuple[PyTree, LossOutput]:
        """Returns `reduce` of the gradients, and the records."""
        ...

    def forward(self, prepared, microbatches, keys) -> LossOutput:
        """Returns the records alone."""
        ...

    def reduce(self, grads: PyTree, grad_specs: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Returns gradients like params, summed over `axes` (and pipe), each leaf once."""
        ...


@dataclass(frozen=True)
class Accumulation:
    """A scan over microbatches of the whole model.

    scattered: None, or where gradients live, if each microbatch's are reduce-scattered over data at once (ZeRO-2).
    """

    model: LossFn | Pipelined
    execution: Execution
    scattered: PyTree | None = None

    def prepare(self, params):
        execution = self.execution
        return data.compute_params(
            params, execution.specs, execution.fsdp_gather, execution.dtypes, execution.shard_dtypes
        )

    def forward_backward(self, prepared, microbatches, keys, seeds, accum_dtypes, so_far=None):
        execution, rest = self.execution, (microbatches, keys, seeds, accum_dtypes)
        if isinstance(self.model, Pipelined) and self.scattered is None:
            in_place = self._in_place(self.model, num_layers(prepared))
            if in_place.takes(prepared, microbatches, keys, accum_dtypes):
                return in_place.run(prepared, *rest, so_far)
        scatter = None
        if self.scattered is not None:
            scatter = data.scatter_over_data(self.scattered, execution.reduce_dtype)
        return accumulate.accumulate(
            self._loss_of_trained(prepared), execution.trained(prepared), *rest, scatter, so_far
        )

    def reduced(self, prepared, microbatches, keys, seeds, accum_dtypes, grad_specs, axes):
        execution, rest = self.execution, (microbatches, keys, seeds, accum_dtypes)
        if execution.overlap_grad_reduce and isinstance(self.model, Pipelined):
            number = num_layers(prepared)
            last = self._last(self.model, number, grad_specs["layers"], axes)
            in_place = replace(self._in_place(self.model, number), last=last)
            if in_place.takes(prepared, microbatches, keys, accum_dtypes):
                grads, out = in_place.run(prepared, *rest)
                return self._reduce_rest(grads, grad_specs, axes), out
        grads, out = self.forward_backward(prepared, *rest)
        return self.reduce(grads, grad_specs, axes), out

    def _reduce_rest(self, grads: PyTree, grad_specs: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Reduces what the last microbatch's backward leaves: all but the layers, and leaves cut among these."""
        specs = self.execution.trained(self.execution.specs)

        def one(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
            return self.reduce(grad, grad_spec, axes, spec) if cuts_layers(grad_spec) else grad

        layers = jax.tree.map(one, grads["layers"], specs["layers"], grad_specs["layers"])
        outer = self.reduce(outer_params(grads), outer_params(grad_specs), axes, outer_params(specs))
        return outer | {"layers": layers}

    def _in_place(self, model: Pipelined, number: int) -> InPlace:
        """Returns the runner that adds gradients of so many layers in place."""
        execution = self.execution
        stage = execution.stage(model, number, in_pipeline=False)
        return InPlace(model, stage, execution.gather_outer(model.tables), execution.keep_layers)

    def _last(
        self, model: Pipelined, number: int, grad_specs: PyTree, axes: tuple[str, ...]
    ) -> LastMicrobatch:
        """Returns the runner of the last microbatch's layers, whose backward reduces their gradients over `axes`."""
        reduce = self.execution.reduce_layer(grad_specs, axes)
        return LastMicrobatch(self.execution.stage(model, number, in_pipeline=False, reduce=reduce), reduce)

    def forward(self, prepared, microbatches, keys):
        return accumulate.forward(self._loss_fn(), prepared, microbatches, keys)

    def reduce(self, grads, grad_specs, axes, specs=None):
        mode, in_loop = self.execution.fsdp_gather, self.scattered is not None
        specs = self.execution.trained(self.execution.specs) if specs is None else specs
        return data.reduce_gradients(grads, specs, grad_specs, axes, mode, in_loop)

    def _loss_of_trained(self, prepared: PyTree) -> CheckedLossFn:
        """Returns the loss as a function of the trained leaves of `prepared` alone."""
        loss_fn = self._loss_fn()
        return lambda trained, microbatch, rng: loss_fn(joined(trained, prepared), microbatch, rng)

    def _loss_fn(self) -> CheckedLossFn:
        execution, model = self.execution, self.model
        if not isinstance(model, Pipelined):
            gather = execution.gather()
            return checked(lambda params, *rest: model(unconstrained(gather(params)), *rest))
        of_part = partial(checkpoint_layer, keep_gathered=not execution.gathers_in_loop)
        remats = [(partial(of_part, name=name), number) for name, number in remat_parts(execution.remat)]
        return checked(sequential(model, remats, execution.gather("outer"), execution.gather_layer()))


@dataclass(frozen=True)
class Pipelining:
    """A schedule over the stages of a `Pipelined`. Outer parameters are gathered once a call, layers as asked."""

    model: Pipelined
    execution: Execution
    schedule: Schedule
    layout: pipe.Layout
    head_placement: str
    poison: bool

    def prepare(self, params) -> Weights:
        execution = self.execution
        trees = params, execution.specs, execution.dtypes, execution.shard_dtypes
        outer, specs, *dtypes = map(outer_params, trees)
        outer = data.compute_params(outer, specs, "step", *dtypes)
        layers, specs, *dtypes = (tree["layers"] for tree in trees)
        layers = data.compute_params(layers, specs, execution.fsdp_gather, *dtypes)
        return Weights(outer, pipe.to_chunks(layers, self.layout))

    def forward_backward(self, prepared, microbatches, keys, seeds, accum_dtypes, so_far=None, last=None):
        dtypes = Weights(outer_params(accum_dtypes), accum_dtypes["layers"])
        outer, model, read = prepared.outer, self.model, prepared
        if len(jax.tree.leaves(dtypes.outer)) < len(jax.tree.leaves(outer)):  # some are frozen
            model = of_trained(model, outer)
            read = prepared._replace(outer=self.execution.trained(outer, "outer"))
        executor = replace(self._executor(self.schedule, prepared, model), last=last)
        return executor.run(read, microbatches, keys, seeds, dtypes, so_far)

    def reduced(self, prepared, microbatches, keys, seeds, accum_dtypes, grad_specs, axes):
        last = None
        if self.execution.overlap_grad_reduce and jax.tree.leaves(accum_dtypes["layers"]):
            last = self._last(grad_specs["layers"], axes)
        grads, out = self.forward_backward(prepared, microbatches, keys, seeds, accum_dtypes, last=last)
        assert grads is not None  # there are seeds
        return self.reduce(grads, grad_specs, axes, layers_are_reduced=last is not None), out

    def _last(self, grad_specs: PyTree, axes: tuple[str, ...]) -> LastTick:
        """Returns what reduces the layers' gradients over `axes` in the last tick."""
        execution = self.execution
        reduce, stacked = (execution.reduce_layer(grad_specs, axes, number) for number in (0, 2))
        return LastTick(reduce, stacked, execution.layer_before_scatter(None))

    def forward(self, prepared, microbatches, keys):
        executor = self._executor(self.schedule.forward_only(), prepared, self.model)
        return executor.run(prepared, microbatches, keys, None, None)[1]

    def reduce(self, grads: Weights, grad_specs, axes, layers_are_reduced: bool = False):
        execution, specs = self.execution, self.execution.trained(self.execution.specs)
        layers = pipe.from_chunks(grads.layers, self.layout, sum(self.layout.layers_per_stage))

        def reduce(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
            if layers_are_reduced and not cuts_layers(grad_spec):
                return grad
            return data.reduce_gradients(grad, spec, grad_spec, axes, execution.fsdp_gather)

        layers = jax.tree.map(reduce, layers, specs["layers"], grad_specs["layers"])
        outer = (grads.outer, outer_params(specs), outer_params(grad_specs))
        return data.reduce_gradients(*outer, (*axes, "pipe"), "step") | {"layers": layers}

    def _executor(self, schedule: Schedule, prepared: Weights, model: Pipelined) -> Executor:
        """Returns what runs a schedule; model: over the trained leaves of `outer` alone, where some are frozen."""
        execution, program = self.execution, schedule.program
        options = {"padded": not self.layout.even, "written_out": layers_written_out()}
        stage = execution.stage(self.model, self.layout.longest, True, schedule.num_pieces, **options)
        specs = execution.trained(outer_params(execution.specs), "outer")
        cut = jax.tree.map(partial(is_cut_over, axis="pipe"), specs)
        placement = HEADS[self.head_placement](model, cut, program.embed_device, program.loss_device)
        executor = Executor if schedule.num_pieces == 1 else PieceExecutor
        whole = execution.keep_layers(prepared.layers, lead=1)
        return executor(program, stage, placement, self.layout, self.poison, whole)


def of_trained(model: Pipelined, outer: PyTree) -> Pipelined:
    """Returns the model as functions of the trained leaves of `outer` alone; the others are constants."""

    def over(function: Callable) -> Callable:
        return lambda trained, *args: function(joined(trained, outer), *args)

    def shared_of(function: Callable) -> Callable:
        return lambda trained: like(trained, function(joined(trained, outer)))

    vocabulary = model.vocabulary
    if vocabulary is not None:
        vocabulary = replace(
            vocabulary,
            embed=over(vocabulary.embed),
            head=over(vocabulary.head),
            shared=None if vocabulary.shared is None else shared_of(vocabulary.shared),
        )
    return replace(model, embed=over(model.embed), head=over(model.head), vocabulary=vocabulary)
