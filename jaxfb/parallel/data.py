"""The data and fsdp axes: how parameters come together before the forward, how gradients go apart after it.

FSDP gathers are written by hand so that their number, order and bytes are ours to choose and to test. All
functions here run inside `jax.shard_map` and see one device's shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.sharding import axes_of, dim_of

PyTree = Any
GATHERS = ("layer", "step")


def compute_params(params: PyTree, specs: PyTree, gather: str, dtypes: PyTree) -> PyTree:
    """The parameters as the microbatch loop holds them: cast once to `dtypes`, and under "step" gathered once.

    Under "layer" a leaf that fsdp cuts stays a shard in its own dtype; `materialize` brings it together
    where it is used, so that its gradient is scattered in the accumulation dtype.
    """

    def prepare(leaf, spec, dtype):
        dim = dim_of(spec, "fsdp")
        if dim is None:
            return leaf.astype(dtype)
        return _gather(leaf.astype(dtype), dim) if gather == "step" else leaf

    return jax.tree.map(prepare, params, specs, dtypes)


def materialize(shards: PyTree, specs: PyTree, dtypes: PyTree) -> PyTree:
    """All-gathers the shards over fsdp in the compute dtypes; the transpose is one reduce-scatter each."""

    def bring(leaf, spec, dtype):
        dim = dim_of(spec, "fsdp")
        return leaf if dim is None else gather_shard(leaf, dim, dtype)

    return jax.tree.map(bring, shards, specs, dtypes)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_shard(shard: jax.Array, dim: int, dtype: Any) -> jax.Array:
    """One leaf gathered over fsdp along `dim`, in `dtype`; its gradient is summed in the shard's dtype."""
    return _gather(shard.astype(dtype), dim)


def _gather_forward(shard, dim, dtype):
    # not `gather_shard` again: a remat policy would see that name, not all_gather, and keep the whole weight
    return _gather(shard.astype(dtype), dim), jnp.zeros((0,), shard.dtype)


def _gather_backward(dim, dtype, like, cotangent):
    return (lax.psum_scatter(cotangent.astype(like.dtype), "fsdp", scatter_dimension=dim, tiled=True),)


gather_shard.defvjp(_gather_forward, _gather_backward)


def reduce_gradients(
    grads: PyTree,
    specs: PyTree,
    grad_specs: PyTree,
    axes: tuple[str, ...],
    gather: str,
    scattered_over_data: bool = False,
) -> PyTree:
    """Sums the local gradients over `axes`, each leaf once, leaving it cut the way `grad_specs` says.

    A dim cut over fsdp or data (ZeRO-1) is reduce-scattered, the other axes are all-reduced; under
    gather="layer" the fsdp part was already scattered by the backward of `materialize`, and with
    `scattered_over_data` that of data by `scatter_over_data`. What pipe or expert cuts is a stage's or an
    expert's own, and not summed over it.
    """

    def reduce(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
        summed = {"fsdp"} if gather == "layer" and dim_of(spec, "fsdp") is not None else set()
        summed |= {"data"} if scattered_over_data and dim_of(grad_spec, "data") is not None else set()
        for axis in ("fsdp", "data"):
            dim = dim_of(grad_spec, axis)
            if axis in axes and axis not in summed and dim is not None:
                grad = lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True)
                summed.add(axis)
        summed |= {axis for entry in spec for axis in axes_of(entry) if axis in ("pipe", "expert")}
        rest = tuple(axis for axis in axes if axis not in summed)
        return lax.psum(grad, rest) if rest else grad

    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(reduce, grads, specs, grad_specs)


def scatter_over_data(grad_specs: PyTree):
    """A function from one microbatch's gradients to their sums over data, each leaf cut as `grad_specs` says (ZeRO-2).

    Leaves that data does not cut stay as they are, and wait for `reduce_gradients`.
    """

    def scatter(grad: jax.Array, spec: P) -> jax.Array:
        dim = dim_of(spec, "data")
        return grad if dim is None else lax.psum_scatter(grad, "data", scatter_dimension=dim, tiled=True)

    def scatter_all(grads: PyTree) -> PyTree:
        with jax.named_scope("scatter_gradients"):
            return jax.tree.map(scatter, grads, grad_specs)

    return scatter_all


def _gather(leaf: jax.Array, dim: int) -> jax.Array:
    return lax.all_gather(leaf, "fsdp", axis=dim, tiled=True)
