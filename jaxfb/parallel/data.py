"""The data and fsdp axes: how parameters come together before the forward, how gradients go apart after it.

FSDP gathers are written by hand so that their number, order and bytes are ours to choose and to test. All
functions here run inside `jax.shard_map` and see one device's shard.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxfb.compat import custom_vjp
from jaxfb.parallel import tensor
from jaxfb.parallel.collectives import all_gather, psum, reduce_scatter
from jaxfb.parallel.sharding import axes_of, dim_of

PyTree = Any
GATHERS = ("layer", "step")


def compute_params(params: PyTree, specs: PyTree, gather: str, dtypes: PyTree, sums: PyTree) -> PyTree:
    """Returns the parameters as the microbatch loop reads them: cast once to `dtypes`, and under "step" gathered once.

    Under "layer" a leaf that fsdp cuts stays a shard, cast to the dtype of its gradient's sum where that is wider:
    `materialize` gathers it where it is used, and its gradient is scattered in the shard's dtype.
    """

    def prepare(leaf, spec, dtype, sum_dtype):
        if dim_of(spec, "fsdp") is None:
            return leaf.astype(dtype)
        if gather == "layer":
            return leaf.astype(jnp.promote_types(leaf.dtype, sum_dtype))
        return _gather(leaf.astype(dtype), spec)

    return jax.tree.map(prepare, params, specs, dtypes, sums)


def materialize(shards: PyTree, specs: PyTree, dtypes: PyTree, trained: PyTree) -> PyTree:
    """All-gathers the shards over fsdp in the compute dtypes; the transpose is one reduce-scatter each.

    trained: tree of bool. What is not is gathered without a rule for a gradient, whose name would hide the gather from
      a remat policy.
    """

    def bring(leaf, spec, dtype, trains):
        if dim_of(spec, "fsdp") is None:
            return leaf
        return gather_shard(leaf, spec, dtype) if trains else _gather(leaf.astype(dtype), spec)

    return jax.tree.map(bring, shards, specs, dtypes, trained)


@custom_vjp(1, 2)
def gather_shard(shard: jax.Array, spec: P, dtype: Any) -> jax.Array:
    """Gathers one leaf over fsdp, in `dtype`; its gradient is summed in the shard's dtype."""
    return _gather(shard.astype(dtype), spec)


def _gather_forward(shard, spec, dtype):
    # not `gather_shard` again: a remat policy would see that name, not all_gather, and keep the whole weight
    return _gather(shard.astype(dtype), spec), jnp.zeros((0,), shard.dtype)


def _gather_backward(spec, dtype, like, cotangent):
    return (_scatter(cotangent.astype(like.dtype), "fsdp", spec),)


gather_shard.defvjp(_gather_forward, _gather_backward)


def reduce_gradients(
    grads: PyTree,
    specs: PyTree,
    grad_specs: PyTree,
    axes: tuple[str, ...],
    gather: str,
    scattered_over_data: bool = False,
) -> PyTree:
    """Sums the local gradients over `axes`, each leaf once, cut as in `grad_specs`.

    A dim cut over fsdp or data (ZeRO-1) is reduce-scattered, the other axes are all-reduced; under
    gather="layer" the fsdp part was already scattered by the backward of `materialize`, and with
    `scattered_over_data` that of data by `scatter_over_data`. What pipe or expert cuts is a stage's or an
    expert's own, and not summed over it.
    """

    def reduce(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
        summed = {"fsdp"} if gather == "layer" and dim_of(spec, "fsdp") is not None else set()
        summed |= {"data"} if scattered_over_data and dim_of(grad_spec, "data") is not None else set()
        for axis in ("fsdp", "data"):
            if axis in axes and axis not in summed and dim_of(grad_spec, axis) is not None:
                grad = _scatter(grad, axis, grad_spec)
                summed.add(axis)
        summed |= {axis for entry in spec for axis in axes_of(entry) if axis in ("pipe", "expert")}
        rest = tuple(axis for axis in axes if axis not in summed)
        return psum(grad, rest) if rest else grad

    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(reduce, grads, specs, grad_specs)


def to_shards(grads: PyTree, specs: PyTree) -> PyTree:
    """Sums over fsdp of gradients of whole leaves, each cut as its parameter: the transpose of `materialize`."""

    def cut(grad, spec):
        return grad if dim_of(spec, "fsdp") is None else _scatter(grad, "fsdp", spec)

    return jax.tree.map(cut, grads, specs)


def scatter_over_data(grad_specs: PyTree):
    """Returns a function from one microbatch's gradients to their sums over data, each leaf cut as in `grad_specs`
    (ZeRO-2).

    Leaves that data does not cut stay as they are, and wait for `reduce_gradients`.
    """

    def scatter(grad: jax.Array, spec: P) -> jax.Array:
        return grad if dim_of(spec, "data") is None else _scatter(grad, "data", spec)

    def scatter_all(grads: PyTree) -> PyTree:
        with jax.named_scope("scatter_gradients"):
            return jax.tree.map(scatter, grads, grad_specs)

    return scatter_all


def _gather(leaf: jax.Array, spec: P) -> jax.Array:
    """Gathers over fsdp, each tensor shard by itself."""
    dim = dim_of(spec, "fsdp")
    return leaf if dim is None else tensor.on_shards(lambda shard: all_gather(shard, "fsdp", dim), leaf, spec)


def _scatter(leaf: jax.Array, axis: str, spec: P) -> jax.Array:
    """Sums over an axis and cuts over it as `spec` has it, each tensor shard by itself."""
    dim = dim_of(spec, axis)
    return (
        leaf if dim is None else tensor.on_shards(lambda whole: reduce_scatter(whole, axis, dim), leaf, spec)
    )
