"""Reads which devices a collective runs among, from a compiled program's replica groups."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from jaxfb.hlo.text import searched

_MESH_GROUPS = re.compile(r"@?mesh\[([^\]]*)\](?:,\s*device_ids=\((\[.*?)\))?\s*\{([^}]*)\}")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def groups_of(rest: str) -> tuple[tuple[int, ...], ...]:
    """Returns positions in the device assignment, group by group; for a permute (source, target) pairs; () is all
    devices.

    Raises:
      ValueError: they are written in an unknown way.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", rest):
        return _listed(pairs[1])
    found = re.search(r"replica_groups=(.*)", rest)
    if not found or found[1].startswith("{}"):
        return ()
    if found[1].startswith("{"):
        return _listed(searched(r"^\{(.*?\})\}", found[1])[1])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\].*)", found[1]):
        return tuple(map(tuple, _counted(iota[2], _ints(iota[1])).tolist()))
    if mesh := re.match(_MESH_GROUPS, found[1]):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        return _named(sizes, mesh[2], mesh[3])
    raise ValueError(f"unknown way to write replica groups: {found[1][:120]}")


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_ints, re.findall(r"\{([\d,]+)\}", text)))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _named(sizes: dict[str, int], order: str | None, written: str) -> tuple[tuple[int, ...], ...]:
    """Expands `mesh['data'=2,'fsdp'=4] {'fsdp'}`: positions that differ along the named axes only.

    written: the axes, of which some may be parts of an axis: `'fsdp':(2)4` is the part of size 4 behind a part of
    size 2, counted from the outermost. order: such as `[4,2]T(1,0)`, how the mesh counts its devices; None: in their
    own order.
    """
    parts = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(written)
    ]
    if len(parts) != written.count("'") // 2:
        raise ValueError(f"unknown way to write replica groups: {written}")
    shape, inner = [], []
    for name, whole in sizes.items():
        named = {(before, before * size) for axis, before, size in parts if axis == name}
        cuts = sorted({1, whole}.union(*named))
        for low, high in itertools.pairwise(cuts):
            if any(first <= low and high <= last for first, last in named):
                inner.append(len(shape))
            shape.append(high // low)
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    group = int(np.prod([shape[dim] for dim in inner]))
    numbers = _counted(order or f"[{math.prod(shape)}]", shape).transpose(outer + inner)
    return tuple(map(tuple, numbers.reshape(-1, group).tolist()))


def _counted(written: str, shape: Sequence[int]) -> np.ndarray:
    """Expands `[2,4]T(1,0)`: counts up to 8, shapes it [2, 4], transposes, and reshapes, such as to 4 groups of 2."""
    dims, order = searched(r"^\[([\d,]+)\](?:T\(([\d,]+))?", written).groups()
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(order)) if order else numbers).reshape(shape)
