"""The mesh: axis names, and every divisibility between axis sizes and devices. Contract of all that follows.

A replica is one position on the axes that hold different rows (data, fsdp, expert). Short rows may use a part of the
context axis as a further one; see `with_context`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxfb.platforms import cpu
from jaxfb.platforms.device_order import arranged, as_product
from jaxfb.refusal import INT32, Refused, instance, integer, refuse, with_nearest_keyword

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
SHORT = {"pp": "pipe", "dp": "data", "ep": "expert", "cp": "context", "tp": "tensor"}
"""What the axes are called for short, as in overrides of a config."""
EXPERT, ROWS = "expert", "rows"
REPLICA_AXES = ("data", "fsdp", EXPERT, ROWS)
SHARD_AXES = ("fsdp", EXPERT, ROWS, "context")
"""The axes along which devices compute with the same weights, so that each stores a part of them (FSDP).

Experts differ along `expert`, so that this axis shares out only the parameters that are not experts'.
"""
AUTOMATIC_AXES = ("tensor",)
GPU_PLATFORMS = ("cuda", "rocm")
"""The platforms that a device of platform "gpu" can have in `lax.platform_dependent`."""
_MOST_SIMULATED = 1024


@with_nearest_keyword(SHORT)
def make_mesh(
    pipe: int = 1,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arranges devices on the six axes, outermost first: pipe, data, fsdp, expert, context, tensor.

    Neighbours on the inner axes are neighbours on the interconnect, so tensor is innermost; over several TPU
    slices or GPU hosts the outer axes take the slow network between them, see `arranged` in
    `jaxfb/platforms/device_order.py`. One size may be -1: it takes the devices that the others leave. Sizes that
    use only some of the devices must still divide their number; the first devices are taken.

    Raises:
      ValueError: a size is not a positive integer, two are -1, or the sizes do not divide the devices or slices.
    """
    given: dict[str, int] = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    cpu.prepare()
    devices = jax.devices() if devices is None else _checked_devices(devices)
    sizes = mesh_sizes(given, len(devices), devices[0].platform, jax.process_count())
    needed = math.prod(sizes.values())
    if needed < len(devices) and jax.process_count() > 1:
        raise Refused(
            f"with several processes the mesh must use all devices: {as_product(sizes)} = {needed}, "
            f"there are {len(devices)}; set data=-1 to take the rest"
        )
    return Mesh(arranged(sizes, devices[:needed]), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(given: dict[str, int], num_devices: int, platform: str, processes: int = 1) -> dict[str, int]:
    """Returns axis sizes with -1 filled in, for devices that need not exist; ValueError as `make_mesh`.

    processes: among which the devices are divided.
    """
    if not isinstance(given, Mapping) or not set(given) <= set(AXES):
        refuse("given", given, f"a mapping to sizes from axes, which are {', '.join(AXES)}")
    integer("num_devices", num_devices)
    return _fill(
        _checked_sizes({axis: given.get(axis, 1) for axis in AXES}), num_devices, platform, processes
    )


def axis_size(mesh: Mesh | AbstractMesh | None, *axes: str) -> int:
    """Returns product of the sizes of those axes; an axis that the mesh lacks counts 1."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in axes)


def replica_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of this mesh over which rows are split, outermost first."""
    return tuple(axis for axis in REPLICA_AXES if axis in mesh.axis_names)


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of size > 1 over which one microbatch is split: rows over replicas, sequences over context."""
    return tuple(axis for axis in (*REPLICA_AXES, "context") if mesh.shape.get(axis, 1) > 1)


def shard_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of size > 1 over which parameters, gradients and optimizer state are stored in shards."""
    return tuple(axis for axis in SHARD_AXES if mesh.shape.get(axis, 1) > 1)


def manual_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes whose collectives we write ourselves: all but tensor, which XLA partitions."""
    return tuple(axis for axis in mesh.axis_names if axis not in AUTOMATIC_AXES)


def data_parallel(mesh: Mesh | None) -> int:
    """Returns the number of replicas: data * fsdp * expert, and those of a smaller context axis (`with_context`)."""
    return axis_size(mesh, *REPLICA_AXES)


def with_context(mesh: Mesh, size: int) -> Mesh:
    """Returns the same devices, in the same order, with a context axis of `size`.

    What is left of the axis holds different rows: it becomes the replica axis "rows". An array that is cut over all of
    both axes, or over others, is where it was, so that programs over both meshes take the same parameters.

    Raises:
      ValueError: size does not divide the context axis.
    """
    check_mesh(mesh)
    whole, names = axis_size(mesh, "context"), list(mesh.axis_names)
    if whole % integer("size", size):
        near = _nearest_divisors(whole, size)
        words = " or ".join(map(str, near))
        raise Refused(
            f"a context axis of {whole} cannot have parts of {size}; use size={words}",
            [{"size": one} for one in near],
        )
    if size == whole:
        return mesh
    at = names.index("context")
    names.insert(at, ROWS)
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    sizes[at : at + 1] = whole // size, size
    how: dict[str, Any] = {"axis_types": (AxisType.Auto,) * len(names)}
    return Mesh(mesh.devices.reshape(sizes), tuple(names), **how)


def platform_here() -> str:
    """Returns "tpu", "gpu" or "cpu": what the function being traced will run on.

    That of the mesh in context, whose devices need not be at hand (as where a laptop compiles for a TPU pod); outside
    any mesh, of this process.
    """
    return platform_of(jax.sharding.get_abstract_mesh())


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns "tpu", "gpu" or "cpu": that of the mesh's devices; of this process, where it has none."""
    device = mesh.abstract_mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def by_platform(*args: Any, default: Callable, **ways: Callable) -> Any:
    """Calls the function for the platform that the program is compiled for, as `lax.platform_dependent` does.

    In a mesh, functions for platforms other than that of its devices are not traced: with experts this saves a fifth to
    a quarter of the time in which a step is traced.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        here = GPU_PLATFORMS if device.platform in ("gpu", *GPU_PLATFORMS) else (device.platform,)
        ways = {platform: way for platform, way in ways.items() if platform in here}
    return lax.platform_dependent(*args, **ways, default=default)


def kind_here() -> str | None:
    """Returns the kind of device that the function being traced will run on, such as "TPU v5p"; None outside a mesh."""
    return kind_of(jax.sharding.get_abstract_mesh())


def kind_of(mesh: AbstractMesh) -> str | None:
    """Returns the kind of a mesh's devices; None where it is not known."""
    return None if mesh.abstract_device is None else mesh.abstract_device.device_kind


def check_mesh(mesh: Mesh) -> Mesh:
    """Accepts any mesh with our axis names, such as one the caller made with `jax.make_mesh`.

    Raises:
      ValueError: an axis has another name, or `tensor` is not an automatic axis.
    """
    instance("mesh", mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh, such as jaxfb.make_mesh(data=2)")
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise Refused(f"mesh axes must be among {AXES}, got {unknown}; make the mesh with jaxfb.make_mesh")
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis, kind in types.items() if kind != AxisType.Auto]
    if explicit:
        raise Refused(
            f"mesh axes must have axis_types=AxisType.Auto, got {explicit} otherwise; jaxfb.make_mesh sets it"
        )
    return mesh


def _checked_sizes(given: Mapping[str, Any]) -> dict[str, int]:
    sizes = {axis: _checked_size(axis, size) for axis, size in given.items()}
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise Refused(
            f"only one mesh size may be -1, got {' and '.join(unknown)}; give one of them a number, such as "
            + ", ".join(f"{axis}=1" for axis in unknown[1:]),
            [dict.fromkeys(unknown[1:], 1)],
        )
    return sizes


def _checked_size(axis: str, size: Any) -> int:
    try:
        return -1 if type(size) is int and size == -1 else integer(f"mesh size {axis}", size)
    except Refused:
        most = f" of at most {INT32}" if type(size) is int and size > INT32 else ""
        refuse(f"mesh size {axis}", size, f"a positive integer{most}, or -1 for the rest")


def _checked_devices(devices: Any) -> list:
    """Returns `devices` as a list; refuses none at all, what is not a device, and one that is there twice."""
    found = devices.flatten() if isinstance(devices, np.ndarray) else devices
    found = list(found) if isinstance(found, list | tuple | np.ndarray) else []
    if (
        not found
        or not all(hasattr(device, "device_kind") for device in found)
        or len(set(found)) < len(found)
    ):
        refuse("devices", devices, "a list of different jax devices, or None for all")
    return found


def _fill(sizes: dict[str, int], num_devices: int, platform: str, processes: int) -> dict[str, int]:
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known:
        more = _simulated(known, processes) if platform == "cpu" and num_devices < known else ""
        choices = _nearest(sizes, known, num_devices)
        raise Refused(_misfit(sizes, known, num_devices, choices) + more, choices)
    return {axis: num_devices // known if size == -1 else size for axis, size in sizes.items()}


def _simulated(needed: int, processes: int) -> str:
    """Returns how to simulate that many devices: several processes must use all that they have."""
    each, left = divmod(needed, processes)
    if left or needed > _MOST_SIMULATED:
        return ""
    where = f" in each of the {processes} processes" if processes > 1 else ""
    return f", or simulate: XLA_FLAGS=--xla_force_host_platform_device_count={each}{where}"


def _misfit(sizes: dict[str, int], known: int, num_devices: int, choices: Sequence[Mapping[str, int]]) -> str:
    words = " or ".join(" and ".join(f"{axis}={size}" for axis, size in choice.items()) for choice in choices)
    rest = known // max(sizes.values())
    advice = (
        f"use {words}"
        if len(choices[0]) == 1
        else f"the other axes alone need {rest}; make them smaller, such as {words}"
    )
    product = as_product(sizes) + (f" = {known}" if known not in sizes.values() else "")
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    return f"a mesh of {product} cannot be made of {devices}; {advice}"


def _nearest(sizes: dict[str, int], known: int, num_devices: int) -> list[dict[str, int]]:
    """Returns the nearest changes of the largest axis that make the sizes fit; one of others too where these are not
    enough.
    """
    changed = [axis for axis, size in sizes.items() if size > 1]
    changed.sort(key=lambda axis: -sizes[axis])
    rest, left = known // sizes[changed[0]], num_devices
    if num_devices % rest == 0:
        nearest = _nearest_divisors(num_devices // rest, sizes[changed[0]])
        return [{changed[0]: size} for size in nearest]
    found = {}
    for axis in changed:
        found[axis] = _nearest_divisors(left, sizes[axis])[0]
        left //= found[axis]
    return [{axis: size for axis, size in found.items() if size != sizes[axis]}]


def _nearest_divisors(number: int, size: int) -> list[int]:
    """Returns the divisor that is nearest to a size; two where two are equally near, the smaller one first."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    divisors = sorted(
        {*small, *(number // k for k in small)}, key=lambda divisor: (abs(divisor - size), divisor)
    )
    return [divisor for divisor in divisors if abs(divisor - size) == abs(divisors[0] - size)]
