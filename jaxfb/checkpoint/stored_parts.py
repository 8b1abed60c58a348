"""Large arrays of a checkpoint: stored so that one layer can be read alone, and read one layer after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxfb.parallel.totals import PartSums
from jaxfb.refusal import StorageError

LARGE, PIECE, LEAST = 2**28, 2**28, 2**22
"""Bytes of an array from which on it is stored in pieces, of a piece at most, and of a layer's piece at least."""


def storage_of(key: Any, value: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """Returns how Orbax stores an array: a large one is cut along its first dims (layers, experts), each a piece of its
    own, where that leaves pieces of some size.
    """
    if value.nbytes <= LARGE:
        return None
    shard = value.sharding.shard_shape(value.shape) if hasattr(value, "sharding") else value.shape
    item = value.dtype.itemsize
    axes = [dim for dim in range(len(shard)) if math.prod(shard[dim + 1 :]) * item >= LEAST]
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=PIECE, shard_axes=tuple(axes))


class StoredArrays:
    """The arrays of one step of a checkpoint, read a part at a time.

    directory: where Orbax stored them. sums: the checksum of each by name; None is not compared.
    """

    def __init__(self, directory: epath.Path, sums: Mapping[str, str | None]):
        self._directory, self._sums = directory, sums

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def parts(self, name: str, depth: int) -> Iterator[np.ndarray]:
        """Yields array[0], array[1] and so on, of `depth` leading dims in row order; the whole array for 0.

        The pieces in which it was stored decide how much is read at once: those of a large array are its layers.

        Raises:
          StorageError: after the last part, if the array's bits are not those that were saved.
        """
        stored = _opened(self._directory, name)
        pieces = stored.chunk_layout.read_chunk.shape
        one_by_one = next((dim for dim in range(depth) if pieces[dim] > 1), depth)
        sums = PartSums()
        for start in _starts(stored.shape, pieces, one_by_one, depth):
            stops = [at + (1 if dim < one_by_one else pieces[dim]) for dim, at in enumerate(start)]
            cut = tuple(
                slice(at, min(stop, size)) for at, stop, size in zip(start, stops, stored.shape, strict=False)
            )
            block = stored[cut].read().result()
            sums.add(block, start)
            yield from block.reshape(-1, *block.shape[depth:]) if depth else [block]
        if self._sums.get(name) not in (None, sums.digits):
            raise StorageError(f"{self._directory.parent} differs from what was saved, in {name}")


def _starts(
    shape: tuple[int, ...], pieces: tuple[int, ...], one_by_one: int, depth: int
) -> Iterator[tuple[int, ...]]:
    """Yields where each block begins, in row order: one index of the dims before `one_by_one`, and as much of that one
    as a piece has.
    """
    for index in np.ndindex(shape[:one_by_one]):
        if one_by_one == depth:
            yield index
        else:
            yield from ((*index, at) for at in range(0, shape[one_by_one], pieces[one_by_one]))


def _opened(directory: epath.Path, name: str) -> Any:
    import tensorstore

    path = f"{directory}/"
    base = path if "://" in path else {"driver": "file", "path": path}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
    return tensorstore.open(spec, read=True, open=True).result()
