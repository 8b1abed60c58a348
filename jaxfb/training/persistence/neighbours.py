"""Moves bytes between the processes of a job, by the devices' own network.

Every process calls each function, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.checkpoint.together import gathered

AXIS = "process"
CHUNK = 2**26  # bytes of a device's memory that a transfer takes, twice


def shifted(body: np.ndarray, by: int) -> np.ndarray:
    """Returns the u8[bytes] of the process `by` places before this one; its own go to the one as many behind."""
    count = jax.process_count()
    return _moved(body, tuple((k, (k + by) % count) for k in range(count)))


def sent(body: np.ndarray | None, source: int, target: int) -> np.ndarray | None:
    """Returns, on process `target`, the u8[bytes] that process `source` gives; None on the others."""
    found = _moved(np.zeros(0, np.uint8) if body is None else body, ((source, target),))
    return found if jax.process_index() == target else None


def _moved(body: np.ndarray, pairs: tuple[tuple[int, int], ...]) -> np.ndarray:
    lengths = gathered(int(body.size))
    sources = {target: source for source, target in pairs}
    me = jax.process_index()
    wanted = lengths[sources[me]] if me in sources else 0
    found = np.empty(wanted, np.uint8)
    longest = max(lengths[source] for source, _ in pairs)
    size = min(CHUNK, longest)
    mesh = _mesh()
    sharding, device = NamedSharding(mesh, P(AXIS)), mesh.local_devices[0]
    for start in range(0, longest, size):
        piece = np.zeros((1, size), np.uint8)
        own = body[start : start + size]
        piece[0, : own.size] = own
        row = jax.make_array_from_single_device_arrays(
            (mesh.size, size), sharding, [jax.device_put(piece, device)]
        )
        moved = _program(mesh, pairs)(row).addressable_shards[0].data
        end = min(start + size, wanted)
        if end > start:
            found[start:end] = np.asarray(moved)[0, : end - start]
    return found


@lru_cache(maxsize=1)
def _mesh() -> Mesh:
    """Returns one device of each process."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[k] for k in sorted(first)]), (AXIS,))


@lru_cache(maxsize=8)
def _program(mesh: Mesh, pairs: tuple[tuple[int, int], ...]) -> Callable:
    def permute(row: jax.Array) -> jax.Array:
        return jax.lax.ppermute(row, AXIS, pairs)

    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
