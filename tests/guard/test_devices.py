"""Copies of an array on several devices are compared bit for bit, and devices by what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.chaos.injectors import with_flipped_bit
from jaxfb.guard import devices
from jaxfb.guard.devices import differing_replicas, failed_self_test, outvoted

MESH = dict(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def mesh():
    return jaxfb.make_mesh(**MESH)


def leaves(mesh):
    rng = np.random.default_rng(0)
    specs = {"whole": P(), "cut": P("fsdp"), "both": P("fsdp", ("data", "tensor")), "half": P(None, "tensor")}
    dtypes = {"whole": jnp.float32, "cut": jnp.bfloat16, "both": jnp.float32, "half": jnp.float16}
    made = {name: jnp.asarray(rng.normal(size=(8, 8)), dtypes[name]) for name in specs}
    return {name: jax.device_put(made[name], NamedSharding(mesh, specs[name])) for name in specs}


def test_equal_copies_deviate_nowhere(mesh):
    assert differing_replicas(leaves(mesh)) == {}


@pytest.mark.parametrize("device", (0, 5, 7))
def test_one_flipped_bit_of_one_copy_is_named(mesh, device):
    tree = leaves(mesh)
    tree["whole"] = with_flipped_bit(tree["whole"], device, element=13, bit=3)
    tree["cut"] = with_flipped_bit(tree["cut"], device, element=1, bit=0)
    assert differing_replicas(tree) == {"whole": [device], "cut": [device]}


def test_of_two_copies_both_are_named(mesh):
    tree = leaves(mesh)
    half = tree["half"]
    one = differing_replicas({"half": with_flipped_bit(half, 3, element=0, bit=1)})
    assert one == {"half": [3]}  # four copies
    alone = jax.device_put(
        np.ones(4, np.float32), NamedSharding(jaxfb.make_mesh(data=2, devices=jax.devices()[:2]), P())
    )
    assert differing_replicas({"x": with_flipped_bit(alone, 1, element=0, bit=0)}) == {"x": [0, 1]}


def test_an_array_without_copies_has_none_to_differ_from(mesh):
    tree = leaves(mesh)
    assert differing_replicas({"both": with_flipped_bit(tree["both"], 2, element=0, bit=0)}) == {}


def test_devices_pass_the_self_test(mesh):
    assert failed_self_test(mesh) == []


def test_a_device_that_computes_otherwise_fails_it(mesh, monkeypatch):
    run = devices._self_test(mesh)
    monkeypatch.setattr(
        devices, "_self_test", lambda mesh: lambda: with_flipped_bit(run(), 6, element=9, bit=0)
    )
    assert failed_self_test(mesh) == [6]


def test_votes():
    assert outvoted({0: "a", 1: "a", 2: "b"}) == [2]
    assert outvoted({0: "a", 1: "b"}) == [0, 1]
    assert outvoted({4: "a"}) == []
