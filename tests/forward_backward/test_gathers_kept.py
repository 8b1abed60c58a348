"""FSDP's weights of some layers stay gathered for the whole call: the gradients of one device, and fewer gathers."""

import jax
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "kept", "options"),
    [
        ({"fsdp": 2}, 1, {"layers": 2}),
        slow({"fsdp": 2}, 3, {"gather_ahead": True, "remat": "selective*1+layer", "layers": 5}),
        slow({"fsdp": 4}, 4, {"remat": "layer", "num_microbatches": 1}),
        slow({"data": 2, "fsdp": 2}, 2, {"remat": "full", "optimizer_sharding": "data"}),
        slow({"fsdp": 2}, 2, {"trainable": ["layers.b"], "remat": "full"}),
        slow({"pipe": 2, "fsdp": 2}, 1, {"remat": "full", "layers": 10, "schedule": "1f1b"}),
        slow({"pipe": 2, "fsdp": 2}, 3, {"remat": "full", "layers": 10, "schedule": "1f1b", "gather_ahead": True}),
        slow({"pipe": 2, "fsdp": 2}, 1, {"remat": "none*2+layer", "layers": 10, "schedule": "zero_bubble"}),
        slow({"pipe": 2, "fsdp": 2}, 1, {"num_chunks": 2, "layers": 8, "schedule": "interleaved", "remat": "none"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_those_of_one_device(mesh, kept, options):
    out = toy.on_mesh(mesh, KEY, fsdp_gather=kept, **options)
    loss, grads = toy.gradient(options.get("layers", 4), seed=5)
    close(out.loss, loss)
    jax.tree.map(
        lambda ours, theirs: ours is None or close(ours, theirs),
        out.grads,
        grads,
        is_leaf=lambda x: x is None,
    )


def test_layers_that_stay_are_gathered_outside_the_loops():
    """Of four layers in two microbatches, 2 * 2 * 4 gathers of each leaf a call; with three that stay, 2 * 2 * 1."""

    def gathers(kept):
        mesh = jaxfb.make_mesh(fsdp=2)
        plan = jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=2, num_microbatches=2)
        fb = jaxfb.get_forward_backward_func(mesh, fsdp_gather=kept, remat="layer")
        run = lambda *args: fb(toy.model, *args, plan, KEY).grads  # noqa: E731
        return _layer_elements(jax.make_jaxpr(run)(toy.params(layers=4), toy.batch()))

    every, some = gathers("layer"), gathers(3)
    assert every == 16 and some == 4 + 3


def _layer_elements(program, times=1):
    """Weights `w` of a layer that the loops gather, in layers: an all-gather of three stacked ones counts three."""
    found = 0
    for eqn in program.jaxpr.eqns if hasattr(program, "jaxpr") else program.eqns:
        if eqn.primitive.name == "all_gather":
            shape = eqn.outvars[0].aval.shape
            matrix = toy.params(layers=1)["layers"]["w"].shape[1:]
            found += times * (int(np.prod(shape[:-2])) if shape[-2:] == matrix else 0)
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                    found += _layer_elements(one, inside)
    return found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fsdp_gather": 0}, "fsdp_gather must be a positive integer, got 0"),
        ({"fsdp_gather": True}, "fsdp_gather must be one of 'layer', 'step', got True"),
        ({"fsdp_gather": 5}, "fsdp_gather=5 .* a stage has 4; use fsdp_gather=4"),
        ({"fsdp_gather": 2, "optimizer_sharding": "gradients"}, 'use fsdp_gather="layer"'),
    ],
    ids=str,
)
def test_illegal_numbers_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy.on_mesh({"fsdp": 2}, KEY, **given)
