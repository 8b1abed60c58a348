"""Whole parameters and waiting gradients that one loop over the layers hands on to the next: the same numbers."""

import jax
import numpy as np
import pytest
import toy
from comparisons import close
from late import call, gradients, of_transformer

from jaxfb.config import load_config
from jaxfb.forward_backward.layers import execution, handed
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.planner import parse_topology
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job
from jaxfb.platforms.compat import equations


@pytest.fixture(autouse=True)
def on_any_platform(monkeypatch):
    set_handing_on(monkeypatch, True)
    yield
    jax.clear_caches()


def set_handing_on(monkeypatch, hands_on):
    """Calls with equal options share one trace, which knows nothing of this."""
    monkeypatch.setattr(execution, "hands_on", lambda remat: hands_on)
    jax.clear_caches()


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
    out = gradients(mesh, layers, gather_ahead=True, **options)
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
    with_it = gradients({"fsdp": 4}, 3, gather_ahead=True, remat="selective", **options)
    set_handing_on(monkeypatch, False)
    without = gradients({"fsdp": 4}, 3, gather_ahead=True, remat="selective", **options)
    jax.tree.map(np.testing.assert_array_equal, with_it.grads, without.grads)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, "half"])
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}], ids=str)
def test_gradients_of_the_transformer_are_those_of_one_device(experts, ahead):
    wanted, out = of_transformer(experts, gather_ahead=ahead, remat="selective")
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


def collectives_at_the_ends():
    """How many gathers and scatters the loop over microbatches has, those of the loops over the layers once."""
    fb, (model, params, *rest) = call({"fsdp": 4}, 4, gather_ahead=True, remat="selective")
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


@pytest.mark.parametrize(
    ("topology", "layout", "hands_on"),
    [
        ("v6e:2x4", ["parallel.remat=selective"], True),
        ("v5p:2x2x2", ["parallel.remat=none", "parallel.gather_ahead=half"], True),
        ("v6e:2x4", ["parallel.remat=full"], False),
        ("v5e:2x4", ["parallel.remat=selective"], False),
        ("v6e:2x4", ["parallel.remat=selective", "parallel.gather_ahead=false"], False),
        ("v6e:2x4", ["parallel.remat=selective", "mesh.fsdp=4", "mesh.pipe=2", "schedule=1f1b"], False),
    ],
    ids=str,
)
def test_it_is_the_default_where_it_was_measured_to_pay(topology, layout, hands_on, monkeypatch):
    monkeypatch.undo()
    handed_on = []

    def spy(stage, layers, target):
        handed_on.append(hand_to_first(stage, layers, target) is not None)
        return hand_to_first(stage, layers, target)

    hand_to_first = Stage.hand_to_first
    monkeypatch.setattr(Stage, "hand_to_first", spy)
    config = load_config("configs/quickstart.yaml", ["data.tokenizer=bytes", "mesh.fsdp=8", *layout])
    job = make_job(config, abstract_mesh(config, 8, abstract_device(parse_topology(topology))))
    job.step.trace(job.state, job.batch)
    assert any(handed_on) == hands_on
