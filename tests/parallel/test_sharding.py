"""Which dim of which leaf is cut over which axis; the rule reads shapes alone."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb import make_mesh
from jaxfb.mesh import with_context
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.parallel.sharding import (
    adopt,
    cuts_experts,
    dim_of,
    manual_part,
    moved_by_program,
    optimizer_specs,
    param_specs,
    shardings,
    shards_of,
)
from jaxfb.parallel.tensor import transformer_param_specs


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


TREE = {
    "embed": leaf(12, 8),
    "layers": {"w": leaf(4, 8, 16), "square": leaf(4, 8, 8), "odd": leaf(4, 3)},
    "gain": leaf(3),
    "scalar": leaf(),
    "empty": leaf(0, 5),
}


FSDP = AbstractMesh((4,), ("fsdp",))


def test_fsdp_cuts_rows_before_columns():
    specs = param_specs(TREE | {"layers": {"w": leaf(8, 16), "square": leaf(8, 8), "odd": leaf(4, 3)}}, FSDP)
    assert specs == {
        "embed": P("fsdp"),
        "layers": {"w": P("fsdp"), "square": P("fsdp"), "odd": P("fsdp")},
        "gain": P(),
        "scalar": P(),
        "empty": P(),
    }


@pytest.mark.parametrize(
    "shape, fsdp, spec",
    [
        ((4096, 14336), 64, P("fsdp")),  # 224 columns end within a tile of 128, 64 rows at the end of one
        ((4096, 14336), 8, P("fsdp")),  # both fill tiles
        ((72, 4096), 8, P(None, "fsdp")),  # 9 rows do not
        ((4096, 4096), 64, P("fsdp")),
        ((32, 4096, 14336), 64, P(None, "fsdp")),
        ((128, 24, 40), 8, P("fsdp")),  # dims before the last two have no tiles
        ((128256, 4096), 64, P("fsdp")),  # neither 2004 rows nor 64 columns: the largest
        ((1024,), 4, P()),  # vectors stay whole
    ],
)
def test_fsdp_prefers_a_dim_whose_shards_fill_tiles(shape, fsdp, spec):
    mesh = AbstractMesh((fsdp,), ("fsdp",))
    assert param_specs({"w": leaf(*shape)}, mesh)["w"] == spec


def test_a_context_axis_is_more_fsdp():
    tree = {"a": leaf(16, 8), "b": leaf(6, 3), "c": leaf(12, 9), "d": leaf(5, 7)}
    specs = param_specs(tree, make_mesh(fsdp=2, context=4))
    # b: 8 divides neither dim, fsdp does; c: 8 does not, fsdp does
    assert specs == {"a": P(("fsdp", "context")), "b": P("fsdp"), "c": P("fsdp"), "d": P()}
    assert param_specs(tree, make_mesh(context=4))["a"] == P("context")
    assert param_specs(tree, make_mesh(fsdp=3, context=2, devices=jax.devices()[:6]))["a"] == P("context")
    # where a part of the axis has other rows, a shard is the same part of the leaf on the same device
    both = with_context(make_mesh(fsdp=2, context=4), 2)
    assert param_specs(tree, both) == specs | {"a": P(("fsdp", "rows", "context"))}
    places = (
        NamedSharding(mesh, param_specs(tree, mesh)["a"]) for mesh in (both, make_mesh(fsdp=2, context=4))
    )
    one, other = (place.devices_indices_map((16, 8)) for place in places)
    assert one == other


def test_an_expert_axis_is_more_fsdp_for_all_but_the_experts():
    tree = {"experts": {"up": leaf(8, 16, 32)}, "a": leaf(16, 8), "b": leaf(6, 3), "own": leaf(16, 8)}
    given = jax.tree.map(lambda _: P(), tree) | {"experts": {"up": P("expert")}, "own": P("expert")}

    def specs(**sizes):
        return param_specs(tree, make_mesh(**sizes), given)

    both = specs(fsdp=2, expert=4)
    assert both["a"] == P(("fsdp", "expert")) and both["b"] == P("fsdp")
    assert both["experts"]["up"] == P("expert", "fsdp") and both["own"] == P("expert", "fsdp")
    # `expert` alone would be a dim of experts: an axis of one device is named beside it
    alone = specs(expert=4)
    assert alone["a"] == P(("fsdp", "expert")) and alone["own"] == P("expert")
    assert shards_of(alone["a"]) == (0, ("fsdp", "expert")) and shards_of(alone["own"]) is None
    assert [cuts_experts(alone[name][0]) for name in ("a", "own")] == [False, True]
    assert shardings(alone["a"], make_mesh(expert=4)).spec == P("expert")  # as jit writes it
    assert specs(expert=2, context=2)["a"] == P(("expert", "context"))
    assert specs(expert=2, context=2)["own"] == P("expert", "context")
    assert specs(fsdp=2, expert=2, context=2)["a"] == P(("fsdp", "expert", "context"))
    own_mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    assert param_specs(tree, own_mesh, given) == jax.tree.map(lambda _: P(), tree) | {
        "experts": {"up": P("expert")},
        "own": P("expert"),
    }


def test_each_device_stores_its_share_of_a_mixture():
    """Matrices in all 8 parts, whichever axes cut them; norms are whole."""
    config = TransformerConfig(
        vocab_size=32,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        mlp_size=16,
        num_experts=8,
        shared_expert_size=16,
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    for sizes in ({"fsdp": 2, "expert": 4}, {"expert": 8}, {"expert": 4, "context": 2}):
        mesh = make_mesh(**sizes)
        specs = param_specs(params, mesh, transformer_param_specs(params), stacked=True)
        places = shardings(specs, mesh)
        for (path, one), place in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(places), strict=True
        ):
            parts = one.size // np.prod(place.shard_shape(one.shape))
            assert parts == (1 if path[-1].key == "scale" else 8), (sizes, path)


def test_the_stacked_dim_of_layers_is_never_cut_over_fsdp():
    specs = param_specs(TREE, make_mesh(fsdp=4), stacked=True)
    assert specs["layers"]["odd"] == P() and specs["layers"]["w"] == P(None, "fsdp")
    assert specs["embed"] == P("fsdp")


def test_tensor_dims_are_left_to_the_model_and_fsdp_takes_another():
    tree = {"a": leaf(8, 16), "b": leaf(8, 3)}
    specs = param_specs(tree, make_mesh(fsdp=2, tensor=2), {"a": P(None, "tensor"), "b": P("tensor", None)})
    assert specs == {"a": P("fsdp", "tensor"), "b": P("tensor")}


def test_a_tensor_axis_of_one_leaves_its_dims_to_fsdp():
    specs = param_specs({"embed": leaf(128, 16)}, make_mesh(fsdp=4), {"embed": P("tensor")})
    assert specs == {"embed": P("fsdp")}


def test_an_axis_that_a_callers_own_mesh_lacks_cuts_nothing():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = param_specs({"gate": leaf(2, 4, 8, 16)}, mesh, {"gate": P(None, "expert", None, "tensor")})
    assert specs == {"gate": P(None, None, None, "tensor")}


def test_zero1_cuts_one_more_dim_over_data():
    mesh = make_mesh(data=2, fsdp=2)
    specs = param_specs(TREE, mesh, stacked=True)
    cut = optimizer_specs(specs, TREE, mesh)
    assert cut["embed"] == P("fsdp", "data")
    assert cut["layers"]["w"] == P("data", "fsdp")  # that dim has no tiles
    assert cut["layers"]["odd"] == P("data")  # the stacked dim is free for the optimizer
    assert cut["gain"] == cut["scalar"] == P()


@pytest.mark.parametrize("mesh", [{}, {"tensor": 8}, {"data": 4}], ids=str)
def test_without_fsdp_nothing_is_cut_and_specs_have_one_form(mesh):
    """P() and not P(None, None): jit writes the specs of its results so, and they are compared."""
    assert set(jax.tree.leaves(param_specs(TREE, make_mesh(**mesh)))) == {P()}


def test_parts_of_a_spec():
    assert manual_part(P("fsdp", "tensor")) == P("fsdp", None)
    assert dim_of(P(None, "fsdp"), "fsdp") == 1 and dim_of(P("fsdp"), "data") is None


def test_only_what_was_committed_elsewhere_is_moved():
    target = shardings(P(), make_mesh(data=2))
    committed = jax.device_put(np.ones(3), jax.devices()[5])
    tree = {"host": np.ones(3), "free": jax.numpy.ones(3), "elsewhere": committed}
    moved = adopt(tree, jax.tree.map(lambda _: target, tree))
    assert moved["free"] is tree["free"]
    assert isinstance(moved["host"], np.ndarray) and not np.shares_memory(moved["host"], tree["host"])
    assert moved["elsewhere"].sharding == target


def test_a_program_that_moves_arrays_is_made_once_for_the_same_places():
    """As at each rollout of several processes."""
    mesh = make_mesh(fsdp=2)
    tree = {"a": np.arange(8.0), "b": np.arange(4.0)}
    shards, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    cut = jax.device_put(tree, shards)
    other = jax.tree.map(lambda leaf: leaf + 1, cut)
    before, traced = moved_by_program(cut, {"a": whole, "b": shards}), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", lambda *args, **options: traced.append(args))
        after = moved_by_program(other, {"a": whole, "b": shards})
    assert not traced
    for moved in (before, after):
        assert moved["a"].sharding == whole and moved["b"].sharding == shards
    np.testing.assert_array_equal(after["a"], tree["a"] + 1)
