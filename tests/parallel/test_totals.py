"""Checksums and finite flags of arrays do not depend on where their shards lie, and see every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.totals import checksums, finite, sums_by_device

RNG = np.random.default_rng(0)
ARRAYS = {
    "f64": (RNG.normal(size=(8, 6)), P("data", "tensor")),
    "f32": (RNG.normal(size=(4, 4, 2)).astype(np.float32), P(("fsdp", "tensor"), None, "data")),
    "f32 again": (RNG.normal(size=(4, 4, 2)).astype(np.float32), P(("fsdp", "tensor"), None, "data")),
    "rows that four do not divide": (RNG.normal(size=(22, 3)).astype(np.float32), P("data")),
    "scalar": (np.float32(3), P()),
    "i32": (RNG.integers(0, 9, 16).astype(np.int32), P(("data", "fsdp", "tensor"))),
    "bf16": (RNG.normal(size=(8, 2)).astype(jnp.bfloat16), P("tensor")),
    "bool": (np.array([True, False] * 4), P("fsdp")),
    "empty": (np.zeros((0, 3), np.float32), P()),
}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def test_a_checksum_is_the_same_on_the_host_on_one_device_and_on_any_mesh(mesh):
    host = checksums({name: value for name, (value, _) in ARRAYS.items()})
    one = checksums({name: jnp.asarray(value) for name, (value, _) in ARRAYS.items()})
    cut = {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in ARRAYS.items()}
    whole = {name: jax.device_put(value, NamedSharding(mesh, P())) for name, (value, _) in ARRAYS.items()}
    assert host == one == checksums(cut) == checksums(whole)
    assert len(set(host.values())) == len(host)
    keys = jax.random.split(jax.random.key(0), 4)
    placed = jax.device_put(keys, NamedSharding(mesh, P("data")))
    assert checksums({"keys": keys}) == checksums({"keys": placed}) != checksums({"keys": keys[::-1]})


def test_every_bit_and_every_place_counts(mesh):
    value = RNG.normal(size=(4, 4)).astype(np.float32)
    place = NamedSharding(mesh, P("data", "fsdp"))
    seen = {checksums({"x": value})["x"]}
    words = value.view(np.uint32)
    for row, column, bit in [(0, 0, 0), (0, 0, 31), (3, 3, 0), (2, 1, 17), (1, 2, 30)]:
        words[row, column] ^= np.uint32(1 << bit)
        seen.add(checksums({"x": jax.device_put(value, place)})["x"])
        words[row, column] ^= np.uint32(1 << bit)
    seen.add(checksums({"x": jax.device_put(value[::-1].copy(), place)})["x"])
    assert len(seen) == 7


def test_the_quick_sum_of_a_device_notices_a_bit_in_every_row(mesh):
    value = RNG.normal(size=(11, 3)).astype(np.float32)
    words, stacked = value.view(np.uint32), [value.copy()]
    for row in range(11):
        words[row, row % 3] ^= np.uint32(1 << (row + 20))
        stacked.append(value.copy())
    stacked += [value[:, ::-1], value[::-1]]  # the same numbers at other places
    leaves = {f"{at}": jax.device_put(array, NamedSharding(mesh, P())) for at, array in enumerate(stacked)}
    found = sums_by_device(leaves)
    assert len({tuple(sums.values()) for sums in found.values()}) == 14
    assert all(len(set(sums.values())) == 1 for sums in found.values())  # the same on all eight devices


def test_pairs_of_flips_do_not_cancel():
    """Two flips of the highest bit, and values that trade places, change the sum as any other change does."""
    value = np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32)
    before = checksums({"x": value})["x"]
    places = [(row, column) for row in range(6) for column in range(5)]
    for first in places[::4]:
        for second in places[::3]:
            if first == second:
                continue
            signs, swapped = value.copy(), value.copy()
            signs[first] *= -1
            signs[second] *= -1
            swapped[first], swapped[second] = value[second], value[first]
            assert before not in checksums({"signs": signs, "swapped": swapped}).values()


def test_what_is_not_finite_is_found_on_whatever_device_it_lies(mesh):
    value = np.ones((4, 4), np.float32)
    value[3, 2] = np.inf
    leaves = {
        "bad": jax.device_put(value, NamedSharding(mesh, P("data", "fsdp"))),
        "good": jax.device_put(np.ones((4, 4)), NamedSharding(mesh, P("tensor"))),
        "best so far": jnp.float32(np.inf),
        "lost": jnp.float32(np.nan),
        "count": jnp.int32(3),
    }
    assert finite(leaves) == {"bad": False, "good": True, "best so far": True, "lost": False}
