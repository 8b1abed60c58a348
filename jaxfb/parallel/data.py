"""The data and fsdp axes: how parameters come together before the forward, how gradients go apart after it.

Context and expert axes are further fsdp axes for the parameters, the latter for those that are not experts': shards are
over all of these axes together (`sharding.param_specs`).

FSDP gathers are written by hand so that their number, order and bytes are ours to choose and to test. All
functions here run inside `jax.shard_map` and see one device's shard.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.parallel import tensor
from jaxfb.parallel.collectives import all_gather, psum, reduce_scatter, steps_apart
from jaxfb.parallel.sharding import axes_of, dim_of, shards_of
from jaxfb.parallel.stored_dtype import as_stored
from jaxfb.platforms.compat import custom_vjp

PyTree = Any
LARGEST_SCATTER = 2**28
"""Bytes of a gradient that are widened at a time before they are reduced: of an embedding or a head, which are large
where nothing else is."""


def compute_params(params: PyTree, specs: PyTree, gather: str, dtypes: PyTree, sums: PyTree) -> PyTree:
    """Returns the parameters as the microbatch loop reads them: cast once to `dtypes`, and under "step" gathered once.

    Under "layer" a leaf that is cut into shards stays so, cast to the dtype of its gradient's sum where that is wider:
    `gather_parameters` gathers it where it is used, and its gradient is scattered in the shard's dtype.
    """

    def prepare(leaf, spec, dtype, sum_dtype):
        if gather == "layer" and shards_of(spec) is not None:
            return leaf.astype(jnp.promote_types(leaf.dtype, sum_dtype))
        return _gather(leaf.astype(dtype), spec)

    return jax.tree.map(prepare, params, specs, dtypes, sums)


def gather_parameters(
    shards: PyTree,
    specs: PyTree,
    dtypes: PyTree,
    trained: PyTree,
    reduce_dtype: Any = None,
    stored: bool = False,
) -> PyTree:
    """All-gathers the shards in the compute dtypes; the transpose is one reduce-scatter each.

    trained: tree of bool. What is not is gathered without a rule for a gradient, whose name would hide the gather from
      a remat policy. reduce_dtype, stored: as for `gather_shard`.
    """

    def gather_leaf(leaf, spec, dtype, trains):
        if shards_of(spec) is None:
            return leaf
        if trains:
            return gather_shard(leaf, spec, dtype, reduce_dtype, stored)
        return _gather(leaf.astype(dtype), spec)

    return jax.tree.map(gather_leaf, shards, specs, dtypes, trained)


@custom_vjp(1, 2, 3, 4)
def gather_shard(
    shard: jax.Array, spec: P, dtype: Any, reduce_dtype: Any = None, stored: bool = False
) -> jax.Array:
    """Gathers one leaf's shards, in `dtype`; its gradient is summed in `reduce_dtype`, None: the shard's dtype.

    stored: the shard is read as `as_stored` does.
    """
    return _gather((as_stored(shard) if stored else shard).astype(dtype), spec)


def _gather_forward(shard, spec, dtype, reduce_dtype, stored):
    # not `gather_shard` again: a remat policy would see that name, not all_gather, and keep the whole weight
    read = as_stored(shard) if stored else shard
    return _gather(read.astype(dtype), spec), jnp.zeros((0,), shard.dtype)


def _gather_backward(spec, dtype, reduce_dtype, stored, like, cotangent):
    return (_scatter_shard(cotangent, like.dtype, spec, reduce_dtype).astype(like.dtype),)


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

    A dim cut into shards or over data (ZeRO-1) is reduce-scattered, the other axes are all-reduced; under
    gather="layer" into shards it was already scattered by the backward of `gather_parameters`, and with
    `scattered_over_data` over data by `scatter_over_data`. What pipe or expert cuts is a stage's or an
    expert's own, and not summed over it.

    It runs after the last microbatch, or a layer at a time in its backward (`last_microbatch.py`).
    """

    def reduce(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
        shards, over_data = shards_of(spec), dim_of(grad_spec, "data")
        summed = set() if shards is None else set(shards[1])
        if gather != "layer":
            grad = _to_shards(grad, grad_spec)
        if "data" in axes and over_data is not None:
            summed.add("data")
            grad = grad if scattered_over_data else _scatter(grad, ("data",), over_data, grad_spec)
        summed |= {axis for entry in spec for axis in axes_of(entry) if axis in ("pipe", "expert")}
        rest = tuple(axis for axis in axes if axis not in summed)
        return psum(grad, rest) if rest else grad

    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(reduce, grads, specs, grad_specs)


def to_shards(grads: PyTree, specs: PyTree, reduce_dtype: Any = None, steps: slice = slice(None)) -> PyTree:
    """Sums gradients of whole leaves and cuts them into shards as their parameters: the transpose of
    `gather_parameters`.

    steps: those that run, of as many as `steps_to_shards` returns.
    """
    return jax.tree.map(lambda grad, spec: _to_shards(grad, spec, reduce_dtype, steps), grads, specs)


def steps_to_shards(specs: PyTree, in_halves: bool = False, exposed: bool = False) -> int:
    """Returns in how many steps `to_shards` is to run with other work in between; leaves of fewer begin with them.

    in_halves, exposed: as of `steps_apart`.
    """
    found = [shards_of(spec) for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))]
    return max(
        (steps_apart(shards[1], in_halves, exposed) for shards in found if shards is not None), default=1
    )


