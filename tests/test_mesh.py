"""Axis sizes against devices: what fits, what is refused and what is offered instead."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxfb
from jaxfb.mesh import (
    AXES,
    axis_size,
    by_platform,
    check_mesh,
    data_parallel,
    manual_axes,
    replica_axes,
)
from jaxfb.platforms.device_order import across_slices, arranged


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
        ({"data": 3}, "a mesh of data 3 cannot be made of 8 devices; use data=2 or data=4"),
        ({"data": 6}, "a mesh of data 6 cannot be made of 8 devices; use data=4 or data=8"),
        (
            {"data": 4, "tensor": 4},
            "a mesh of data 4 x tensor 4 = 16 cannot be made of 8 devices; use data=2",
        ),
        (
            {"data": -1, "tensor": 3},
            "a mesh of tensor 3 cannot be made of 8 devices; use tensor=2 or tensor=4",
        ),
        (
            {"data": 3, "tensor": 5},
            "= 15 cannot be made of 8 devices; the other axes alone need 3; make them smaller",
        ),
        ({"data": 16}, "a mesh of data 16 cannot be made of 8 devices; use data=8"),
        ({"data": 0}, "mesh size data must be a positive integer, or -1 for the rest, got 0"),
        ({"fsdp": -2}, "mesh size fsdp must be a positive integer.*got -2"),
        ({"tensor": 2.0}, "mesh size tensor must be a positive integer.*got 2.0"),
        ({"tensor": True}, "mesh size tensor must be a positive integer.*got True"),
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
    with pytest.raises(
        ValueError, match=r"axes must be among .*got \['batch'\]; make the mesh with jaxfb.make_mesh"
    ):
        check_mesh(Mesh(grid, ("batch", "tensor"), axis_types=automatic))
    with pytest.raises(ValueError, match=r"must have axis_types=AxisType.Auto, got \['data', 'tensor'\]"):
        check_mesh(Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2))


@dataclass(frozen=True)
class Gpu:
    """A device as far as `arranged` looks at it; hosts of 8 GPUs are slices."""

    id: int
    platform: str = "gpu"
    device_kind: str = "H100"

    @property
    def slice_index(self):
        return self.id // 8


SIZES = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    ("sizes", "across"),
    [
        ({"data": 2, "tensor": 8}, {"data": 2}),
        ({"pipe": 2, "data": 2, "tensor": 4}, {"pipe": 2}),
        ({"data": 2, "fsdp": 8}, {"data": 2}),
        ({"data": 3, "fsdp": 16}, {"fsdp": 2}),
    ],
)
def test_over_two_hosts_the_outer_axes_take_the_network_and_tensor_stays_inside(sizes, across):
    sizes = SIZES | sizes
    count = int(np.prod(list(sizes.values())))
    parts = across_slices(sizes, 2)
    assert {axis: part for axis, part in parts.items() if part > 1} == across
    if count == 16:
        order = np.roll(np.arange(16), 5)  # devices may come in any order
        grid = arranged(sizes, [Gpu(int(k)) for k in order])
        assert grid.shape == tuple(sizes.values())
        hosts = np.vectorize(lambda device: device.slice_index)(grid)
        for dim, axis in enumerate(AXES):
            crosses = (hosts != np.take(hosts, [0], axis=dim)).any()
            assert crosses == (axis in across), axis
        assert sorted(device.id for device in grid.flat) == list(range(16))


def test_slices_that_the_axes_cannot_share_are_refused():
    with pytest.raises(
        ValueError, match="2 slices cannot be shared out over tensor 16: .* make data 2 or a mul"
    ):
        arranged(SIZES | {"tensor": 16}, [Gpu(k) for k in range(16)])
    with pytest.raises(
        ValueError, match="4 slices .*pipe 2 x data 3 x tensor 8.* leave a factor 2; make data 6"
    ):
        across_slices(SIZES | {"pipe": 2, "data": 3, "tensor": 8}, 4)
    with pytest.raises(ValueError, match="data 12 takes 8 of slice 0, 4 of slice 1; make it 8 devices"):
        arranged(SIZES | {"data": 12}, [Gpu(k) for k in range(12)])


def test_sizes_that_are_no_axes_of_the_interconnect_split_them(monkeypatch):
    from jax.experimental import mesh_utils

    asked = []

    def create(shape, devices, allow_split_physical_axes):
        asked.append(allow_split_physical_axes)
        if not allow_split_physical_axes:
            raise NotImplementedError
        return np.asarray(devices, object).reshape(shape)

    monkeypatch.setattr(mesh_utils, "create_device_mesh", create)
    arranged(SIZES | {"data": 8}, [Gpu(k) for k in range(8)])
    assert asked == [False, True]


def test_in_a_mesh_only_what_its_devices_can_run_is_traced():
    traced = []

    def way(name):
        return lambda x: traced.append(name) or x

    ways = {name: way(name) for name in ("cpu", "cuda", "tpu", "default")}
    jax.make_jaxpr(lambda x: by_platform(x, **ways))(1.0)
    assert sorted(set(traced)) == sorted(ways)
    traced.clear()
    with jax.set_mesh(jaxfb.make_mesh(data=2)):
        assert jax.jit(lambda x: by_platform(x, **ways))(1.0) == 1
    assert set(traced) == {"cpu", "default"}


@pytest.mark.parametrize(
    "platform, kept", [("gpu", {"cuda", "rocm"}), ("cuda", {"cuda", "rocm"}), ("tpu", {"tpu"})]
)
def test_gpus_are_known_by_each_of_their_names(platform, kept, monkeypatch):
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(platform=platform))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *_, default, **ways: set(ways))
    assert by_platform(default=None, **dict.fromkeys(("cpu", "cuda", "rocm", "tpu"))) == kept


@pytest.mark.parametrize("processes, each", [(1, "=8"), (2, "=4 in each of the 2 processes"), (3, None)])
def test_a_mesh_of_more_devices_may_be_simulated_by_as_many_in_each_process(processes, each, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(ValueError) as refused:
        jaxfb.make_mesh(data=4, fsdp=2, devices=jax.devices()[:1])
    flag = "--xla_force_host_platform_device_count"
    assert f"{refused.value}".partition(flag)[2] == (each or "")
