"""One call takes all microbatches of a global batch through forward and backward.

    batch -> microbatches -> weights -> seeds -> forward and backward -> one reduction -> ForwardBackwardOutput

This file is the frame; what happens between seeds and reduction is `accumulate.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfb.batch_plan import BatchPlan
from jaxfb.compat import is_traced
from jaxfb.forward_backward import accumulate as core
from jaxfb.forward_backward.loss import checked
from jaxfb.forward_backward.microbatches import merge, row_keys, split, split_keys
from jaxfb.forward_backward.reduce import means_of_microbatches, reduce_metrics, reduce_records
from jaxfb.forward_backward.sequential import num_layers, sequential
from jaxfb.forward_backward.weights import NORMALIZATIONS, objective, seeds, term_weights
from jaxfb.mesh import check_mesh, data_parallel, make_mesh, manual_axes, replica_axes
from jaxfb.forward_backward.remat import REMAT_POLICIES, checkpoint_layer
from jaxfb.parallel import data, sharding
from jaxfb.types import ForwardBackwardOutput, LossFn, LossOutput, Pipelined, Sum

PyTree = Any


def get_forward_backward_func(
    mesh: Mesh | None = None,
    schedule: Any = None,
    *,
    num_chunks: int = 1,
    normalize: str = "global",
    accum_dtype: Any = None,
    compute_dtype: Any = None,
    remat: str = "none",
    fsdp_gather: str = "layer",
    optimizer_sharding: str = "none",
    param_specs: Callable[[PyTree], PyTree] | None = None,
) -> ForwardBackward:
    """Picks accumulation (or, with pipe > 1, the pipeline) and returns one function over whole global batches.

    Its loss and gradient are those of the whole batch on one device, whatever the mesh and the plan: in
    float64 to rounding. See `ForwardBackward.__call__` for the signature.

    Args:
      mesh: from `make_mesh`; None is one device. The rows are split over data, fsdp and expert.
      schedule, num_chunks: the pipeline's; they need a mesh with pipe > 1.
      normalize: "global" divides each term by its weight over the whole global batch; "microbatch" is
        Megatron's mean over microbatches and replicas of total / weight; "none" sums.
      accum_dtype: of the gradient sum; None is float32, or float64 for float64 params.
      compute_dtype: params are cast to it once a call, before the microbatch loop; None leaves them.
      remat: "none", "selective" or "full": what a layer of a `Pipelined` recomputes in its backward.
      fsdp_gather: "layer" gathers shards where they are used, in every microbatch (ZeRO-3): a layer at a
        time for a `Pipelined`, all params for a plain loss function. "step" gathers all once a call, so the
        number of gathers does not depend on the number of microbatches.
      optimizer_sharding: "data" returns gradients cut over data as well (ZeRO-1), by a reduce-scatter.
      param_specs: params -> tree of PartitionSpec naming "tensor" only; default: the `Pipelined`'s own.

    Raises:
      ValueError: an argument is not among the legal choices, or they do not fit together.
    """
    if schedule is not None or num_chunks != 1:
        raise ValueError(
            f"schedule={schedule!r} and num_chunks={num_chunks} belong to a pipeline: they need a mesh with "
            "pipe > 1, this one has pipe=1; leave both out"
        )
    return ForwardBackward(
        check_mesh(make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh),
        _choice("normalize", normalize, NORMALIZATIONS),
        _float_dtype("accum_dtype", accum_dtype),
        _float_dtype("compute_dtype", compute_dtype),
        _choice("remat", remat, REMAT_POLICIES),
        _choice("fsdp_gather", fsdp_gather, data.GATHERS),
        _choice("optimizer_sharding", optimizer_sharding, ("none", "data")),
        param_specs,
    )


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward over whole global batches on one mesh; made by `get_forward_backward_func`."""

    mesh: Mesh
    normalize: str
    accum_dtype: Any
    compute_dtype: Any
    remat: str
    fsdp_gather: str
    optimizer_sharding: str
    tensor_specs: Callable[[PyTree], PyTree] | None

    def __call__(
        self,
        model: LossFn | Pipelined,
        params: PyTree,
        batch: PyTree,
        plan: BatchPlan,
        rng: jax.Array | None = None,
        forward_only: bool = False,
        grad_scale: jax.Array | float = 1.0,
    ) -> ForwardBackwardOutput:
        """Runs every microbatch of `batch` and returns the loss and gradient of the whole of it.

        Equals, on one device, `jax.value_and_grad` of sum over terms of total / weight of all rows at once.
        It may be called directly or inside the caller's own `jax.jit`.

        Args:
          model: `loss_fn(params, microbatch, rng) -> LossOutput | Sum`, or a `Pipelined`.
          params: any pytree of float arrays.
          batch: pytree of [rows, ...] arrays in global row order, or `Microbatches`.
          plan: of purpose "train" (any purpose if forward_only).
          rng: None, one PRNG key (row r gets `fold_in(rng, r)`), or keys [rows].
          forward_only: no backward; `grads` is None.
          grad_scale: float[]; gradients come out multiplied by it (fp16 loss scaling), the loss does not.

        Raises:
          ValueError: plan, mesh, batch and params do not fit, or the loss function breaks its contract.
        """
        _check_call(self, model, params, plan, forward_only)
        microbatches = split(batch, plan).leaves
        keys = split_keys(row_keys(rng, plan), plan)
        params = _place(params, sharding.shardings(self.param_specs(model, params), self.mesh))
        return _run(self, model, plan, forward_only, params, microbatches, keys, grad_scale)

    def param_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Where each parameter lives: a tree of PartitionSpec over fsdp and tensor."""
        pipelined = isinstance(model, Pipelined)
        rule = self.tensor_specs or (model.param_specs if pipelined else None)
        return sharding.param_specs(params, self.mesh, rule and rule(params), stacked=pipelined)

    def grad_specs(self, model: LossFn | Pipelined, params: PyTree) -> PyTree:
        """Where each gradient lives: as its parameter, under ZeRO-1 cut over data as well."""
        specs = self.param_specs(model, params)
        if self.optimizer_sharding == "none":
            return specs
        return sharding.optimizer_specs(specs, params, self.mesh, self.optimizer_sharding)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(fb, model, plan, forward_only, params, microbatches, keys, grad_scale) -> ForwardBackwardOutput:
    """The sharded program: one `shard_map`, manual over every axis but tensor."""
    specs, grad_specs = fb.param_specs(model, params), fb.grad_specs(model, params)
    whole = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, fb.compute_dtype or leaf.dtype), params
    )
    rows = P(None, replica_axes(fb.mesh))

    def body(params, microbatches, keys, grad_scale):
        weights_of = partial(term_weights, _loss_fn(fb, model), whole)
        loss_fn = _loss_fn(fb, model, specs)
        held = data.compute_params(params, specs, fb.fsdp_gather, fb.compute_dtype)
        axes = tuple(axis for axis in replica_axes(fb.mesh) if fb.mesh.shape[axis] > 1)
        if forward_only:
            return None, *_records(fb, core.forward(loss_fn, held, microbatches, keys), axes)
        dtypes = jax.tree.map(lambda leaf: _accum_dtype(leaf.dtype, fb.accum_dtype), params)
        seed = _seeds(fb, weights_of(microbatches, keys), grad_scale, params, axes)
        grads, out = core.accumulate(loss_fn, held, microbatches, keys, seed, dtypes)
        grads = data.reduce_gradients(grads, specs, grad_specs, axes, fb.fsdp_gather)
        return grads, *_records(fb, out, axes)

    manual = partial(jax.tree.map, sharding.manual_part, is_leaf=lambda spec: isinstance(spec, P))
    grads, loss, terms, metrics, per_microbatch, outputs = jax.shard_map(
        body,
        mesh=fb.mesh,
        in_specs=(manual(specs), rows, rows, P()),
        out_specs=(None if forward_only else manual(grad_specs), P(), P(), P(), P(), rows),
        axis_names=set(manual_axes(fb.mesh)),
        check_vma=False,
    )(params, microbatches, keys, grad_scale)
    return ForwardBackwardOutput(loss, terms, grads, metrics, per_microbatch, merge(outputs, plan.rows))


def _loss_fn(fb: ForwardBackward, model: LossFn | Pipelined, specs: PyTree = None) -> LossFn:
    """The model as a loss function of the parameters the loop holds; without `specs`, of whole ones."""
    gathers = specs is not None and fb.fsdp_gather == "layer"
    bring = lambda part: lambda shards: data.materialize(shards, part, fb.compute_dtype)  # noqa: E731
    if not isinstance(model, Pipelined):
        return checked(lambda p, mb, rng: model(bring(specs)(p) if gathers else p, mb, rng))
    remat = partial(checkpoint_layer, name=fb.remat, keep_gathered=not gathers)
    if not gathers:
        return checked(sequential(model, remat))
    outer = {name: spec for name, spec in specs.items() if name != "layers"}
    one_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"], is_leaf=lambda x: isinstance(x, P))
    return checked(sequential(model, remat, bring(outer), bring(one_layer)))


def _seeds(fb: ForwardBackward, local: dict, grad_scale: Any, params: PyTree, axes: tuple[str, ...]) -> dict:
    """Cotangents of this replica's totals; the one collective is a sum of a weight a term."""
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    reduced = {name: weight.sum() for name, weight in local.items()}
    reduced = lax.psum(reduced, axes) if axes else reduced
    num_parts = next(iter(local.values())).shape[0] * data_parallel(fb.mesh)
    return seeds(local, reduced, fb.normalize, num_parts, grad_scale, dtype)


