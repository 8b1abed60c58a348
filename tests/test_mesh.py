"""Axis sizes against devices: what fits, what is refused and what is offered instead."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxfb
from jaxfb.mesh import AXES, axis_size, check_mesh, data_parallel, manual_axes, replica_axes


def sizes(mesh):
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_all_six_axes_are_there_outermost_first_with_neighbours_on_tensor():
    mesh = jaxfb.make_mesh(data=2, fsdp=2, tensor=2)
    assert mesh.axis_names == AXES == ("pipe", "data", "fsdp", "expert", "context", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(mesh.devices).squeeze()
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"data": 8}, {"data": 8}),
        ({"data": -1}, {"data": 8}),
        ({"data": -1, "tensor": 4}, {"data": 2, "tensor": 4}),
        ({"fsdp": -1, "tensor": 8}, {"tensor": 8}),
        ({"tensor": 2}, {"tensor": 2}),  # some of the devices, if they divide the rest
    ],
)
def test_sizes_that_fit(given, expected):
    mesh = jaxfb.make_mesh(**given)
    assert sizes(mesh) == expected
    assert list(mesh.devices.flat) == jax.devices()[: mesh.size]


def test_devices_may_be_given():
    mesh = jaxfb.make_mesh(data=-1, devices=jax.devices()[2:5])
    assert list(mesh.devices.flat) == jax.devices()[2:5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": 3}, "8 devices cannot form data 3 = 3; use data=2"),
        ({"data": 6}, "8 devices cannot form data 6 = 6; use data=4"),
        ({"data": 4, "tensor": 4}, "8 devices cannot form data 4 x tensor 4 = 16; use data=2"),
        ({"data": -1, "tensor": 3}, "cannot form tensor 3 = 3; use tensor=2"),
        ({"data": 3, "tensor": 5}, "data 3 x tensor 5 = 15; the other axes alone need 3; make them smaller"),
        ({"data": 16}, "8 devices cannot form data 16 = 16; use data=8"),
        ({"data": 0}, "mesh size data must be a positive int, or -1 for the rest, got 0"),
        ({"fsdp": -2}, "mesh size fsdp must be a positive int.*got -2"),
        ({"tensor": 2.0}, "mesh size tensor must be a positive int.*got 2.0"),
        ({"tensor": True}, "mesh size tensor must be a positive int.*got True"),
        (
            {"data": -1, "fsdp": -1},
            "only one mesh size may be -1, got data and fsdp; give one of them a number",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(given, message):
    with pytest.raises(ValueError, match=message):
        jaxfb.make_mesh(**given)


def test_what_is_asked_of_a_mesh():
    mesh = jaxfb.make_mesh(data=2, fsdp=2, tensor=2)
    assert (data_parallel(mesh), axis_size(mesh, "data", "tensor"), axis_size(None, "data")) == (4, 4, 1)
    assert replica_axes(mesh) == ("data", "fsdp", "expert")
    assert manual_axes(mesh) == ("pipe", "data", "fsdp", "expert", "context")
    assert data_parallel(None) == 1


def test_a_mesh_made_elsewhere_is_accepted_if_its_axes_are_ours():
    grid = np.array(jax.devices()).reshape(4, 2)
    automatic = (AxisType.Auto,) * 2
    mine = Mesh(grid, ("data", "tensor"), axis_types=automatic)
    assert check_mesh(mine) is mine and data_parallel(mine) == 4
    with pytest.raises(ValueError, match=r"mesh axes must be among .*got \['batch'\]; jaxfb.make_mesh"):
        check_mesh(Mesh(grid, ("batch", "tensor"), axis_types=automatic))
    with pytest.raises(ValueError, match=r"must have axis_types=AxisType.Auto, got \['data', 'tensor'\]"):
        check_mesh(Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2))
