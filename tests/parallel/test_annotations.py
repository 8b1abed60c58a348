"""Parameters that tell how they are cut over `tensor`, and state that is no parameter, in Flax's own words."""

import re
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from marks import some_slow

import jaxfb
from jaxfb import BatchPlan, Sum, make_mesh, make_train_step
from jaxfb.parallel.annotations import tensor_specs

ROWS, WIDTH, HIDDEN = 8, 4, 16
COLUMN, ROW = (None, "tensor"), ("tensor", None)
init = nnx.initializers.lecun_normal()


class Mlp(nnx.Module):
    def __init__(self, rngs, up=COLUMN, down=ROW):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, kernel_init=nnx.with_partitioning(init, up))
        self.down = nnx.Linear(HIDDEN, 1, rngs=rngs, kernel_init=nnx.with_partitioning(init, down))

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


class LinenMlp(nn.Module):
    partitioned: object = nn.with_partitioning
    names: tuple = (COLUMN, ROW)

    @nn.compact
    def __call__(self, x):
        up, down = (self.partitioned(nn.initializers.lecun_normal(), names) for names in self.names)
        hidden = nn.tanh(nn.Dense(HIDDEN, kernel_init=up)(x))
        return nn.Dense(1, kernel_init=down)(hidden)


def annotated_nnx(**names):
    with nnx.use_eager_sharding(False):
        return nnx.split(Mlp(nnx.Rngs(0), **names), nnx.Param)


GRAPH = annotated_nnx()[0]


def squares(out, microbatch):
    return Sum(((out[:, 0] - microbatch["y"]) ** 2).sum(), 1.0 * out.shape[0])


def nnx_loss(params, microbatch, rng):
    return squares(nnx.merge(GRAPH, params)(microbatch["x"]), microbatch)


def module_loss(module, microbatch, rng):
    return squares(module(microbatch["x"]), microbatch)


def linen_loss(params, microbatch, rng):
    return squares(LinenMlp().apply({"params": params}, microbatch["x"]), microbatch)


def linen_params(**options):
    return LinenMlp(**options).init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]


def whole_module():
    return nnx.merge(*annotated_nnx())


def plain_placed(mesh):
    """A pure dict, which has lost its annotations, whose arrays lie where they told."""
    params = nnx.to_pure_dict(annotated_nnx()[1])
    kernels = {"up": P(*COLUMN), "down": P(*ROW)}
    put = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))  # noqa: E731
    return {
        name: {"kernel": put(layer["kernel"], kernels[name]), "bias": put(layer["bias"], P())}
        for name, layer in params.items()
    }


CASES = {
    "nnx state": (lambda mesh: annotated_nnx()[1], nnx_loss),
    "nnx module": (lambda mesh: whole_module(), module_loss),
    "made by a function": (lambda mesh: lambda key: annotated_nnx()[1], nnx_loss),
    "linen boxes": (lambda mesh: linen_params(), linen_loss),
    "placed arrays": (plain_placed, nnx_loss),
}


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, WIDTH)).astype("f4"), "y": rng.normal(size=ROWS).astype("f4")}


def two_updates(mesh, loss, params, batch=batch_of, **options):
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=replicas)
    step = make_train_step(loss, optax.adam(1e-2), mesh, plan, dropout=False, **options)
    state = step.init(params)
    for seed in range(2):
        state, metrics = step(state, batch(seed))
    return state, metrics


def kernels(tree):
    return {leaf.shape: leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 2}


@pytest.mark.parametrize("name", some_slow(CASES, fast=("nnx module", "placed arrays")))
def test_parameters_and_moments_are_cut_as_annotated_and_the_numbers_are_those_of_one_device(name):
    make, loss = CASES[name]
    mesh = make_mesh(data=2, tensor=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, metrics = two_updates(mesh, loss, make(mesh))
    for tree in (state.params, state.opt_state[0].mu):
        up, down = kernels(tree)[WIDTH, HIDDEN], kernels(tree)[HIDDEN, 1]
        assert (up.sharding.spec, down.sharding.spec) == (P(None, "tensor"), P("tensor"))
        assert up.addressable_shards[0].data.shape == (WIDTH, HIDDEN // 2)
    one = make_mesh(devices=jax.devices()[:1])
    alone, of_one = two_updates(
        one, loss, jax.device_get(make(mesh)) if name == "placed arrays" else make(one)
    )
    np.testing.assert_allclose(metrics.loss, of_one.loss, rtol=1e-6)
    for cut, whole in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=2e-5, atol=1e-6)


def test_fsdp_takes_another_dim_than_the_annotation():
    state, _ = two_updates(make_mesh(fsdp=2, tensor=2), nnx_loss, annotated_nnx()[1])
    assert kernels(state.params)[WIDTH, HIDDEN].sharding.spec == P("fsdp", "tensor")


def test_a_restored_state_that_lies_cut_stays_cut():
    mesh = make_mesh(data=2, tensor=2)
    first, _ = two_updates(mesh, nnx_loss, plain_placed(mesh))
    plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=2)
    step = make_train_step(nnx_loss, optax.adam(1e-2), mesh, plan, dropout=False)
    state, _ = step(first, batch_of(2))
    assert kernels(state.params)[WIDTH, HIDDEN].sharding.spec == P(None, "tensor")


