"""Frozen parameters: the gradients of the others are those of one device, and a frozen one costs nothing."""

from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from comparisons import close
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb import trainable
from jaxfb.platforms.compat import equations

ROWS, KEY = 16, jax.random.key(11)
BIASES = ("layers.b", "gain")


@lru_cache
def params():
    return toy.params(tied=False)


@lru_cache
def whole_gradient():
    run = jax.jit(jax.grad(lambda tree: toy.whole_batch(tree, toy.batch(), KEY)[0]))
    return run(params())


def plan(mesh, num_microbatches, rows=ROWS):
    replicas = int(np.prod([size for axis, size in mesh.items() if axis in ("data", "fsdp")], dtype=int))
    return jaxfb.BatchPlan(rows=rows, data_parallel=replicas, num_microbatches=num_microbatches)


def plain_loss(tree, microbatch, keys):
    _, terms = toy.whole_batch(tree, microbatch, None)
    return jaxfb.LossOutput(terms)


def tensor_specs(tree):
    specs = {name: P() for name in ("embed", "gain", "head")}
    return specs | {"layers": {"w": P(None, None, "tensor"), "b": P(None, "tensor")}}


CASES = [
    ({}, 4, BIASES, {}),
    ({}, 1, ("layers.w",), {"remat": "layer"}),
    ({}, 4, ("head",), {}),
    ({"data": 2, "fsdp": 2}, 2, ("layers.w", "head"), {}),
    ({"data": 2, "fsdp": 2}, 2, BIASES, {"fsdp_gather": "step", "optimizer_sharding": "data"}),
    ({"data": 2, "fsdp": 2}, 2, ("layers.b", "embed"), {"optimizer_sharding": "gradients"}),
    ({"fsdp": 2, "tensor": 2}, 2, BIASES, {"param_specs": tensor_specs}),
    ({"pipe": 2}, 4, BIASES, {"schedule": "zero_bubble", "remat": "layer"}),
    ({"pipe": 2, "fsdp": 2}, 4, ("layers.w",), {"schedule": "zero_bubble"}),
    ({"pipe": 2}, 4, ("head", "layers.b"), {"schedule": "1f1b", "head_placement": "rows"}),
    ({"pipe": 2}, 4, ("embed",), {"schedule": "interleaved", "num_chunks": 2, "remat": "full"}),
    ({"pipe": 2, "data": 2}, 2, ("*.b",), {"schedule": "gpipe", "optimizer_sharding": "data"}),
    ({"pipe": 2}, 4, ("layers",), {"schedule": "v_shape", "num_chunks": 2, "poison_bubbles": True}),
    ({"pipe": 2}, 4, BIASES, {"schedule": "zb_v", "num_chunks": 2}),
]


def written(option):
    return getattr(option, "__name__", str(option))


NAMES = ["-".join([*(f"{a}{n}" for a, n in mesh.items()), *names, *map(written, options.values())])
         for mesh, _, names, options in CASES]  # fmt: skip


SLOW = {"pipe2-fsdp2", "zero_bubble", "interleaved", "gpipe", "v_shape", "zb_v", "1f1b", "gradients"}
PARAMETERS = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] if any(word in name for word in SLOW) else [])
    for case, name in zip(CASES, NAMES, strict=True)
]


@pytest.mark.parametrize(("mesh", "count", "names", "options"), PARAMETERS)
def test_gradients_of_the_trained_are_those_of_one_device(mesh, count, names, options):
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), trainable=names, **options)
    out = fb(toy.model, params(), toy.batch(), plan(mesh, count), KEY)
    close(out.grads, trainable.pruned(names, whole_gradient()))


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2}], ids=str)
def test_a_plain_loss_function_has_frozen_parameters_too(mesh):
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), trainable=BIASES)
    grads = fb(plain_loss, params(), toy.batch(), plan(mesh, 2)).grads
    wanted = jax.jit(jax.grad(lambda tree: toy.whole_batch(tree, toy.batch(), None)[0]))(params())
    close(grads, trainable.pruned(BIASES, wanted))


CODES = np.random.default_rng(5).integers(-100, 100, (4, 4, 4)).astype(np.int8)
ADAPTED = {
    "layers": {"codes": CODES, "added": np.random.default_rng(6).normal(size=(4, 4, 4))},
    "first": np.random.default_rng(7).normal(size=(6, 4)),
}
WITH_CODES = {"x": np.random.default_rng(8).normal(size=(ROWS, 6)), "y": np.ones((ROWS, 4))}


