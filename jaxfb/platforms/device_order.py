"""Places devices along a mesh's axes: near each other on a TPU's torus, and over hosts of GPUs and several slices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfb.platforms import torus
from jaxfb.platforms.kinds import V5E
from jaxfb.refusal import Refused, integer


def as_product(sizes: dict[str, int]) -> str:
    """Returns the sizes as text, such as "data 2 x fsdp 4"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"


def arranged(sizes: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices as an array [pipe, data, fsdp, expert, context, tensor], near each other on the inner axes.

    Devices of several slices (TPU slices, GPU hosts or NVLink domains; `device.slice_index`) are joined by the
    slow network: axes are cut over it outermost first, and never tensor.

    Raises:
      ValueError: the slices cannot be shared out so, or have different numbers of devices.
    """
    slices = Counter(getattr(device, "slice_index", 0) or 0 for device in devices)
    if devices[0].platform == "cpu":
        return np.asarray(devices, object).reshape(tuple(sizes.values()))
    several = len(slices) > 1
    made = _over_slices(sizes, devices, slices) if several else _in_one_slice(tuple(sizes.values()), devices)
    return torus.with_pairs_adjacent(made, list(sizes).index("fsdp"))


def across_slices(sizes: Mapping[str, int], num_slices: int) -> dict[str, int]:
    """Returns how many parts each axis has over the slow network; the product is the number of slices.

    Raises:
      ValueError: the axes outside tensor do not divide by the slices.
    """
    left, parts = integer("num_slices", num_slices), {}
    for axis, size in sizes.items():
        parts[axis] = 1 if axis == "tensor" else math.gcd(size, left)
        left //= parts[axis]
    if left > 1:
        raise Refused(
            f"{num_slices} slices cannot be shared out over {as_product(dict(sizes))}: only pipe, data, fsdp, expert "
            f"and context go over the network between slices, and their sizes leave a factor {left}; make data "
            f"{sizes['data'] * left} or a multiple of it, or tensor smaller"
        )
    return parts


def _over_slices(sizes: dict[str, int], devices: Sequence[Any], slices: Counter) -> np.ndarray:
    from jax.experimental.mesh_utils import create_hybrid_device_mesh

    if len(set(slices.values())) > 1:
        each = ", ".join(f"{count} of slice {index}" for index, count in sorted(slices.items()))
        raise Refused(
            f"a mesh over several slices needs as many devices of each, {as_product(sizes)} takes {each}; "
            f"make it {min(slices.values()) * len(slices)} devices"
        )
    parts = across_slices(sizes, len(slices))
    inside = tuple(size // parts[axis] for axis, size in sizes.items())
    return _splitting(create_hybrid_device_mesh, inside, tuple(parts.values()), devices=devices)


def _in_one_slice(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    from jax.experimental.mesh_utils import create_device_mesh

    return _splitting(create_device_mesh, shape, devices=devices)


def _splitting(
    create: Callable[..., np.ndarray], *shapes: tuple[int, ...], devices: Sequence[Any]
) -> np.ndarray:
    """Returns what `create` makes. An axis of a torus may be split where sizes are not a product of the torus' own.

    It always may be in one so small that whole axes seldom fit, as in `jax.make_mesh`.
    """
    try:
        is_small = devices[0].device_kind in (V5E, "TPU v5e")
        return create(*shapes, devices, allow_split_physical_axes=is_small)
    except NotImplementedError:
        return create(*shapes, devices, allow_split_physical_axes=True)
