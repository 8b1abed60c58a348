"""The two ways from seeds to gradients, with one interface: accumulation on one stage, and the pipeline.

hold -> forward_backward (or forward) -> reduce. Everything here runs on one device inside `jax.shard_map`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward import accumulate
from jaxfb.forward_backward.ends import PLACEMENTS
from jaxfb.forward_backward.in_place import InPlace
from jaxfb.forward_backward.loss import checked
from jaxfb.forward_backward.pipeline import Executor, Weights
from jaxfb.forward_backward.remat import PIPELINE_KEEPS, checkpoint_layer
from jaxfb.forward_backward.sequential import layer_output, sequential
from jaxfb.forward_backward.stage import WRITTEN_OUT, Stage
from jaxfb.parallel import data, pipe, sharding
from jaxfb.schedules import Schedule
from jaxfb.types import LossFn, LossOutput, Pipelined, outer_params

PyTree = Any


class Core(Protocol):
    """The interface of accumulation and pipeline that the engine calls."""

    @property
    def how(self) -> Execution: ...

    def hold(self, params: PyTree) -> PyTree:
        """Returns the parameters as the loop over microbatches reads them, made once a call."""
        ...

    def forward_backward(self, held, microbatches, keys, seeds, accum_dtypes) -> tuple[PyTree, LossOutput]:
        """Returns local gradients of `held`, and every microbatch's answer, [num_microbatches, ...] leaves."""
        ...

    def forward(self, held, microbatches, keys) -> LossOutput:
        """Returns the answers alone."""
        ...

    def reduce(self, grads: PyTree, grad_specs: PyTree, axes: tuple[str, ...]) -> PyTree:
        """Returns gradients like params, summed over `axes` (and pipe), each leaf once."""
        ...


@dataclass(frozen=True)
class Execution:
    """Options that accumulation and pipeline share: how params are cut, cast and recomputed.

    specs, dtypes, sums: trees like params: where each leaf lives, what it is cast to for the computation, and the
      dtype in which its gradient is summed.
    """

    specs: PyTree
    dtypes: PyTree
    sums: PyTree
    fsdp_gather: str
    remat: str

    @property
    def gathers_in_loop(self) -> bool:
        return self.fsdp_gather == "layer"

    def bring(self, specs: PyTree, dtypes: PyTree):
        """Returns a function from shards to whole parameters, for use inside the loop."""
        return lambda shards: data.materialize(shards, specs, dtypes) if self.gathers_in_loop else shards

    def bring_layer(self):
        """Returns `bring` for one layer, whose specs are those of the stacked leaves without their first dim."""
        one = jax.tree.map(
            lambda spec: P(*spec[1:]), self.specs["layers"], is_leaf=lambda x: isinstance(x, P)
        )
        return self.bring(one, self.dtypes["layers"])

    def bring_outer(self):
        """Returns `bring` for everything beside the layers."""
        return self.bring(outer_params(self.specs), outer_params(self.dtypes))

    def outer_to_shards(self):
        """Returns a function from gradients of what `bring_outer` gives to those of the shards."""
        specs = outer_params(self.specs)
        return lambda grads: data.to_shards(grads, specs) if self.gathers_in_loop else grads

    def stage(self, model: Pipelined, keep: str, **options) -> Stage:
        """Returns a run of the model's layers, which keeps that of its forward."""
        bring = self.bring_layer()

        def layer(shards, hidden, microbatch, rng):
            return layer_output(model.layer(bring(shards), hidden, microbatch, rng))

        if keep == "residuals":
            layer = checkpoint_layer(layer, self.remat, keep_gathered=not self.gathers_in_loop)
        return Stage(layer, keep, **options)


def _over_pipe(spec: P) -> bool:
    return any("pipe" in sharding.axes_of(entry) for entry in spec)