def layer_of_codes(layer, hidden, microbatch, keys):
    """A matrix in integers with a matrix added to it."""
    assert layer["codes"].dtype == jnp.int8
    return hidden + jnp.tanh(hidden @ (0.01 * layer["codes"].astype(hidden.dtype) + layer["added"]))


QUANTIZED = jaxfb.Pipelined(
    lambda outer, microbatch, keys: microbatch["x"] @ outer["first"],
    layer_of_codes,
    lambda outer, hidden, microbatch, keys: jaxfb.Sum(
        jnp.square(hidden - microbatch["y"]).sum(), hidden.shape[0]
    ),
)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 2, "fsdp": 2}, {}),
        ({"fsdp": 2}, {"gather_ahead": True, "remat": "full"}),
        ({"pipe": 2, "data": 2}, {"optimizer_sharding": "data"}),
    ],
    ids=str,
)
def test_frozen_parameters_may_be_integers(mesh, options):
    def whole(added):
        hidden = WITH_CODES["x"] @ ADAPTED["first"]
        for codes, own in zip(CODES, added, strict=True):
            hidden = layer_of_codes({"codes": codes, "added": own}, hidden, None, None)
        return jnp.square(hidden - WITH_CODES["y"]).sum() / ROWS

    names, cut = ["layers.added"], plan(mesh, 2)
    options = {**options, "trainable": names}
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    got = fb(QUANTIZED, ADAPTED, WITH_CODES, cut).grads["layers"]["added"]
    np.testing.assert_allclose(got, jax.grad(whole)(ADAPTED["layers"]["added"]), rtol=1e-10)
    step = jaxfb.make_train_step(
        QUANTIZED, optax.adamw(1e-2), jaxfb.make_mesh(**mesh), cut, dropout=False, **options
    )
    state, _ = step(step.init(ADAPTED), WITH_CODES)
    np.testing.assert_array_equal(state.params["layers"]["codes"], CODES)
    assert state.params["layers"]["codes"].dtype == jnp.int8
    with pytest.raises(ValueError, match=r"\['codes'\] is int8; freeze it"):
        jaxfb.get_forward_backward_func()(QUANTIZED, ADAPTED, WITH_CODES, plan({}, 2))


def test_integers_stay_what_they_are_under_a_compute_dtype():
    fb = jaxfb.get_forward_backward_func(trainable=["layers.added"], compute_dtype="bfloat16")
    assert np.isfinite(fb(QUANTIZED, ADAPTED, WITH_CODES, plan({}, 2)).loss)


def products(mesh, names, **options):
    """Counts the matrix products of one call's program; those in a loop once."""
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), trainable=names, **options)
    run = jax.make_jaxpr(lambda tree: fb(toy.model, tree, toy.batch(), plan(mesh, 4), KEY).grads)
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(run(params())))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({}, {}), ({"pipe": 2}, {"schedule": "1f1b"}), ({"pipe": 2}, {"schedule": "zero_bubble"})],
    ids=str,
)
def test_no_product_is_computed_for_a_frozen_weight(mesh, options):
    of_all, without = (products(mesh, names, **options) for names in (None, ("embed", "head", *BIASES)))
    assert without < of_all
    if not mesh:
        assert of_all - without == 1


WIDE = 64


@lru_cache
def memory(mesh, names, remat, **options):
    """Returns the bytes of temporaries and of outputs of a call whose layers are 64 wide, on each device."""
    mesh, layers = dict(mesh), 8
    tree = {
        "embed": np.ones((toy.VOCAB, WIDE)),
        "layers": {"w": np.ones((layers, WIDE, WIDE)), "b": np.ones((layers, WIDE))},
        "head": np.ones((WIDE, toy.VOCAB)),
        "gain": np.ones(3),
    }
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), trainable=names, remat=remat)
    run = jax.jit(lambda tree: fb(toy.model, tree, toy.batch(), plan(mesh, 4)).grads)
    found = run.lower(tree).compile().memory_analysis()
    return found.temp_size_in_bytes, found.output_size_in_bytes


@pytest.mark.parametrize(
    "mesh", [(), pytest.param((("pipe", 2),), marks=pytest.mark.slow), (("fsdp", 2),)], ids=str
)
def test_a_frozen_weight_has_no_gradient_no_accumulator_and_no_residual(mesh):
    names = ("embed", "head", *BIASES)
    (temp, out), (without_temp, without_out) = (memory(mesh, each, "none") for each in (None, names))
    sizes = dict(mesh)
    share = 8 * WIDE * WIDE * 4 // (sizes.get("pipe", 1) * sizes.get("fsdp", 1))
    of_layers = ROWS // 4 * toy.SEQ * WIDE * 4 * 8 // (sizes.get("pipe", 1) * sizes.get("fsdp", 1))
    assert out - without_out >= share
    # without a pipeline the sums are the outputs themselves, and what is saved beside them are the inputs of products
    assert temp - without_temp >= of_layers + (share if "pipe" in sizes else 0)


