"""Layers of one stage that are recomputed in different ways: the gradients of one device, in a pipeline and without."""

import jax
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.recomputation import check_remat_layers, remat_parts

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "remat", "options"),
    [
        ({}, "none*1+selective*1+layer", {}),
        slow({"fsdp": 2}, "selective*1+layer", {"gather_ahead": True, "layers": 5}),
        slow({"pipe": 2}, "none*1+full", {"layers": 6, "schedule": "1f1b"}),
        ({"pipe": 2}, "none*1+layer", {"layers": 3, "layers_per_stage": (2, 1), "schedule": "zero_bubble"}),
        slow({"pipe": 2}, "full*1+none*1+layer", {"layers": 6, "schedule": "zero_bubble"}),
        slow({"data": 2}, "layer*3+none", {"optimizer_sharding": "data"}),
        slow({"data": 2, "fsdp": 2}, "none*1+selective*1+full", {"optimizer_sharding": "gradients"}),
        slow({}, "selective*1+full", {"num_microbatches": 1}),
        slow({"fsdp": 2}, "offload*2+none", {"fsdp_gather": "step"}),
        slow({"fsdp": 2}, "none*2+full", {"gather_ahead": True, "num_microbatches": 1}),
        slow({"pipe": 2, "fsdp": 2}, "selective*2+full", {"layers": 10, "schedule": "1f1b", "gather_ahead": True}),
        slow({"pipe": 2}, "selective*1+offload", {"layers": 8, "schedule": "v_half", "num_chunks": 2}),
        slow({"pipe": 2}, "full*2+none", {"layers": 7, "layers_per_stage": (4, 3), "schedule": "1f1b"}),
        slow({"pipe": 2, "data": 2}, "none*1+full", {"layers": 8, "num_chunks": 2, "schedule": "interleaved"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_those_of_one_device(mesh, remat, options):
    out = toy.on_mesh(mesh, KEY, remat=remat, **options)
    loss, grads = toy.gradient(options.get("layers", 4), seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.slow
def test_only_the_first_layers_keep_their_residuals():
    """The array of a tanh, say, is there for each layer that keeps it: temporaries grow with their number."""

    def temporaries(remat):
        fb = jaxfb.get_forward_backward_func(remat=remat)
        params, batch = toy.params(layers=6), toy.batch()
        plan = jaxfb.BatchPlan(rows=toy.ROWS, num_microbatches=2)
        program = jax.jit(lambda *args: fb(toy.model, *args, plan, KEY).grads).lower(params, batch).compile()
        return program.memory_analysis().temp_size_in_bytes

    sizes = [temporaries(remat) for remat in ("layer", "none*2+layer", "none*4+layer", "none")]
    assert sizes == sorted(set(sizes))


def test_parts_are_read_in_the_order_of_the_layers():
    assert remat_parts("full") == (("full", None),)
    assert remat_parts("none*2+selective*8+layer") == (("none", 2), ("selective", 8), ("layer", None))


@pytest.mark.parametrize(
    "text", ["layer*8", "selectiv*8+layer", "selective*0+layer", "selective+layer", "+layer", "none*2+"]
)
def test_what_is_no_part_is_named(text):
    with pytest.raises(ValueError, match="has the part .* such as 'selective\\*8\\+layer'"):
        jaxfb.get_forward_backward_func(remat=text)


def test_the_last_part_has_a_layer():
    with pytest.raises(ValueError, match=r"counts 4 layers .* a stage has 4; use 'none\*3\+full'"):
        toy.on_mesh({}, KEY, remat="none*4+full")
    check_remat_layers("none*3+full", 4)
    assert np.isfinite(toy.on_mesh({}, KEY, remat="none*3+full").loss)
