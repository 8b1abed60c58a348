"""Decides where each parameter is placed: which dim of which leaf is cut over fsdp, expert and context, over tensor,
or (optimizer state) over data.

The rule reads shapes alone, so the engine, the trainer and a checkpoint on another mesh agree without talking.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.mesh import AUTOMATIC_AXES, EXPERT, SHARD_AXES, axis_size, shard_axes
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused

PyTree = Any


def param_specs(
    params: PyTree, mesh: Mesh, tensor_specs: PyTree = None, pipe_dims: PyTree = None, stacked: bool = False
) -> PyTree:
    """Returns the PartitionSpec of every parameter: tensor dims as annotated, one further dim in shards.

    Shards are over fsdp, expert and context together, those of experts over fsdp and context; of a leaf in which these
    divide no free dim, over fewer of them. The dim is one that they divide and tensor leaves free, of those whose
    shards fill a TPU's tiles if there are such: a matrix's rows before its columns, otherwise the largest. A leaf
    without any, and a vector (of a layer, if stacked), is replicated.

    Args:
      params: tree of arrays or ShapeDtypeStructs.
      tensor_specs: tree like params of PartitionSpec that name "tensor" and "expert" alone, or None; an axis
        that the mesh lacks, or has one of, cuts nothing.
      pipe_dims: tree like params of int, the dim that the stages of a pipeline share out (-1: none), or None.
      stacked: params is a dict whose "layers" leaves are [num_layers, ...]; that dim is never cut into shards,
        since layers are gathered one at a time.

    Raises:
      ValueError: a dim of `tensor_specs` is not divided by its axis.
    """
    if tensor_specs is None:
        tensor_specs = jax.tree.map(lambda _: P(), params)
    if pipe_dims is None:
        pipe_dims = jax.tree.map(lambda _: -1, params)

    def spec(path, leaf, tensor_spec, pipe_dim):
        tensor_spec = _on_mesh(tensor_spec, mesh)
        _check_divides(path, leaf.shape, tensor_spec, mesh)
        own = _cut_over_pipe(leaf.shape, tensor_spec, pipe_dim)
        first_dim = int(stacked and in_layers(path))
        if len(leaf.shape) - first_dim < 2:  # a gather of a norm's scale is all latency, its share no memory
            return _shortest(list(own))
        return _in_shards(leaf.shape, own, mesh, first_dim)

    return jax.tree_util.tree_map_with_path(spec, params, tensor_specs, pipe_dims)


def optimizer_specs(specs: PyTree, params: PyTree, mesh: Mesh, axis: str = "data") -> PyTree:
    """Returns the specs of gradients and optimizer state under ZeRO-1: one more dim is cut over `axis`."""
    return jax.tree.map(lambda leaf, spec: _add_axes(leaf.shape, spec, (axis,), mesh), params, specs)


def cut_over_pipe(specs: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """Returns specs in which each leaf of "layers" has one more dim cut over pipe; None where a leaf has none."""

    def one(path, leaf, spec):
        return optimizer_specs(spec, leaf, mesh, "pipe") if spec is not None and in_layers(path) else spec

    return jax.tree_util.tree_map_with_path(one, params, specs)


def moment_specs(opt_state: PyTree, params: PyTree, grad_specs: PyTree) -> PyTree:
    """Returns where optimizer state lives: what mirrors a parameter (its path ends so, same shape) as its gradient."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(grad_specs, is_leaf=lambda spec: isinstance(spec, P))
    known = {
        tuple(map(str, path)): (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def spec(path, leaf):
        names = tuple(map(str, path))
        for start in range(len(names) + 1):
            shape, found = known.get(names[start:], (None, None))
            if shape == leaf.shape:
                return found
        return P()

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
    """Returns NamedShardings of a tree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, _as_of_jit(spec, mesh)), specs, is_leaf=lambda x: isinstance(x, P)
    )


def abstract(tree: PyTree, places: PyTree) -> PyTree:
    """Returns the tree as shapes, dtypes and shardings; `places`: a NamedSharding for every leaf."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places
    )


def adopt(tree: PyTree, targets: PyTree) -> PyTree:
    """Moves to `targets` (a NamedSharding, or a tree of them) what the caller committed to other devices.

    Arrays of the host are copied: a program reads them after its call returned, when the caller may fill them anew.
    """

    def move(leaf, target):
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        elsewhere = isinstance(leaf, jax.Array) and leaf.committed and is_elsewhere(leaf, target)
        return jax.device_put(leaf, target) if elsewhere else leaf

    tree = automatic(tree)
    targets = jax.tree.map(lambda _: targets, tree) if isinstance(targets, NamedSharding) else targets
    return tree if is_traced(tree) else jax.tree.map(move, tree, targets)


def moved_by_program(tree: PyTree, targets: PyTree) -> PyTree:
    """Returns the arrays with other shardings, moved by a compiled program, in which all processes of a job take part.

    `jax.device_put` does the same within one process. The program is kept, and used again for the same shapes and
    shardings.

    Args:
      targets: a NamedSharding for every leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_mover(tuple(jax.tree.leaves(targets)))(leaves))


@lru_cache(maxsize=16)
def _mover(targets: tuple[NamedSharding, ...]) -> Callable[[list], list]:
    return jax.jit(lambda leaves: leaves, out_shardings=list(targets))


def is_elsewhere(leaf: jax.Array, target: NamedSharding) -> bool:
    """Returns whether an array is on other devices than a target's mesh, or on them in another order."""
    have = leaf.sharding
    if have.device_set != target.device_set:
        return True
    return isinstance(have, NamedSharding) and _order(have) != _order(target)


def _order(sharding: NamedSharding) -> list[int]:
    return [device.id for device in np.ravel(np.asarray(sharding.mesh.devices))]


def automatic(tree: PyTree) -> PyTree:
    """Cuts arrays that explicit axes of a mesh cut, as those of `jax.make_mesh` are, over automatic axes instead.

    No number moves between devices.

    Raises:
      ValueError: one is traced, so that its type cannot be changed.
    """

    def one(leaf):
        found = jax.typeof(leaf).sharding if isinstance(leaf, jax.Array) else None
        explicit = found.mesh.explicit_axes if isinstance(found, NamedSharding) else ()
        if not explicit:
            return leaf
        if is_traced(leaf):
            raise Refused(
                f"an array is cut over the explicit axes {', '.join(explicit)} of a mesh in a function that JAX "
                "traces, where jaxfb cannot change them; make that mesh with jaxfb.make_mesh, whose axes are automatic"
            )
        have = leaf.sharding
        assert isinstance(have, NamedSharding)
        types = (AxisType.Auto,) * len(have.mesh.axis_names)
        return jax.device_put(
            leaf, NamedSharding(Mesh(np.asarray(have.mesh.devices), have.mesh.axis_names, types), have.spec)
        )

    return jax.tree.map(one, tree)


def manual_part(spec: P) -> P:
    """Returns the spec as `shard_map` wants it: without the automatic axes."""
    return _naming(spec, lambda axis: axis not in AUTOMATIC_AXES)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the axes that cut one dim, from its entry in a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def dim_of(spec: P, axis: str) -> int | None:
    """Returns the dim that `axis` cuts, or None."""
    return next((dim for dim, entry in enumerate(spec) if entry == axis), None)


def shards_of(spec: P) -> tuple[int, tuple[str, ...]] | None:
    """Returns (the dim that is cut into shards, the axes that have them, outermost first), or None."""
    cuts = ((dim, axes_of(entry)) for dim, entry in enumerate(spec))
    return next(((dim, axes) for dim, axes in cuts if _are_of_shards(axes)), None)


def cuts_experts(entry: Any) -> bool:
    """Returns whether devices have different experts along a dim with this entry in its spec."""
    return EXPERT in axes_of(entry) and not _are_of_shards(axes_of(entry))


def _are_of_shards(axes: tuple[str, ...]) -> bool:
    """Returns whether a dim that these axes cut is in shards; one that `expert` alone cuts is a dim of experts."""
    return axes not in ((), (EXPERT,)) and set(axes) <= set(SHARD_AXES)


def _on_mesh(spec: P, mesh: Mesh) -> P:
    """Returns the spec without the axes that a mesh lacks or has one of: a dim that is not cut is free for fsdp."""
    return _naming(spec, lambda axis: axis_size(mesh, axis) > 1)


def _check_divides(path: tuple, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    for dim, entry in enumerate(spec):
        parts = math.prod(axis_size(mesh, axis) for axis in axes_of(entry))
        if shape[dim] % parts:
            raise Refused(
                f"params{jax.tree_util.keystr(path)} of shape {tuple(shape)} cannot be cut over "
                f"{' * '.join(axes_of(entry))} = {parts} along dim {dim}, which {parts} does not divide; leave that "
                "dim whole, or make the axis a size that divides it"
            )


def _naming(spec: P, wanted: Callable[[str], bool]) -> P:
    kept = (tuple(filter(wanted, axes_of(entry))) for entry in spec)
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def _cut_over_pipe(shape: tuple[int, ...], spec: P, dim: int) -> P:
    entries = list(spec) + [None] * (len(shape) - len(spec))
    if dim >= 0:
        both = ("pipe", *axes_of(entries[dim]))
        entries[dim] = both if len(both) > 1 else "pipe"
    return P(*entries)


def _in_shards(shape: tuple[int, ...], spec: P, mesh: Mesh, first_dim: int) -> P:
    """Returns the spec with one more dim cut over as many of the mesh's `shard_axes` as divide one."""
    experts = any(map(cuts_experts, spec))
    axes = tuple(axis for axis in shard_axes(mesh) if not (experts and axis == EXPERT))
    context = tuple(axis for axis in axes if axis not in ("fsdp", EXPERT))
    fewer = ("fsdp", *context), ("fsdp", EXPERT), ("fsdp",), (EXPERT, *context), context
    for some in (axes, *(one for one in fewer if set(one) <= set(axes))):
        found = _add_axes(shape, spec, _with_another(some, mesh), mesh, first_dim)
        if shards_of(found) is not None:
            return found
    return _shortest(list(spec))


def _as_of_jit(spec: P, mesh: Mesh) -> P:
    """Returns the spec as jit writes the specs of its results: without the axis that `_with_another` added."""
    return P(*(_on_mesh(P(entry), mesh)[0] if EXPERT in axes_of(entry) else entry for entry in spec))


def _with_another(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes; for `expert` alone, which in a spec means experts, also an axis that has one device."""
    if axes != (EXPERT,):
        return axes
    one = next((axis for axis in SHARD_AXES if mesh.shape.get(axis) == 1), None)
    return tuple(axis for axis in SHARD_AXES if axis in (one, EXPERT))


def _add_axes(shape: tuple[int, ...], spec: P, axes: tuple[str, ...], mesh: Mesh, first_dim: int = 0) -> P:
    """Returns the spec with one more dim cut over these axes together, if they divide one that is free."""
    size = axis_size(mesh, *axes)
    entries = list(spec) + [None] * (len(shape) - len(spec))
    free = [
        dim
        for dim in range(first_dim, len(shape))
        if entries[dim] is None and shape[dim] and shape[dim] % size == 0
    ]
    if size > 1 and free:
        best = max(free, key=lambda dim: _preference(shape, dim, size))
        entries[best] = axes if len(axes) > 1 else "".join(axes)
    return _shortest(entries)


def _preference(shape: tuple[int, ...], dim: int, size: int) -> tuple[bool, bool, int, int]:
    """Returns a key that is largest for the dim to cut.

    Of matrices that are cut along their columns libtpu 0.0.48 copies the gradients before it scatters them, and XLA for
    GPUs keeps weights and sums twice. Along rows 8B takes 20.0 s in place of 21.8 s an update on v6e:4x4 with fsdp 16,
    and 39.6 s and 23.1 GB in place of 40.5 s and 25.0 GB on 8 H100.
    """
    return _fills_tiles(shape, dim, shape[dim] // size), dim == len(shape) - 2, shape[dim], dim


def _fills_tiles(shape: tuple[int, ...], dim: int, share: int) -> bool:
    """Returns whether shards of `share` along `dim` end where the tiles of a TPU end, which it otherwise pads.

    A tile is 128 numbers of the last dim by 8 or, in bfloat16, 16 of the one before; dims before those have none.
    """
    return share % {len(shape) - 1: 128, len(shape) - 2: 16}.get(dim, 1) == 0


def _shortest(entries: list) -> P:
    """Drops trailing None, as jit writes the specs of its results; other forms would not compare equal."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)


def in_layers(path: tuple) -> bool:
    """Returns whether a path of the tree of a `Pipelined`'s parameters is below "layers"."""
    return bool(path) and getattr(path[0], "key", None) == "layers"