def test_param_specs_goes_before_what_parameters_tell():
    def whole(params):
        return jax.tree.map(lambda leaf: P("tensor") if leaf.shape == (WIDTH, HIDDEN) else P(), params)

    mesh = make_mesh(data=2, tensor=2)
    state, _ = two_updates(mesh, nnx_loss, annotated_nnx()[1], param_specs=whole)
    assert kernels(state.params)[WIDTH, HIDDEN].sharding.spec == P("tensor")
    assert kernels(state.params)[HIDDEN, 1].sharding.spec == P()


def test_logical_names_follow_flaxs_rules():
    names = (("embed", "mlp"), ("mlp", "one"))
    params = linen_params(partitioned=nn.with_logical_partitioning, names=names)
    mesh = make_mesh(tensor=2)
    with nn.logical_axis_rules([("embed", None), ("mlp", "tensor"), ("one", None)]):
        specs = tensor_specs(params, mesh)
    assert jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) == [
        P(),
        P(None, "tensor"),
        P(),
        P("tensor", None),
    ]


@pytest.mark.parametrize("given", ["names", "of the variable", "a sharding"])
def test_logical_names_of_nnx_follow_the_rules_that_nnx_reads(given):
    mesh, rules = make_mesh(tensor=2), (("embed", "fsdp"), ("mlp", "tensor"))
    names = {"up": ("embed", "mlp"), "down": ("mlp", None)}
    if given == "a sharding":
        names = {name: NamedSharding(mesh, P(*COLUMN) if name == "up" else P(*ROW)) for name in names}
    _, params = annotated_nnx(**names)
    if given == "of the variable":
        for name in names:
            params[name].kernel.set_metadata(sharding_rules=rules)
    with nnx.logical_axis_rules(rules if given == "names" else ()):
        specs = nnx.to_pure_dict(tensor_specs(params, mesh))
    assert (specs["up"]["kernel"], specs["down"]["kernel"]) == (P(*COLUMN), P("tensor", None))


def test_layers_stacked_for_a_pipeline_keep_the_annotation_of_one():
    boxes = jax.vmap(lambda key: linen_params())(jax.random.split(jax.random.key(0), 3))
    specs = tensor_specs({"layers": boxes}, make_mesh(tensor=2), stacked=True)["layers"]
    assert specs["Dense_0"]["kernel"].value == P(None, None, "tensor")
    assert specs["Dense_1"]["kernel"].value == P(None, "tensor", None)


def test_annotations_are_of_no_concern_to_a_mesh_without_a_tensor_axis():
    _, params = annotated_nnx(up=(None, "model"))
    assert tensor_specs(params, make_mesh(data=2)) is None
    with pytest.raises(
        ValueError,
        match=r"params\['up'\]\['kernel'\] is annotated with the axis 'model', which the mesh lacks",
    ):
        tensor_specs(params, make_mesh(tensor=2))


def test_a_dim_that_the_axis_does_not_divide_is_refused_with_its_leaf():
    _, params = annotated_nnx(down=(None, "tensor"))
    with pytest.raises(
        ValueError, match=r"params\['down'\]\['kernel'\].* of shape \(16, 1\) cannot be cut over tensor = 2"
    ):
        two_updates(make_mesh(tensor=2), nnx_loss, params)


def test_a_tensor_axis_that_cuts_nothing_is_warned_about():
    params = nnx.to_pure_dict(annotated_nnx()[1])
    with pytest.warns(UserWarning, match="tensor=2 cuts no parameter.*pass param_specs=") as seen:
        two_updates(make_mesh(data=2, tensor=2), nnx_loss, params)
    assert len([one for one in seen if "cuts no parameter" in str(one.message)]) == 1
    fb = jaxfb.get_forward_backward_func(make_mesh(tensor=2))
    with pytest.warns(UserWarning, match="tensor=2 cuts no parameter"):
        fb(nnx_loss, params, batch_of(), BatchPlan(rows=ROWS, num_microbatches=2))


# What is no parameter


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.bn, self.out = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.bn(x))


def test_running_statistics_are_no_parameters():
    graph, state = nnx.split(Normed(nnx.Rngs(0)))

    def loss(params, microbatch, rng):
        return squares(nnx.merge(graph, params)(microbatch["x"]), microbatch)

    with pytest.raises(
        ValueError, match=r"params\['bn'\]\['mean'\] is a BatchStat of NNX.*nnx.split\(model, nnx.Param"
    ):
        two_updates(make_mesh(), loss, state)
    with pytest.raises(ValueError, match="is a BatchStat"):
        jaxfb.get_forward_backward_func()(loss, state, batch_of(), BatchPlan(rows=ROWS, num_microbatches=2))
    with pytest.raises(ValueError, match="is a BatchStat"):
        two_updates(make_mesh(), module_loss, Normed(nnx.Rngs(0)))


