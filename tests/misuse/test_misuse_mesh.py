"""Meshes with one wrong argument: refused in a sentence that names it."""

import itertools

import jax
import pytest
from legal import integers, maybe, nothing, one_of
from wrong import Call, circular, pool

from jaxfb.mesh import AXES, check_mesh, make_mesh, mesh_sizes
from jaxfb.platforms.device_order import across_slices

SIZE = integers(least=-1)
SIZES = {axis: lambda value: SIZE(value) and value != 0 for axis in AXES}

CALLS = [
    Call("make_mesh", make_mesh, lambda: dict(data=2, tensor=2), SIZES | {"devices": maybe(nothing)}),
    Call("make_mesh of the rest", make_mesh, lambda: dict(data=-1, tensor=2), SIZES),
    Call("check_mesh", check_mesh, lambda: dict(mesh=make_mesh(data=2)), {"mesh": nothing}),
    Call(
        "mesh_sizes",
        mesh_sizes,
        lambda: dict(given={"data": 2}, num_devices=8, platform="cpu"),
        {"given": one_of([{}]), "num_devices": integers()},
        {"num_devices": "devices"},
    ),
    Call(
        "across_slices",
        across_slices,
        lambda: dict(sizes=dict.fromkeys(AXES, 2), num_slices=2),
        {"num_slices": integers()},
        {"num_slices": "[0-9]+ slices"},
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    call()
    assert not call.failures([*pool(seed=3), circular])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()


@pytest.mark.parametrize("devices", [[None], jax.devices()[:1] * 2, ["cpu:0"], {}, jax.devices()[0]])
def test_devices_that_are_none_are_refused(devices):
    with pytest.raises(ValueError, match="devices must be"):
        make_mesh(devices=devices)


def test_what_a_refusal_offers_is_accepted():
    refusals = 0
    for count, pipe, data, tensor in itertools.product(
        (1, 2, 3, 6, 8), (1, 2, 3, 64), (1, 5, 16, -1), (1, 4, 7)
    ):
        given = dict(pipe=pipe, data=data, tensor=tensor)
        try:
            mesh_sizes(given, count, "tpu")
        except ValueError as refused:
            refusals += 1
            assert refused.choices, refused
            for choice in refused.choices:
                mesh_sizes(given | choice, count, "tpu")
                assert all(f"{axis}={size}" in str(refused) for axis, size in choice.items()), refused
    assert refusals > 150
