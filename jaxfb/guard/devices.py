"""Compares devices: arrays that must be equal on several of them, and one computation that all of them repeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.totals import sums_by_device

TEST_SIZE, TEST_ROUNDS = 128, 4


def differing_replicas(leaves: Mapping[str, jax.Array]) -> dict[str, list[int]]:
    """Returns, for each array whose copies are not the same bits everywhere, the ids of the devices that deviate.

    Devices that keep the same part of an array are compared with each other; those outvoted deviate, or all of them
    where no value has a majority. Every process of a job must call it.

    Args:
      leaves: arrays on one mesh, by name.
    """
    found = sums_by_device(leaves)
    return {name: bad for name, leaf in leaves.items() if (bad := _deviating(_parts(leaf, found[name])))}


def failed_self_test(mesh: Mesh) -> list[int]:
    """Runs one fixed computation on every device of the mesh; returns the ids of those whose bits deviate.

    Matrix products and elementwise functions, in float32 and bfloat16. Every process of a job must call it.
    """
    found = sums_by_device({"test": _self_test(mesh)()})["test"]
    return _deviating({"the same": found})


def outvoted(values: Mapping[int, Hashable]) -> list[int]:
    """Returns the keys whose value is not that of more than half; all of them where there is no such value."""
    value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count > len(values):
        return sorted(key for key, other in values.items() if other != value)
    return sorted(values)


def _deviating(parts: Mapping[Any, Mapping[int, Hashable]]) -> list[int]:
    return sorted(device for copies in parts.values() for device in outvoted(copies))


def _parts(leaf: jax.Array, sums: Mapping[int, Hashable]) -> dict[Any, dict[int, Hashable]]:
    """Returns the checksums of an array by the part of it that a device keeps, then by device."""
    parts: dict[Any, dict[int, Hashable]] = defaultdict(dict)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        place = tuple((part.start, part.stop) for part in index)
        parts[place][device.id] = sums[device.id]
    return parts


@lru_cache(maxsize=8)
def _self_test(mesh: Mesh) -> Any:
    """Returns a program without arguments whose f32[devices, TEST_SIZE] has one row from each device."""

    def one_device() -> jax.Array:
        x = jnp.cos(jnp.arange(TEST_SIZE**2, dtype=jnp.float32)).reshape(TEST_SIZE, TEST_SIZE)
        total = jnp.zeros([TEST_SIZE], jnp.float32)
        for dtype in (jnp.float32, jnp.bfloat16):
            y = x.astype(dtype)
            for _ in range(TEST_ROUNDS):
                y = jnp.tanh(y @ y.T * np.asarray(TEST_SIZE**-0.5, dtype))
            total = total + y.astype(jnp.float32).sum(0)
        return total[None]

    return jax.jit(
        jax.shard_map(one_device, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False)
    )