@dataclass(frozen=True)
class Accumulation:
    """A scan over microbatches of the whole model.

    scattered: None, or where gradients live, if each microbatch's are reduce-scattered over data at once (ZeRO-2).
    """

    model: LossFn | Pipelined
    how: Execution
    scattered: PyTree | None = None

    def hold(self, params):
        how = self.how
        return data.compute_params(params, how.specs, how.fsdp_gather, how.dtypes, how.sums)

    def forward_backward(self, held, microbatches, keys, seeds, accum_dtypes):
        arguments = held, microbatches, keys, seeds, accum_dtypes
        if self.scattered is not None:
            return accumulate.accumulate(self._loss_fn(), *arguments, data.scatter_over_data(self.scattered))
        if isinstance(self.model, Pipelined):
            in_place = InPlace(self.model, self._stage(), self.how.bring_outer(), self.how.outer_to_shards())
            if in_place.takes(held, microbatches, keys):
                return in_place.run(*arguments)
        return accumulate.accumulate(self._loss_fn(), *arguments)

    def forward(self, held, microbatches, keys):
        return accumulate.forward(self._loss_fn(), held, microbatches, keys)

    def reduce(self, grads, grad_specs, axes):
        gather, in_loop = self.how.fsdp_gather, self.scattered is not None
        return data.reduce_gradients(grads, self.how.specs, grad_specs, axes, gather, in_loop)

    def _stage(self) -> Stage:
        keep = PIPELINE_KEEPS[self.how.remat]
        return self.how.stage(self.model, "inputs" if keep == "input" else keep)

    def _loss_fn(self) -> LossFn:
        how = self.how
        if not isinstance(self.model, Pipelined):
            bring = how.bring(how.specs, how.dtypes)
            return checked(lambda params, microbatch, rng: self.model(bring(params), microbatch, rng))
        remat = partial(checkpoint_layer, name=how.remat, keep_gathered=not how.gathers_in_loop)
        return checked(sequential(self.model, remat, how.bring_outer(), how.bring_layer()))


@dataclass(frozen=True)
class Pipelining:
    """A schedule over the stages of a `Pipelined`. Outer parameters are gathered once a call, layers as asked."""

    model: Pipelined
    how: Execution
    schedule: Schedule
    layout: pipe.Layout
    head_placement: str
    poison: bool

    def hold(self, params) -> Weights:
        how = self.how
        trees = params, how.specs, how.dtypes, how.sums
        outer, specs, *dtypes = map(outer_params, trees)
        outer = data.compute_params(outer, specs, "step", *dtypes)
        layers, specs, *dtypes = (tree["layers"] for tree in trees)
        layers = data.compute_params(layers, specs, how.fsdp_gather, *dtypes)
        return Weights(outer, pipe.to_chunks(layers, self.layout))

    def forward_backward(self, held, microbatches, keys, seeds, accum_dtypes):
        dtypes = Weights(outer_params(accum_dtypes), accum_dtypes["layers"])
        return self._executor(self.schedule).run(held, microbatches, keys, seeds, dtypes)

    def forward(self, held, microbatches, keys):
        return self._executor(self.schedule.forward_only()).run(held, microbatches, keys, None, None)[1]

    def reduce(self, grads: Weights, grad_specs, axes):
        how, specs = self.how, self.how.specs
        layers = pipe.from_chunks(grads.layers, self.layout, sum(self.layout.layers_per_stage))
        layers = data.reduce_gradients(layers, specs["layers"], grad_specs["layers"], axes, how.fsdp_gather)
        outer = (grads.outer, outer_params(specs), outer_params(grad_specs))
        return data.reduce_gradients(*outer, (*axes, "pipe"), "step") | {"layers": layers}

    def _executor(self, schedule: Schedule) -> Executor:
        how, model, program = self.how, self.model, schedule.program
        keep = PIPELINE_KEEPS[how.remat]
        stage = how.stage(model, keep, padded=not self.layout.even, written_out=WRITTEN_OUT)
        cut = jax.tree.map(_over_pipe, outer_params(how.specs), is_leaf=lambda x: isinstance(x, P))
        ends = PLACEMENTS[self.head_placement](model, cut, program.embed_device, program.loss_device)
        return Executor(program, stage, ends, self.layout, self.poison)