def test_the_optimizer_has_state_for_the_trained_alone():
    step = jaxfb.make_train_step(
        toy.model, optax.adam(0.1), jaxfb.make_mesh(data=2), plan({"data": 2}, 2), trainable=BIASES,
        max_grad_norm=1.0, count_zeros=True,
    )  # fmt: skip
    state = step.init(params())
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in (params()["layers"]["b"], params()["gain"])])
    frozen = {"embed", "head"}
    new, metrics = step(state, toy.batch())
    before = params()
    assert not metrics.skipped and metrics.num_zeros == 0
    close({name: new.params[name] for name in frozen}, {name: before[name] for name in frozen}, 0)
    assert (np.asarray(new.params["layers"]["w"]) == before["layers"]["w"]).all()
    assert (np.asarray(new.params["layers"]["b"]) != before["layers"]["b"]).any()
    close(metrics.param_norm, np.sqrt((before["layers"]["b"] ** 2).sum() + 3))


def test_gradients_as_a_value_are_applied_bit_for_bit_as_the_step_does():
    step = jaxfb.make_train_step(
        toy.model, jaxfb.make_optimizer("adamw", learning_rate=0.1), jaxfb.make_mesh(), plan({}, 2),
        trainable=("layers.w",), change_gradients=lambda grads, state: jax.tree.map(lambda g: 2 * g, grads),
    )  # fmt: skip
    fused, metrics = step(step.init(params()), toy.batch())
    state = step.init(params())
    gradients = step.gradients(state, toy.batch())
    assert gradients.grads["embed"] is None
    applied, _ = step.apply(state, gradients)
    chex.assert_trees_all_equal(applied.params, fused.params)
    assert metrics.learning_rate == 0.1


@pytest.mark.slow
def test_what_is_not_finite_is_named_among_all_parameters():
    spoiled = params() | {"layers": params()["layers"] | {"b": np.full_like(params()["layers"]["b"], np.nan)}}
    step = jaxfb.make_train_step(
        toy.model, optax.adam(0.1), jaxfb.make_mesh(), plan({}, 2), trainable=("layers.b",)
    )
    state, metrics = step(step.init(spoiled), toy.batch())
    assert metrics.skipped
    causes = metrics.nonfinite_causes(state.params)
    assert causes["parameters"] == causes["gradients"] == ["['layers']['b']"]


@pytest.mark.slow
def test_the_comparison_with_one_device_is_of_the_trained_alone():
    found = jaxfb.check_equivalence(
        toy.model, params(), toy.batch(), [{"data": 2}], dtype="float64", trainable=["head"]
    )
    assert found.worst.leaf == "head" and found.worst.relative < 1e-12


def test_equivalence_of_a_model_with_a_frozen_table_of_integers():
    """It has no gradient, neither on the meshes nor on one device."""

    def loss(params, batch, rng):
        scores = params["head"][params["classes"][batch["tokens"]]].sum(-1) * batch["mask"]
        return jaxfb.Sum(jnp.square(scores).sum(), batch["mask"].sum())

    given = {"head": toy.params()["embed"], "classes": jnp.arange(len(toy.params()["embed"]))[::-1]}
    found = jaxfb.check_equivalence(loss, given, toy.batch(), [{"data": 2}], trainable=["head"])
    assert found.worst.leaf == "head" and found.worst.relative < 1e-12


def test_refusals():
    mesh = jaxfb.make_mesh()
    fb = jaxfb.get_forward_backward_func(mesh, trainable=["layers.c"])
    with pytest.raises(
        ValueError, match=r"no parameter matches 'layers.c'; the nearest are layers.w, layers.b, head"
    ):
        fb(toy.model, params(), toy.batch(), plan({}, 2))
    for wrong in ([], "layers", [""], [3]):
        with pytest.raises(ValueError, match="trainable must be a list of patterns") as error:
            jaxfb.get_forward_backward_func(mesh, trainable=wrong)
        for choice in error.value.choices:
            jaxfb.get_forward_backward_func(mesh, **choice)


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("layers", "layers.w", True),
        ("layers.w", "layers.w.value", True),
        ("*.w", "layers.w", True),
        ("*lora_*", "layers.attention.query.lora_a", True),
        ("layer", "layers.w", False),
        ("layers.w", "layers.wide", False),
    ],
)
def test_patterns(pattern, name, wanted):
    assert trainable.matches(pattern, name) is wanted
