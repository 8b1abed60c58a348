"""A collective in two steps is the collective: same shards, same order, and one that can be differentiated."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb import make_mesh
from jaxfb.parallel import collectives


def test_groups_form_a_grid():
    across, within = collectives.two_steps(8, 2)
    assert across == [[0, 2, 4, 6], [1, 3, 5, 7]] and within == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert collectives.two_steps(6, 3) == ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]])


def test_a_grid_has_4_across_or_what_is_in_all_dimensions_but_one():
    assert [collectives.neighbours(size, None) for size in (64, 8, 6, 2, 7)] == [16, 2, 3, None, None]
    assert [collectives.neighbours(size, 3) for size in (64, 512, 128, 8, 6)] == [4, 8, 4, 2, 2]
    assert [collectives.neighbours(size, 2) for size in (64, 256, 32, 9, 7)] == [8, 16, 4, 3, None]


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4}, {"fsdp": 8}, {"fsdp": 2, "context": 4}, {"fsdp": 1, "expert": 4}], ids=str
)
def test_two_steps_give_the_shards_of_one_in_order(sizes, monkeypatch):
    mesh, axes = make_mesh(**sizes), tuple(sizes)
    whole = np.random.default_rng(0).normal(size=(mesh.size, 3, 16))
    monkeypatch.setattr(collectives, "_falls_back", lambda *_: True)

    def both(own):
        ours = collectives.reduce_scatter(own[0], axes, 1)
        theirs = lax.psum_scatter(own[0], axes, scatter_dimension=1, tiled=True)
        return ours, theirs, collectives.all_gather(theirs, axes, 1)

    cut = P(None, axes)
    program = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=P(axes), out_specs=(cut, cut, P()), check_vma=False)
    )
    assert len(program.lower(whole).compile().as_text().split(" reduce-scatter(")) == 4
    ours, theirs, gathered = program(whole)
    np.testing.assert_allclose(ours, whole.sum(0), rtol=1e-13)
    np.testing.assert_array_equal(gathered, theirs)


def test_only_a_group_that_is_a_whole_tpu_slice_is_split():
    class Mesh:
        def __init__(self, kind, platform="tpu", **shape):
            self.abstract_device = type("Device", (), {"platform": platform, "device_kind": kind})
            self.shape, self.size = shape, int(np.prod(list(shape.values())))

    def split(mesh):
        axes = tuple(axis for axis in ("fsdp", "context") if axis in mesh.shape)
        return [collectives._falls_back(axes, kind, mesh) for kind in ("gather", "scatter")]

    assert split(Mesh("TPU v5p", fsdp=64, data=1)) == [True, True]
    assert split(Mesh("TPU v5p", fsdp=16, context=4, data=1)) == [True, True]
    assert split(Mesh("TPU v5 lite", fsdp=16)) == [False, True]
    assert split(Mesh("TPU v5p", fsdp=32, data=2)) == [False, False]
    assert split(Mesh("NVIDIA H100", "gpu", fsdp=64)) == [False, False]


def test_scatters_run_beside_products_on_tpus_but_v5e():
    kinds = ("TPU v4", "TPU v5", "TPU v6 lite", "TPU v5 lite", "NVIDIA H100", None)
    found = [collectives.scatters_beside_products(kind) for kind in kinds]
    assert found == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("kind", "axes", "given", "steps"),
    [
        ("TPU v6 lite", ("fsdp", "expert"), {}, 2),
        ("TPU v5", ("fsdp", "expert"), {"in_halves": True}, 2),
        ("TPU v5", ("fsdp", "expert"), {"exposed": True}, 1),
        ("TPU v5", ("fsdp", "context"), {"in_halves": True}, 1),
        ("TPU v5", ("fsdp", "context"), {"exposed": True}, 2),
        ("TPU v5p", ("fsdp",), {"exposed": True}, 2),
        ("TPU v5 lite", ("fsdp", "expert"), {"in_halves": True}, 1),
    ],
)
def test_steps_of_a_scatter_run_a_layer_apart_where_that_gains(kind, axes, given, steps, monkeypatch):
    mesh = SimpleNamespace(
        abstract_device=SimpleNamespace(device_kind=kind, platform="tpu"),
        size=8,
        shape=dict.fromkeys(axes, 8 // len(axes)),
    )
    monkeypatch.setattr(collectives, "get_abstract_mesh", lambda: mesh)
    monkeypatch.setattr(collectives, "_falls_back", lambda *_: True)
    monkeypatch.setattr(collectives.lax, "axis_size", mesh.shape.get)
    assert collectives.steps_apart(axes, **given) == steps
