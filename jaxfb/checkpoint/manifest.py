"""The record beside the arrays of a checkpoint: names, shapes and checksums of the leaves, and what they must fit.

Orbax casts dtypes silently and its payloads have no checksum, so both are compared here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxfb.parallel.totals import checksums
from jaxfb.refusal import Refused, StorageError, refuse, shown

WHO = "[checkpoint]"


class Mismatch(Refused):
    """The checkpoint is sound, but of another model, optimizer or dtype: falling back would not help."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by dotted path, in tree order; independent of the classes the tree is made of."""
    named = {}
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
    except Exception as error:  # keys that do not compare, or the flattening of a class of somebody else's
        raise Refused(f"[checkpoint] state must be a pytree that JAX can flatten: {shown(error)}") from None
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise Refused(f"[checkpoint] two leaves are called {name}; rename one of the keys")
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not is_array or getattr(leaf.dtype, "kind", "V") in "OSUMm":
            what = f"an array of {leaf.dtype}" if is_array else f"a {type(leaf).__name__}"
            raise Refused(f"[checkpoint] leaf {name or 'of the state'} is {what}; only arrays can be saved")
        named[name] = leaf
    return named


def check_writable(state: Any, leaves: Mapping[str, Any]) -> None:
    """Refuses what the writer does not take: no array at all, numpy's scalars, and arrays without elements."""
    if not leaves:
        refuse("state", state, "a tree with at least one array", who=WHO)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            refuse(f"leaf {name or 'of the state'}", leaf, "a jax or numpy array", who=WHO)
        if leaf.size == 0:
            raise Refused(
                f"[checkpoint] leaf {name or 'of the state'} has the shape {leaf.shape}, without an element to save; "
                "leave it out of the state"
            )


def shapes_of(leaves: Mapping[str, Any]) -> dict[str, dict]:
    """Returns shape and dtype of each leaf, as JSON."""
    return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in leaves.items()}


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a leaf's shape, dtype and sharding; one without a sharding belongs on the first local device."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def with_sharding_of_its_rank(leaf: jax.Array) -> jax.Array:
    """Returns an array whose sharding has no more dims than it has, as `device_put` and `jit` require.

    On one device Orbax restores a random key with the sharding of its data, which has one dim more.
    """
    lies = leaf.sharding
    if not isinstance(lies, jax.sharding.NamedSharding) or len(lies.spec) <= leaf.ndim:
        return leaf
    place = jax.sharding.NamedSharding(lies.mesh, jax.sharding.PartitionSpec(*lies.spec[: leaf.ndim]))
    data = jax.device_put(jax.random.key_data(leaf), place)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


_ANOTHER_CONFIG = "use the config saved with it, or another run directory"
_ANOTHER_OPTIMIZER = (
    "use the optimizer saved with it, or begin another run with the parameters alone: set model.from to a directory "
    'that `jaxfb export-hf` wrote, or in a program call restore({"params": ...}, partial=True)'
)


def check_fit_of(saved: Mapping, wanted: Mapping, where: str, partial: bool) -> None:
    """Raises Mismatch, with a line for each, where names, shapes or dtypes differ (`shapes_of` both).

    partial: leaves that are only in the checkpoint are accepted.
    """

    def text(leaf):
        return f"{leaf['dtype']}{leaf['shape']}"

    lines = {name: "not in the checkpoint" for name in wanted if name not in saved}
    if not partial:
        lines |= {name: "only in the checkpoint" for name in saved if name not in wanted}
    lines |= {
        name: f"{text(saved[name])} in the checkpoint, {text(leaf)} in this run"
        for name, leaf in wanted.items()
        if name in saved and saved[name] != leaf
    }
    if lines:
        more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
        listing = "".join(
            f"\n  {line}" for line in [f"{name}: {line}" for name, line in lines.items()][:8] + more
        )
        of_optimizer = all(name.startswith("opt_state.") for name in lines)
        raise Mismatch(
            f"[checkpoint] {where} does not fit this run; {_ANOTHER_OPTIMIZER if of_optimizer else _ANOTHER_CONFIG}:"
            f"{listing}"
        )


def sealed(record: Mapping[str, Any]) -> dict:
    """Returns the record with a digest of its content."""
    content = {name: value for name, value in record.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def check_sums(saved: Mapping[str, str | None], loaded: Mapping[str, Any], step: int) -> None:
    """Raises StorageError, with the names of the leaves, where restored arrays are not the bits that were saved."""
    found = checksums({name: leaf for name, leaf in loaded.items() if saved.get(name)})
    changed = [name for name, digits in found.items() if digits != saved[name]]
    if changed:
        more = f" and {len(changed) - 3} more" if changed[3:] else ""
        raise StorageError(f"step {step} differs from what was saved, in {', '.join(changed[:3])}{more}")


def as_json(host: Mapping[str, Any]) -> dict:
    """Returns the values as JSON has them; ValueError for what it lacks."""
    try:
        return json.loads(json.dumps(host))
    except Exception as error:  # what JSON lacks, a dict that contains itself, an integer of too many digits
        raise Refused(f"[checkpoint] host must contain JSON values only: {shown(error)}") from None