def before_scatter(grads: PyTree, specs: PyTree, dtypes: PyTree, reduce_dtype: Any = None) -> PyTree:
    """Casts gradients of whole leaves to what they are summed into shards in, and annotates them as `tensor` cuts their
    parameters.

    dtypes: tree of those that they get where `reduce_dtype` is None or the leaf is in no shards.
    """

    def cut(grad: jax.Array, spec: P, dtype: Any) -> jax.Array:
        entries = (*spec, *(None,) * (grad.ndim - len(spec)))
        grad = tensor.constrain(grad, *(tensor.AXIS if entry == tensor.AXIS else None for entry in entries))
        given = None if shards_of(spec) is None else reduce_dtype
        return grad.astype(given or dtype)

    return jax.tree.map(cut, grads, specs, dtypes)


def scatter_over_data(grad_specs: PyTree, reduce_dtype: Any = None):
    """Returns a function from one microbatch's gradients to their sums over data, each leaf cut as in `grad_specs`
    (ZeRO-2).

    Leaves that data does not cut stay as they are, and wait for `reduce_gradients`.
    """

    def scatter(grad: jax.Array, spec: P) -> jax.Array:
        dim = dim_of(spec, "data")
        return grad if dim is None else _scatter(grad, ("data",), dim, spec, reduce_dtype).astype(grad.dtype)

    def scatter_all(grads: PyTree) -> PyTree:
        with jax.named_scope("scatter_gradients"):
            return jax.tree.map(scatter, grads, grad_specs)

    return scatter_all


def _scatter_shard(grad: jax.Array, shard_dtype: Any, spec: P, reduce_dtype: Any) -> jax.Array:
    """Sums into shards in a dtype that may be wider; of a large gradient one block is widened at a time."""
    shards, dtype = shards_of(spec), jnp.dtype(reduce_dtype or shard_dtype)
    if shards is None or dtype.itemsize <= grad.dtype.itemsize:
        return _to_shards(grad.astype(dtype), spec, reduce_dtype)
    return tensor.on_shards(lambda whole: _scatter_in_blocks(whole, dtype, *shards), grad, spec)


def _scatter_in_blocks(grad: jax.Array, wide: Any, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's shard along `dim` of the sum in `wide`, block by block."""
    devices, shape = math.prod(map(lax.axis_size, axes)), grad.shape
    along, number = _blocks(shape, dim, devices, jnp.dtype(wide).itemsize)
    if number == 1:
        return reduce_scatter(grad.astype(wide), axes, dim)
    parts = devices if along == dim else 1  # of each device's share a part, or a part of all
    size = shape[along] // parts // number
    split = grad.reshape(*shape[:along], parts, number * size, *shape[along + 1 :])

    def put(index, whole):
        block = lax.dynamic_slice_in_dim(split, index * size, size, along + 1)
        block = block.reshape(*shape[:along], parts * size, *shape[along + 1 :])
        scattered = reduce_scatter(block.astype(wide), axes, dim)
        return lax.dynamic_update_slice_in_dim(whole, scattered, index * size, along)

    whole = jnp.zeros((*shape[:dim], shape[dim] // devices, *shape[dim + 1 :]), wide)
    return lax.fori_loop(0, number, put, whole)


def _blocks(shape: tuple[int, ...], dim: int, devices: int, itemsize: int) -> tuple[int, int]:
    """Returns (dim to cut, number of blocks): the fewest blocks that are not too large and fill a TPU's tiles.

    Of the scattered dim each device's share is cut, where that can be; otherwise another dim.
    """
    needed = -(-math.prod(shape) * itemsize // LARGEST_SCATTER)
    if needed > 1:
        for along in sorted(range(len(shape)), key=lambda one: one != dim):
            size = shape[along] // (devices if along == dim else 1)
            tile = 128 if along == len(shape) - 1 else 16
            numbers = [n for n in range(2, 65) if size % (n * tile) == 0]
            if numbers:
                return along, next((n for n in numbers if n >= needed), numbers[-1])
    return dim, 1


def _gather(leaf: jax.Array, spec: P) -> jax.Array:
    """Gathers the shards of a leaf that is cut into some, each tensor shard by itself."""
    shards = shards_of(spec)
    if shards is None:
        return leaf
    dim, axes = shards
    return tensor.on_shards(lambda shard: all_gather(shard, axes, dim), leaf, spec)


def _to_shards(grad: jax.Array, spec: P, dtype: Any = None, steps: slice = slice(None)) -> jax.Array:
    """Sums the gradient of a leaf and cuts it into the shards of `spec`, if that has some; see `_scatter`."""
    shards = shards_of(spec)
    return grad if shards is None else _scatter(grad, shards[1], shards[0], spec, dtype, steps)


def _scatter(
    grad: jax.Array, axes: tuple[str, ...], dim: int, spec: P, dtype: Any = None, steps: slice = slice(None)
) -> jax.Array:
    """Sums over axes and cuts over them along `dim`, each tensor shard by itself; dtype, steps: of `reduce_scatter`."""
    return tensor.on_shards(lambda whole: reduce_scatter(whole, axes, dim, dtype, steps), grad, spec)
