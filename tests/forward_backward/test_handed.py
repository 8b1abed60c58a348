"""Whole parameters and waiting gradients that one loop over the layers hands on to the next: the same numbers."""

import math

import jax
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.forward_backward import execution, handed
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import collectives
from jaxfb.platforms.compat import equations

KEY = jax.random.key(5)


@pytest.fixture(autouse=True)
def on_any_platform(monkeypatch):
    set_handing_on(monkeypatch, True)
    yield
    jax.clear_caches()


def set_handing_on(monkeypatch, hands_on):
    """Calls with equal options share one trace, which knows nothing of this."""
    monkeypatch.setattr(execution, "hands_on", lambda remat: hands_on)
    jax.clear_caches()


@pytest.fixture
def in_two_steps(monkeypatch):
    """As on v6e and v5p where fsdp is a whole slice."""
    monkeypatch.setattr(collectives, "_falls_back", lambda axes, kind, mesh: "fsdp" in axes)
    monkeypatch.setattr(collectives, "_gains_by_steps_apart", lambda mesh, on_v5p: True)


def call(mesh, layers, num_microbatches=2, dtype=np.float64, gather_ahead=True, **options):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), gather_ahead=gather_ahead, **options)
    return fb, (toy.model, toy.params(layers=layers, dtype=dtype), toy.batch(), plan, KEY)


def gradients(*args, **options):
    fb, arguments = call(*args, **options)
    return fb(*arguments)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ({"fsdp": 4}, 3, {"remat": "selective"}),
    ({"fsdp": 2}, 4, {"remat": "none", "num_microbatches": 4}),
    slow({"fsdp": 4}, 1, {"remat": "none"}),
    slow({"fsdp": 4}, 3, {"remat": "selective", "num_microbatches": 1}),
    slow({"fsdp": 4}, 3, {"remat": "full"}),
    slow({"fsdp": 4}, 5, {"remat": "selective", "reduce_dtype": "float64"}),
    slow({"fsdp": 4}, 3, {"remat": "selective", "fsdp_gather": 2}),
    slow({"fsdp": 4}, 4, {"remat": "selective*2+layer"}),
    slow({"data": 2, "fsdp": 2}, 3, {"remat": "selective", "overlap_grad_reduce": True}),
    slow({"data": 2, "fsdp": 2}, 3, {"remat": "selective", "optimizer_sharding": "data"}),
]


@pytest.mark.parametrize(("mesh", "layers", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device(mesh, layers, options):
    out = gradients(mesh, layers, **options)
    loss, grads = toy.gradient(layers, seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.parametrize(("mesh", "layers", "options"), CASES, ids=str)
def test_gradients_are_those_of_one_device_with_a_scatter_in_two_steps(mesh, layers, options, in_two_steps):
    test_gradients_are_those_of_one_device(mesh, layers, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"trainable": ["layers.b"]},
        {"trainable": ["layers.w", "embed"]},
        {"dtype": np.float32, "compute_dtype": "bfloat16"},
        {"dtype": np.float32, "reduce_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_gradients_are_bitwise_those_without_it(options, monkeypatch):
    """Also in narrow dtypes: every sum is formed in the same order."""
    with_it = gradients({"fsdp": 4}, 3, remat="selective", **options)
    set_handing_on(monkeypatch, False)
    without = gradients({"fsdp": 4}, 3, remat="selective", **options)
    jax.tree.map(np.testing.assert_array_equal, with_it.grads, without.grads)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, "half"])
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}], ids=str)
def test_gradients_of_the_transformer_are_those_of_one_device(experts, ahead):
    sizes = TransformerConfig(
        vocab_size=32, num_layers=3, hidden_size=16, num_heads=2, mlp_size=32, **experts
    )
    model, params = transformer(sizes), init_params(sizes, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), params)
    tokens = np.random.default_rng(0).integers(0, 32, (8, 8))
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((8, 8))}
    mesh = {"fsdp": 2, "expert": 2} if experts else {"fsdp": 4}

    def result(axes, **options):
        plan = jaxfb.BatchPlan(rows=8, data_parallel=math.prod(axes.values()), num_microbatches=2)
        return jaxfb.get_forward_backward_func(jaxfb.make_mesh(**axes), **options)(model, params, batch, plan)

    out, wanted = result(mesh, gather_ahead=ahead, remat="selective"), result({"data": 1})
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


def collectives_at_the_ends():
    """How many gathers and scatters the loop over microbatches has, those of the loops over the layers once."""
    fb, (model, params, *rest) = call({"fsdp": 4}, 4, remat="selective")
    program = jax.make_jaxpr(lambda params: fb(model, params, *rest))(params).jaxpr
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in equations(program) if eqn.primitive.name == "scan"]
    names = max(([eqn.primitive.name for eqn in equations(body)] for body in bodies), key=len)
    return [names.count(name) for name in ("all_gather", "reduce_scatter")]


def test_a_microbatch_gathers_no_layer_and_waits_for_no_scatter_at_its_ends(monkeypatch):
    """But for the layers' one matrix: `b` is in no shards."""
    handing = collectives_at_the_ends()
    set_handing_on(monkeypatch, False)
    alone = collectives_at_the_ends()
    assert [before - now for before, now in zip(alone, handing, strict=True)] == [2, 1]


def test_only_tpus_where_activations_are_kept_hand_on():
    kinds = ("TPU v5p", "TPU v6 lite", "TPU v5 lite", "NVIDIA H100", "cpu", None)
    assert [handed.handing_on_pays(kind, "selective") for kind in kinds] == [True, True, *[False] * 4]
    remats = ("none", "selective", "full", "layer", "offload", "halves")
    assert [handed.handing_on_pays("TPU v5p", remat) for remat in remats] == [True, True, *[False] * 4]
