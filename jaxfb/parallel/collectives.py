"""Provides all-gather and reduce-scatter along a mesh axis, in two steps where the TPU compiler has no good collective.

Among all the devices of a TPU slice XLA makes a reduce-scatter an all-reduce of the whole array, twice the bytes on the
wire, and on a three-dimensional torus it runs an all-gather beside nothing: 8B on v5p:4x4x4 takes 12.1 s in place of
9.6 s (libtpu 0.0.48). Among any fewer devices it does neither. So where a group is the whole mesh it is taken as a
grid, and the collective runs across its rows, then within them, for the same bytes; of a group over several axes, along
one after the other.

All functions here run inside `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, get_abstract_mesh

from jaxfb.mesh import kind_of
from jaxfb.platforms.compat import custom_vjp
from jaxfb.platforms.kinds import V5E, V5P, V6E

PyTree = Any
Groups = list[list[int]]
Axes = str | tuple[str, ...]
"""One axis of a mesh, or several, outermost first, that are cut as if they were one."""


def all_gather(shard: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Returns the whole array from its shards along `dim`, as `lax.all_gather(tiled=True)`."""
    for axis, groups in reversed(_steps(axes, "gather")):
        shard = lax.all_gather(shard, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return shard


def reduce_scatter(
    whole: jax.Array, axes: Axes, dim: int, dtype: Any = None, steps: slice = slice(None)
) -> jax.Array:
    """Returns this device's shard along `dim` of the sum over `axes`, as `lax.psum_scatter(tiled=True)`.

    dtype: in which it is sent, summed and returned. None: its own, but 16-bit floats are summed in float32. On CPU, for
      which see `psum_of_one`, those of a `dtype` of 16 bits are too: terms and sum alone are rounded.
    steps: those of its collectives that run; the next ones take what these return.
    """
    return summed_in(dtype, partial(_reduce_scatter, axes=axes, dim=dim, steps=steps), whole)


def steps_apart(axes: Axes, in_halves: bool = False, exposed: bool = False) -> int:
    """Returns in how many steps `reduce_scatter` is to run with other work in between; 1: all at once.

    On v6e each collective is a step: 8B on v6e:8x8 takes 5.69 s and 6.99 GB in place of 6.60 s and 6.72 GB. On v5p that
    gains nothing for one axis: 9.91 s and 7.05 GB in place of 9.88 s and 6.69 GB on v5p:4x4x4; on v5e:16x16, where the
    compiler lets no scatter run beside anything, 6.57 s in place of 6.50 s, gradients sent in bfloat16.

    in_halves: whether a layer's backward begins with its second half (remat="halves"). On v5p each collective is then a
      step if experts are cut too, since the first of two would end before the experts' products begin: six layers of
      Mixtral 8x22B on v5p:4x4x8 take 752 ms and 12.5 GB in place of 770 ms and 12.1 GB; with full recomputation it
      would be 762 ms and 11.8 GB in place of 763 ms and 11.3 GB (libtpu 0.0.48).
    exposed: whether no product would hide the first step if the second followed at once. On v5p each is then a step
      without experts too: where gradients overwrite those that the first step reads, 8B on v5p:4x4x4 takes 9.64 s in
      place of 10.32 s; where activations are kept, 70B on v5p:8x8x8, fsdp 512, 8.58 s in place of 8.75 s. With experts,
      few gradients are cut over all devices.
    """
    gains = _gains_by_steps_apart(get_abstract_mesh(), in_halves if "expert" in axes else exposed)
    return len(_steps(axes, "scatter")) if gains else 1


def scatters_beside_products(kind: str | None) -> bool:
    """Returns whether devices of a kind are known to run reduce-scatters beside products: TPUs, but not v5e."""
    return kind is not None and "TPU" in kind and kind != V5E


def _gains_by_steps_apart(mesh: AbstractMesh, on_v5p: bool) -> bool:
    kind = kind_of(mesh)
    return kind == V6E or (on_v5p and kind in V5P)


def _reduce_scatter(whole: jax.Array, axes: Axes, dim: int, steps: slice) -> jax.Array:
    apart = (steps.start or 0, steps.stop) != (0, None)
    for axis, groups in _steps(axes, "scatter", apart)[steps]:
        whole = lax.psum_scatter(whole, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return whole


def summed_in(dtype: Any, collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns a collective's sum of x in a dtype; None: as of `reduce_scatter`."""
    if dtype is None:
        return _widened(collective, x)
    x = x.astype(dtype)
    return _widened(collective, x) if _on_cpu() else collective(x)


def psum(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Sums every leaf over mesh axes; 16-bit floats are summed in float32 and come back in their own dtype."""
    return jax.tree.map(partial(_widened, partial(lax.psum, axis_name=axes)), tree)


def psum_of_one(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Sums leaves that are zero on all devices but one, which is exact in any dtype: nothing is widened on the wire.

    But on CPU, where XLA aborts on a 16-bit all-reduce inside a `jax.shard_map` that leaves an axis automatic.
    """
    return psum(tree, axes) if _on_cpu() else lax.psum(tree, axes)


def psum_scatter_of_one(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Scatters along `dim` the sum of arrays that are zero on all devices but one; see `psum_of_one`."""
    scatter = partial(lax.psum_scatter, axis_name=axis, scatter_dimension=dim, tiled=True)
    return _widened(scatter, x) if _on_cpu() else scatter(x)


@custom_vjp(1, 2)
def gather_summing_wide(shard: jax.Array, axis: str, dim: int) -> jax.Array:
    """Gathers shards along `dim`; unlike that of `lax.all_gather` its transpose sums 16-bit cotangents in float32."""
    return all_gather(shard, axis, dim)


def _gather_forward(shard, axis, dim):
    return all_gather(shard, axis, dim), None


def _gather_backward(axis, dim, _, cotangent):
    return (reduce_scatter(cotangent, axis, dim),)


gather_summing_wide.defvjp(_gather_forward, _gather_backward)


def _widened(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4):
        return collective(x)
    return collective(x.astype(jnp.float32)).astype(x.dtype)


def _on_cpu() -> bool:
    device = get_abstract_mesh().abstract_device
    return device is None or device.platform == "cpu"


def two_steps(size: int, inner: int) -> tuple[Groups, Groups]:
    """Returns (groups across, groups within) of 0..size-1, which are `inner` neighbours each.

    Scattering across and then within hands out shards in order.
    """
    outer = size // inner
    across = [[part * inner + place for part in range(outer)] for place in range(inner)]
    within = [[part * inner + place for place in range(inner)] for part in range(outer)]
    return across, within


def neighbours(size: int, dims: int | None) -> int | None:
    """Returns the number of devices of a group within (`two_steps`), of `size` in a torus; None if that is a prime.

    dims: number of dimensions of the torus, where gradients wait for the second step of a scatter. The first step then
      runs across all dimensions but the last, so that less is left to wait. None: a group across has 4 devices, since
      a large torus is a multiple of 4 in each dimension.
    """
    divisors = [n for n in range(2, size) if size % n == 0]
    if dims is None:
        return next((size // n for n in (4, 2) if n in divisors), None)
    return max((n for n in divisors if n**dims <= size), default=min(divisors, default=None))


def _steps(axes: Axes, kind: str, apart: bool = False) -> list[tuple[Axes, Groups | None]]:
    """Returns the (axes, groups) of each collective that a scatter consists of, in turn; of a gather in reverse.

    apart: other work runs between the steps of a scatter, so that gradients wait for the second.
    """
    mesh = get_abstract_mesh()
    names = [axes] if isinstance(axes, str) else [axis for axis in axes if mesh.shape[axis] > 1]
    if not _falls_back(names, kind, mesh):
        return [(axes, None)]
    if len(names) > 1:
        return [(axis, None) for axis in names]
    size = lax.axis_size(names[0])
    inner = neighbours(size, torus_dims(kind_of(mesh)) if apart else None)
    return [(names[0], some) for some in two_steps(size, inner)] if inner else [(names[0], None)]


def _falls_back(axes: Sequence[str], kind: str, mesh: AbstractMesh) -> bool:
    """Returns whether XLA's collective among these devices is one that two steps are better than."""
    device = mesh.abstract_device
    if device is None or device.platform != "tpu" or math.prod(mesh.shape[axis] for axis in axes) < mesh.size:
        return False
    return kind == "scatter" or torus_dims(device.device_kind) > 2


def torus_dims(kind: str | None) -> int:
    """Returns how many dimensions the torus of a kind of TPU has: 2, also for an unknown kind, or 3, also for GPUs."""
    return 2 if kind is None or "lite" in kind else 3