def test_what_the_refusal_advises_works():
    graph, params, rest = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, microbatch, rng):
        return squares(nnx.merge(graph, params, rest, copy=True)(microbatch["x"]), microbatch)

    state, metrics = two_updates(make_mesh(), loss, params)
    assert int(state.step) == 2 and np.isfinite(metrics.loss)


def test_a_variable_that_the_loss_changes_must_be_its_own():
    """A BatchNorm updates its statistics, and a Dropout counts its keys; Flax refuses that from inside of a trace."""
    graph, params, rest = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, microbatch, rng):
        return squares(nnx.merge(graph, params, rest)(microbatch["x"]), microbatch)

    with pytest.raises(
        ValueError, match=r"changes a BatchStat .*nnx.merge\(graph, params, rest, copy=True\)"
    ):
        two_updates(make_mesh(), loss, params)


def test_keys_and_counts_of_dropout_are_no_parameters():
    with pytest.raises(ValueError, match=r"is a Rng\w+ of NNX"):
        two_updates(make_mesh(), module_loss, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def test_collections_of_linen_beside_the_parameters_are_refused():
    variables = {"params": linen_params(), "batch_stats": {"mean": np.zeros(2, np.float32)}}
    with pytest.raises(ValueError, match=r"params\['batch_stats'\] is a collection of state of Flax"):
        two_updates(make_mesh(), linen_loss, variables)


def test_the_pages_param_specs_cut_as_it_tells():
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    block = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def param_specs" in block
    )
    mesh, params = make_mesh(data=2, tensor=2), nnx.to_pure_dict(annotated_nnx()[1])
    plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=2)
    names = {"jax": jax, "jaxfb": jaxfb, "P": P, "mesh": mesh, "plan": plan, "loss_fn": nnx_loss}
    names["optimizer"] = optax.adam(1e-2)
    exec(block, names)
    state = names["train_step"].init(params)
    assert kernels(state.params)[WIDTH, HIDDEN].sharding.spec == P(None, "tensor")
    assert kernels(state.params)[HIDDEN, 1].sharding.spec == P("tensor")


def test_running_statistics_in_a_pure_dict_are_found_by_a_loss_that_reads_none_of_them():
    graph, state = nnx.split(Normed(nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)

    def loss(params, microbatch, rng):
        return squares(nnx.merge(graph, params)(microbatch["x"]), microbatch)

    with pytest.raises(
        ValueError, match=r"params\['bn'\] has running statistics, 'mean' and 'var', which the loss"
    ):
        two_updates(make_mesh(), loss, params)

    def gaussian(params, microbatch, rng):  # of the same names, and read
        return Sum(((microbatch["x"] - params["mean"]) ** 2 / jnp.exp(params["var"])).sum(), float(ROWS))

    state, _ = two_updates(
        make_mesh(), gaussian, {"mean": np.zeros(WIDTH, np.float32), "var": np.zeros(WIDTH, np.float32)}
    )
    assert int(state.step) == 2


class Scanned(nn.Module):
    """Layers by nn.scan, whose boxes have the name of the axis of layers and Flax's own names of the others."""

    @nn.compact
    def __call__(self, x):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        layers = nn.scan(
            lambda module, hidden, _: (hidden + module(hidden), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        hidden, _ = layers(nn.Dense(WIDTH, kernel_init=kernel, use_bias=False), x, None)
        return hidden[:, :1]


LOGICAL = LinenMlp(nn.with_logical_partitioning, (("embed", "mlp"), ("mlp", "one")))
OTHER_AXES = {
    "fsdp": LinenMlp(names=((None, "fsdp"), ("fsdp", None))),
    "of another mesh": LinenMlp(names=((None, "model"), ("model", None))),
    "scanned": Scanned(),
    "logical": LOGICAL,
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_other_axes_in_the_boxes_of_linen_have_no_effect(name):
    module = OTHER_AXES[name]
    boxed = module.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    loss = lambda params, microbatch, rng: squares(  # noqa: E731
        module.apply({"params": params}, microbatch["x"]), microbatch
    )
    with nn.logical_axis_rules([("embed", "fsdp"), ("mlp", "model")]):
        state, metrics = two_updates(make_mesh(data=2, fsdp=2), loss, boxed)
        alone, of_one = two_updates(make_mesh(devices=jax.devices()[:1]), loss, nn.unbox(boxed))
    assert jax.tree.structure(state.params) == jax.tree.structure(boxed)
    np.testing.assert_allclose(metrics.loss, of_one.loss, rtol=1e-6)
    for cut, whole in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=2e-5, atol=1e-6)
