"""The program of one call:

    microbatches -> weights -> seeds -> forward and backward -> one reduction -> records of the global batch

one `jax.shard_map`, manual over every axis but tensor. What happens between seeds and reduction is a `Core`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.cores import Core
from jaxfb.forward_backward.loss import checked
from jaxfb.forward_backward.reduce import means_of_microbatches, reduce_metrics, reduce_records
from jaxfb.forward_backward.sequential import sequential
from jaxfb.forward_backward.weights import objective, seeds, term_weights
from jaxfb.mesh import data_parallel, manual_axes, replica_axes
from jaxfb.parallel import sharding
from jaxfb.types import LossFn, LossOutput, Pipelined, Sum

PyTree = Any


def run(
    mesh: Mesh,
    core: Core,
    model: LossFn | Pipelined,
    normalize: str,
    specs: PyTree,
    grad_specs: PyTree | None,
    accum_dtypes: PyTree,
    params: PyTree,
    microbatches: PyTree,
    keys: jax.Array | None,
    grad_scale: jax.Array,
) -> tuple:
    """(grads, loss, terms, metrics, per_microbatch, outputs), whole arrays all; grad_specs None: forward only."""
    axes = tuple(axis for axis in replica_axes(mesh) if mesh.shape[axis] > 1)
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    plain = checked(sequential(model) if isinstance(model, Pipelined) else model)

    def body(params, microbatches, keys, grad_scale):
        held = core.hold(params)
        if grad_specs is None:
            return None, *_records(core.forward(held, microbatches, keys), normalize, mesh, axes)
        weights = term_weights(plain, whole, microbatches, keys)
        seeds = _seeds(weights, normalize, grad_scale, whole, mesh, axes)
        grads, out = core.forward_backward(held, microbatches, keys, seeds, accum_dtypes)
        grads = core.reduce(grads, grad_specs, axes)
        return grads, *_records(out, normalize, mesh, axes)

    manual = partial(jax.tree.map, sharding.manual_part, is_leaf=lambda spec: isinstance(spec, P))
    rows = P(None, replica_axes(mesh))
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(manual(specs), rows, rows, P()),
        out_specs=(None if grad_specs is None else manual(grad_specs), P(), P(), P(), P(), rows),
        axis_names=set(manual_axes(mesh)),
        check_vma=False,
    )(params, microbatches, keys, grad_scale)


def _seeds(local: dict, normalize: str, grad_scale: Any, params: PyTree, mesh: Mesh, axes: tuple) -> dict:
    """Cotangents of this replica's totals; the one collective is a sum of a weight a term."""
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    reduced = {name: weight.sum() for name, weight in local.items()}
    reduced = lax.psum(reduced, axes) if axes else reduced
    num_parts = next(iter(local.values())).shape[0] * data_parallel(mesh)
    return seeds(local, reduced, normalize, num_parts, grad_scale, dtype)


def _records(out: LossOutput, normalize: str, mesh: Mesh, axes: tuple[str, ...]) -> tuple:
    """(loss, terms, metrics, per_microbatch, outputs), reduced over replicas but for the outputs."""
    means = means_of_microbatches(out) if normalize == "microbatch" else {}
    per_microbatch, means = reduce_records((out.terms, means), axes)
    terms = jax.tree.map(lambda records: records.sum(0), per_microbatch)
    if means:
        num_parts = len(next(iter(means.values()))) * data_parallel(mesh)
        terms = {name: Sum(mean.sum(), jnp.asarray(num_parts, mean.dtype)) for name, mean in means.items()}
    return objective(terms, normalize), terms, reduce_metrics(out.metrics, axes), per_microbatch, out.outputs
