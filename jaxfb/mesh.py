"""The mesh: axis names, and every divisibility between axis sizes and devices. Contract of all that follows.

A replica is one position on the axes that hold different rows (data, fsdp, expert).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
REPLICA_AXES = ("data", "fsdp", "expert")
AUTOMATIC_AXES = ("tensor",)


def make_mesh(
    pipe: int = 1,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arranges devices on the six axes, outermost first: pipe, data, fsdp, expert, context, tensor.

    Neighbours on the inner axes are neighbours on the interconnect, so tensor is innermost. One size may be
    -1: it takes the devices that the others leave. Sizes that use only some of the devices must still divide
    their number; the first devices are taken.

    Raises:
      ValueError: a size is not a positive int, two are -1, or the sizes do not divide the devices.
    """
    given = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    devices = list(jax.devices() if devices is None else devices)
    sizes = _fill(_checked_sizes(given), len(devices), devices[0].platform)
    needed = math.prod(sizes.values())
    if needed < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"with several processes the mesh must use all devices: {_product(sizes)} = {needed}, "
            f"there are {len(devices)}; set data=-1 to take the rest"
        )
    return _arrange(sizes, devices[:needed])


def axis_size(mesh: Mesh | None, *axes: str) -> int:
    """Product of the sizes of those axes; an axis that the mesh lacks counts 1."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in axes)


def replica_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of this mesh over which rows are split, outermost first."""
    return tuple(axis for axis in REPLICA_AXES if axis in mesh.axis_names)


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of size > 1 over which one microbatch is split: rows over replicas, sequences over context."""
    return tuple(axis for axis in (*REPLICA_AXES, "context") if mesh.shape.get(axis, 1) > 1)


def manual_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes whose collectives we write ourselves: all but tensor, which XLA partitions."""
    return tuple(axis for axis in mesh.axis_names if axis not in AUTOMATIC_AXES)


def data_parallel(mesh: Mesh | None) -> int:
    """Number of replicas: data * fsdp * expert."""
    return axis_size(mesh, *REPLICA_AXES)


def check_mesh(mesh: Mesh) -> Mesh:
    """Accepts any mesh with our axis names, such as one the caller made with `jax.make_mesh`.

    Raises:
      ValueError: an axis has another name, or `tensor` is not an automatic axis.
    """
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise ValueError(f"mesh axes must be among {AXES}, got {unknown}; jaxfb.make_mesh names them so")
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis, kind in types.items() if kind != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"mesh axes must have axis_types=AxisType.Auto, got {explicit} otherwise; jaxfb.make_mesh sets it"
        )
    return mesh


def _checked_sizes(given: dict[str, int]) -> dict[str, int]:
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"mesh size {axis} must be a positive int, or -1 for the rest, got {size!r}")
    unknown = [axis for axis, size in given.items() if size == -1]
    if len(unknown) > 1:
        raise ValueError(
            f"only one mesh size may be -1, got {' and '.join(unknown)}; give one of them a number"
        )
    return given


def _fill(sizes: dict[str, int], num_devices: int, platform: str) -> dict[str, int]:
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known:
        hint = f", or simulate: XLA_FLAGS=--xla_force_host_platform_device_count={known}"
        more = hint if platform == "cpu" and known > num_devices else ""
        raise ValueError(_misfit(sizes, known, num_devices) + more)
    return {axis: num_devices // known if size == -1 else size for axis, size in sizes.items()}


def _misfit(sizes: dict[str, int], known: int, num_devices: int) -> str:
    largest = max((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: sizes[axis])
    rest = known // sizes[largest]
    legal = [size for size in range(1, num_devices + 1) if num_devices % (size * rest) == 0]
    advice = (
        f"use {largest}={min(legal, key=lambda size: (abs(size - sizes[largest]), size))}"
        if legal
        else f"the other axes alone need {rest}; make them smaller"
    )
    return f"{num_devices} devices cannot form {_product(sizes)} = {known}; {advice}"


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"


def _arrange(sizes: dict[str, int], devices: list) -> Mesh:
    shape = tuple(sizes.values())
    types = (AxisType.Auto,) * len(AXES)
    if devices[0].platform == "cpu":
        return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=types)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