def _records(fb: ForwardBackward, out: LossOutput, axes: tuple[str, ...]) -> tuple:
    """(loss, terms, metrics, per_microbatch, outputs), reduced over replicas but for the outputs."""
    means = means_of_microbatches(out) if fb.normalize == "microbatch" else {}
    per_microbatch, means = reduce_records((out.terms, means), axes)
    terms = jax.tree.map(lambda records: records.sum(0), per_microbatch)
    if means:
        num_parts = len(next(iter(means.values()))) * data_parallel(fb.mesh)
        terms = {name: Sum(mean.sum(), jnp.asarray(num_parts, mean.dtype)) for name, mean in means.items()}
    metrics = reduce_metrics(out.metrics, axes)
    return objective(terms, fb.normalize), terms, metrics, per_microbatch, out.outputs


def _place(params: PyTree, shardings: PyTree) -> PyTree:
    """Moves parameters that live elsewhere, such as on one device or the host, onto the mesh."""

    def move(leaf, target):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == target.device_set:
            return leaf
        return jax.device_put(leaf, target)

    return params if is_traced(params) else jax.tree.map(move, params, shardings)


def _check_call(fb: ForwardBackward, model: Any, params: PyTree, plan: BatchPlan, forward_only: bool) -> None:
    if not isinstance(plan, BatchPlan):
        raise ValueError(
            f"plan must be a jaxfb.BatchPlan, got {plan!r}; sizes are given there and nowhere else"
        )
    if not forward_only:
        plan.require("train")
    replicas = data_parallel(fb.mesh)
    if plan.data_parallel != replicas:
        raise ValueError(
            f"plan {plan.purpose!r} is for data_parallel={plan.data_parallel} replicas, the mesh has "
            f"data * fsdp * expert = {replicas}; make the plan with data_parallel={replicas}"
        )
    _check_params(params, plan, forward_only, fb.accum_dtype)
    if isinstance(model, Pipelined):
        num_layers(params)


def _check_params(params: PyTree, plan: BatchPlan, forward_only: bool, accum_dtype: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and not forward_only:
            raise ValueError(
                f"every parameter must be a float array to have a gradient, params{jax.tree_util.keystr(path)} "
                f"is {jnp.result_type(leaf)}; pass it in the batch or close over it"
            )
    if accum_dtype is not None and jnp.finfo(accum_dtype).bits < 32 and plan.num_microbatches > 1:
        warnings.warn(
            f"accum_dtype={accum_dtype} sums {plan.num_microbatches} microbatches below float32; "
            "leave it None unless the memory is worth the lost bits",
            stacklevel=3,
        )


def _accum_dtype(dtype: Any, asked: Any) -> Any:
    return asked or (jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _choice(name: str, value: Any, legal: tuple[str, ...]) -> Any:
    if value not in legal:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")
    return value


def _float_dtype(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} must be a float dtype such as 'float32' or 'bfloat16', or None, got {value!r}"
        )
    return dtype
