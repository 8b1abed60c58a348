"""How devices of a TPU slice are placed: FSDP's pairs within a ring are neighbours, and other axes' stay so."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from jaxfb.mesh import AXES
from jaxfb.platforms.device_order import arranged
from jaxfb.platforms.torus import with_pairs_adjacent


@dataclass(frozen=True)
class Tpu:
    """A device as far as the placement looks at it."""

    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5p"


def slice_of(*lengths, **more):
    return [Tpu((x, y, z), **more) for z, y, x in product(*map(range, reversed(lengths)))]


def along(made, axis):
    """Groups of devices that differ on this axis alone, as coordinates [group, device, dim]."""
    groups = np.moveaxis(made, AXES.index(axis), -1).reshape(-1, made.shape[AXES.index(axis)])
    return np.array([[device.coords for device in group] for group in groups])


def place(devices, **sizes):
    made = arranged({axis: sizes.get(axis, 1) for axis in AXES}, devices)
    assert set(made.flat) == set(devices) and made.size == len(devices)
    return made


def cores(made):
    return np.vectorize(lambda device: device.core_on_chip)(made)


def is_run(places, length):
    """Whether the places along a ring are neighbours: a run of places, the first follows the last."""
    places = np.unique(places)
    steps = np.diff(np.append(places, places[0] + length))
    return np.sum(steps != 1) <= 1


@pytest.mark.parametrize("inner", ["tensor", "context", "expert"])
def test_in_a_ring_of_four_the_pairs_of_both_axes_are_neighbours(inner):
    made = place(slice_of(4, 4, 4), fsdp=32, **{inner: 2})
    for axis in ("fsdp", inner):
        assert all(is_run(group[:, dim], 4) for group in along(made, axis) for dim in range(3))


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((8, 8, 16), {"fsdp": 256, "tensor": 4}),
        ((8, 8, 8), {"fsdp": 128, "tensor": 4}),
        ((4, 4, 4), {"fsdp": 8, "tensor": 8}),
        ((4, 4, 8), {"pipe": 2, "fsdp": 16, "context": 4}),
    ],
)
def test_pairs_of_fsdp_are_neighbours_in_longer_rings(lengths, sizes):
    groups = along(place(slice_of(*lengths), **sizes), "fsdp")
    assert all(is_run(group[:, dim], length) for group in groups for dim, length in enumerate(lengths))


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((4, 4, 4), {"fsdp": 16, "tensor": 4}),  # no ring is shared
        (
            (8, 8, 8),
            {"fsdp": 32, "expert": 16},
        ),  # four of fsdp's devices share a ring with two of the experts'
        ((4, 4, 4), {"data": 2, "fsdp": 32}),  # fsdp is the inner axis
        ((4, 8, 1), {"fsdp": 16, "tensor": 2}),  # no closed rings
        ((2, 4, 4), {"fsdp": 8, "tensor": 4}),
    ],
)
def test_other_meshes_are_as_jax_places_them(lengths, sizes):
    from jax.experimental.mesh_utils import create_device_mesh

    devices = slice_of(*lengths)
    shape = [sizes.get(axis, 1) for axis in AXES]
    expected = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    np.testing.assert_array_equal(place(devices, **sizes), expected)


def test_every_slice_keeps_its_devices():
    devices = [chip for k in range(2) for chip in slice_of(4, 4, 4, slice_index=k)]
    made = place(devices, data=2, fsdp=32, tensor=2)
    assert all(len({device.slice_index for device in one.flat}) == 1 for one in made[0])
    assert all(is_run(group[:, 0], 4) for group in along(made, "fsdp"))


def test_both_cores_of_a_chip_move_together():
    """Over [fsdp, tensor], tensor being two chips of a ring of four and their two cores."""
    chips = np.array(slice_of(4, 4, 4), object).reshape(4, 4, 2, 2)  # [z, y, x // 2, x % 2]
    chips = np.moveaxis(chips, 2, 0).reshape(32, 2)
    made = np.array([[replace(chip, core_on_chip=k) for chip in pair for k in range(2)] for pair in chips])
    moved = with_pairs_adjacent(made, axis=0)
    assert set(moved.flat) == set(made.flat)
    np.testing.assert_array_equal(cores(moved), cores(made))
    assert {device.coords[0] for device in moved[:, 0]} == {0, 1}
    assert {device.coords[0] for device in made[:, 0]} == {0, 2}
