"""Reads what parameters carry: Flax's sharding annotations, the placement of arrays, and which leaves are parameters.

Flax's classes are found among the modules that are loaded: who has none of its objects need not wait for its import.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from types import new_class
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.mesh import AUTOMATIC_AXES, axis_size
from jaxfb.parallel.sharding import axes_of, in_layers
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused

PyTree = Any
AXIS = "tensor"
COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "perturbations", "spectral_stats")
STATE_KINDS = ("BatchStat", "Cache", "Intermediate", "Perturbation", "RngState", "OptState")
SPLIT = (
    "train graph, params, rest = nnx.split(model, nnx.Param, ...) and put nnx.merge(graph, params, rest, copy=True) "
    "together in the loss function, where `rest` stays as it is"
)


def tensor_specs(params: PyTree, mesh: Mesh, stacked: bool = False) -> PyTree | None:
    """Returns the PartitionSpecs over "tensor" annotated on the parameters, as a tree like them.

    A parameter's annotation counts, `nnx.with_partitioning` in NNX or `nn.with_partitioning` in Linen, else the
    NamedSharding of an array that is cut over an axis of that name; other axes are jaxfb's own affair. None: the mesh
    has no tensor axis, or nothing is cut over it. (While a function is traced arrays do not tell where they lie.)

    Raises:
      ValueError: an annotation names an axis that is none of the mesh, or has more entries than its parameter dims.
    """
    if axis_size(mesh, AXIS) == 1:
        return None
    specs: list[P] = []
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_flax):
        leaves = jax.tree.leaves(node)
        spec = _annotation(node) if _is_flax(node) else None
        first = P(None) if stacked and in_layers(path) else P()
        specs += [
            _placement(leaf) if spec is None else _checked(path, spec, leaf, mesh, first) for leaf in leaves
        ]
    return jax.tree.unflatten(jax.tree.structure(params), specs) if any(map(len, specs)) else None


def check_kinds(params: PyTree) -> None:
    """Raises ValueError for what Flax keeps beside parameters, such as running statistics: no gradient moves it."""
    if isinstance(params, Mapping) and "params" in params:
        beside = [name for name in COLLECTIONS if name in params]
        if beside:
            raise Refused(
                f"params[{beside[0]!r}] is a collection of state of Flax, not of parameters, and no gradient moves it; "
                "train variables['params'] alone and close over the rest"
            )
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_flax):
        kinds = [kind.__name__ for kind in type(node).__mro__ if _is_flax(node)]
        if any(kind in STATE_KINDS for kind in kinds):
            raise Refused(
                f"params{jax.tree_util.keystr(path)} is a {kinds[0]} of NNX, not a Param, and no gradient moves it; "
                f"{SPLIT}"
            )


def check_statistics(params: PyTree, read: Sequence[bool]) -> None:
    """Raises ValueError for running statistics that lost their kind on the way, as in `nnx.to_pure_dict`.

    They are known by their names, "mean" and "var" side by side, and by a loss that reads neither.

    Args:
      read: for each leaf whether the loss depends on it.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    unread = {path[:-1]: set() for path in paths if path}
    for path, used in zip(paths, read, strict=True):
        if path and not used:
            unread[path[:-1]].add(str(getattr(path[-1], "key", getattr(path[-1], "name", ""))))
    for parent, names in unread.items():
        if {"mean", "var"} <= names:
            raise Refused(
                f"params{jax.tree_util.keystr(parent)} has running statistics, 'mean' and 'var', which the loss does "
                f"not read and no gradient moves; {SPLIT}"
            )


