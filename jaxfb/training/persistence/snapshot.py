"""The part of a train state that the devices of one process keep, as bytes: taken off the devices, and put back.

body: 8 bytes (length of the header), the header as JSON (names, dtypes and shapes of the parts, values of the run), and
the parts one after another. A file of it ends with a digest, so that any changed bit is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxfb.checkpoint.manifest import as_json, named_leaves
from jaxfb.refusal import StorageError

PyTree = Any
FORMAT, LENGTH, DIGEST = 1, 8, 16
UNFINISHED = ".tmp"


def taken(state: PyTree, host: Mapping[str, Any]) -> np.ndarray:
    """Returns the body, u8[bytes], of what this process keeps of a state, each part once; it waits for the devices.

    Args:
      state: a tree of jax arrays. host: JSON values to go with it.
    """
    parts = _parts(state)
    for part in parts.values():
        part.copy_to_host_async()
    arrays = {name: np.asarray(part) for name, part in parts.items()}
    names = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    impls = {
        name: str(jax.random.key_impl(leaf)) for name, leaf in named_leaves(state).items() if _is_key(leaf)
    }
    text = json.dumps({"format": FORMAT, "parts": names, "keys": impls, "host": as_json(host)}).encode()
    body = np.empty(LENGTH + len(text) + sum(array.nbytes for array in arrays.values()), np.uint8)
    body[:LENGTH] = np.frombuffer(len(text).to_bytes(LENGTH, "little"), np.uint8)
    body[LENGTH : LENGTH + len(text)] = np.frombuffer(text, np.uint8)
    at = LENGTH + len(text)
    for array in arrays.values():
        body[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += array.nbytes
    return body


def put_back(body: np.ndarray, abstract_state: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Returns the state on the devices, and the JSON values that went with it.

    Args:
      abstract_state: shapes, dtypes and shardings, cut as the state was that was taken.
    Raises:
      StorageError: parts are missing, since the state was cut otherwise.
    """
    header, parts = _opened(body)
    named = named_leaves(abstract_state)
    leaves = [_leaf(name, leaf, parts, header["keys"].get(name)) for name, leaf in named.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), header["host"]


def kind_of(abstract_state: PyTree) -> str:
    """Returns a name of the parts that this process keeps; processes with the same one keep the same parts."""
    named, digest = named_leaves(abstract_state), hashlib.blake2b(digest_size=8)
    for name, leaf in named.items():
        for place in sorted({_place(index, leaf.shape) for index in _indices(leaf).values()}):
            digest.update(f"{name}@{place} {leaf.dtype}{leaf.shape}\n".encode())
    return digest.hexdigest()


def write(path: Path, body: np.ndarray) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + UNFINISHED)
    with temporary.open("wb") as file:
        file.write(body.data)
        file.write(_digest(body))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path: Path) -> np.ndarray:
    """Returns the body that was written; StorageError where it is not the same bytes."""
    whole = np.fromfile(path, np.uint8)
    body, digest = whole[:-DIGEST], whole[-DIGEST:]
    if whole.size <= DIGEST + LENGTH or _digest(body) != digest.tobytes():
        raise StorageError(f"{path} differs from what was written")
    return body


def _parts(state: PyTree) -> dict[str, jax.Array]:
    parts: dict[str, jax.Array] = {}
    for name, leaf in named_leaves(state).items():
        for shard in leaf.addressable_shards:
            key = f"{name}@{_place(shard.index, leaf.shape)}"
            if key not in parts:
                parts[key] = jax.random.key_data(shard.data) if _is_key(leaf) else shard.data
    return parts


def _opened(body: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    at = LENGTH + int.from_bytes(body[:LENGTH].tobytes(), "little")
    header, parts = json.loads(body[LENGTH:at].tobytes()), {}
    if header["format"] != FORMAT:
        raise StorageError(f"a local checkpoint is of format {header['format']}, not {FORMAT}")
    for name, dtype, shape in header["parts"]:
        size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        parts[name] = body[at : at + size].view(dtype).reshape(shape)
        at += size
    return header, parts


def _leaf(name: str, leaf: Any, parts: Mapping[str, np.ndarray], impl: str | None) -> jax.Array:
    arrays = []
    for device, index in _indices(leaf).items():
        part = parts.get(f"{name}@{_place(index, leaf.shape)}")
        if part is None:
            raise StorageError(f"a local checkpoint has no part {_place(index, leaf.shape)} of {name}")
        arrays.append(
            jax.device_put(part, SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind))
        )
    shape = (*leaf.shape, *arrays[0].shape[leaf.ndim :])  # a key's data has one dim more
    whole = jax.make_array_from_single_device_arrays(shape, leaf.sharding, arrays)
    return whole if impl is None else jax.random.wrap_key_data(whole, impl=impl)


def _indices(leaf: Any) -> Mapping[Any, tuple[slice, ...]]:
    return leaf.sharding.addressable_devices_indices_map(leaf.shape)


def _place(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    # the index of a key's part has one dim more, that of its data
    ends = (part.indices(size)[:2] for part, size in zip(index, shape, strict=False))
    return ",".join(f"{start}:{stop}" for start, stop in ends)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _digest(body: np.ndarray) -> bytes:
    return hashlib.blake2b(body.data, digest_size=DIGEST).digest()