def unconstrained(params: PyTree) -> PyTree:
    """Returns parameters whose Linen boxes do not constrain their arrays along axes that jaxfb cuts by itself.

    A Linen module constrains what is in a box when it reads it, which JAX refuses along those axes. Boxes that name
    "tensor" alone, of whatever mesh is in use, stay as they are.
    """

    def one(node):
        meta = sys.modules.get("flax.core.meta")
        if meta is None or not isinstance(node, meta.Partitioned):
            return node
        named = {axis for entry in _annotation(node) or () for axis in axes_of(entry)}
        if not named - set(AUTOMATIC_AXES) and node.mesh is None:
            return node
        return _without_constraint(type(node))(**vars(node))

    return jax.tree.map(one, params, is_leaf=_is_flax)


@cache
def _without_constraint(kind: type) -> type:
    """Returns a class of boxes like `kind` that hand out their array as it is."""
    return new_class(
        kind.__name__,
        (kind,),
        exec_body=lambda body: body.update(unbox=lambda self, apply_constraint=True: self.value),
    )


def warn_if_whole(specs: PyTree, mesh: Mesh) -> None:
    """Warns where a mesh has a tensor axis and no parameter is cut over it."""
    size = axis_size(mesh, AXIS)
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, P))
    if size > 1 and not any(AXIS in axes_of(entry) for spec in leaves for entry in spec):
        warnings.warn(
            f"tensor={size} cuts no parameter, so that {size} devices at a time keep the same ones and repeat the same "
            "work; annotate parameters (nnx.with_partitioning or nn.with_partitioning), pass param_specs=, or make the "
            f"mesh with tensor=1 and {size} times as many along data or fsdp",
            stacklevel=4,
        )


def _is_flax(node: Any) -> bool:
    """Returns whether a node is a Linen box or an NNX Variable, which carry metadata around one array."""
    kinds = (("flax.core.meta", "AxisMetadata"), ("flax.nnx", "Variable"))
    loaded = [getattr(sys.modules.get(module), name, None) for module, name in kinds]
    return isinstance(node, tuple(kind for kind in loaded if kind is not None))


def _annotation(node: Any) -> P | None:
    """Returns the spec that a box or a Variable was given, or None."""
    if hasattr(node, "get_partition_spec"):
        spec, linen = node.get_partition_spec(), sys.modules.get("flax.linen")
        if linen is not None and isinstance(node, linen.LogicallyPartitioned):
            return linen.logical_to_mesh(spec)
        return spec
    metadata = node.get_metadata()
    names = next(
        (metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key)), None
    )
    return None if names is None else P(*_on_mesh(getattr(names, "spec", names), metadata))


def _on_mesh(names: Sequence[Any], metadata: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the entries of an annotation of NNX with axes in place of logical names, by the rules that NNX reads."""
    spmd = sys.modules["flax.core.spmd"]
    rules = spmd.composite_rules(spmd.get_logical_axis_rules(), metadata.get("sharding_rules", ()))
    return spmd.from_sharding_rules(names, rules)


def _placement(leaf: Any) -> P:
    """Returns how an array is already cut over an axis called "tensor"."""
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    return _only_tensor(sharding.spec) if isinstance(sharding, NamedSharding) else P()


def _checked(path: tuple, spec: P, leaf: Any, mesh: Mesh, first: P) -> P:
    spec = P(*first, *spec) if len(first) + len(spec) == len(leaf.shape) else spec
    name = f"params{jax.tree_util.keystr(path)}"
    unknown = [axis for entry in spec for axis in axes_of(entry) if axis not in mesh.axis_names]
    if unknown:
        raise Refused(
            f"{name} is annotated with the axis {unknown[0]!r}, which the mesh lacks; annotate it with {AXIS!r}, "
            "set Flax's logical axis rules around the call, or pass param_specs="
        )
    if len(spec) > len(leaf.shape):
        raise Refused(
            f"{name} of shape {tuple(leaf.shape)} is annotated with {spec}, with more entries than it has dims"
        )
    return _only_tensor(spec)


def _only_tensor(spec: P) -> P:
    entries = [AXIS if AXIS in axes_of(entry) else None for entry in spec]
    return P(*entries) if AXIS in entries else P()
