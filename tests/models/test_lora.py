"""Adapters: their gradients are the projected ones of the merged model, on every axis, and nothing else changes."""

import warnings
from dataclasses import replace
from functools import lru_cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole
from comparisons import close

import jaxfb
from jaxfb import trainable
from jaxfb.models.adapted import PATTERNS, PROJECTIONS, AdaptedConfig, LoRA, adapted
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.lora import _warn_of_rank, merged, projections, without_adapters
from jaxfb.models.transformer import init_params, transformer
from jaxfb.models.variant import Variant

ROWS, LENGTH, RANK = 8, 8, 2
BASE = TransformerConfig(
    vocab_size=16, num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, mlp_size=12, attention="xla"
)
ADAPTED = adapted(BASE, LoRA(rank=RANK, alpha=3.0))
KEY = jax.random.key(5)
EXPERTS = adapted(
    replace(
        BASE, num_kv_heads=4, num_experts=4, expert_mlp_size=6, shared_expert_size=4, variant=Variant(mlp_bias=True),
        latent=Latent(4, 4, 4, query_rank=6), head_size=8,
    ),
    LoRA(rank=RANK, alpha=3.0, targets=("experts.*", "attention.*")),
)  # fmt: skip


@lru_cache
def params(config=ADAPTED):
    """float64 parameters whose adapters are not zero."""
    tree = init_params(config, KEY, jnp.float64)

    def away_from_zero(path, leaf):
        own = jax.random.fold_in(KEY, sum(map(ord, trainable.name_of(path))))
        return (
            leaf + 0.3 * jax.random.normal(own, leaf.shape, leaf.dtype)
            if "lora" in trainable.name_of(path)
            else leaf
        )

    return jax.tree_util.tree_map_with_path(away_from_zero, tree)


@lru_cache
def batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, BASE.vocab_size, (ROWS, LENGTH + 1))
    mask = (rng.random((ROWS, LENGTH)) > 0.3).astype(np.float64)
    mask[2] = 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def objective(config, tree, rng=None):
    keys = None if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(ROWS))
    out = whole.apply(transformer(config), tree, batch(), keys)
    return sum(term.value for term in out.terms.values())


@lru_cache
def wanted(seed=None, config=ADAPTED):
    """Returns the gradients of one device; seed: of dropout."""
    tree, rng = params(config), None if seed is None else jax.random.key(seed)
    grads = jax.jit(jax.grad(lambda tree: objective(config, tree, rng)))(tree)
    return trainable.pruned(PATTERNS, grads)


def test_gradients_are_the_projected_gradients_of_the_merged_model():
    lora, tree = ADAPTED.lora, params()
    full = jax.jit(jax.grad(lambda tree: objective(BASE, tree)))(merged(tree, lora))
    of_kernels = dict(projections(full["layers"]))
    for name, node in projections(wanted()["layers"]):
        kernel, own = of_kernels[name]["kernel"], dict(projections(tree["layers"]))[name]
        of_a = lora.scale * jnp.einsum("lio,lro->lir", kernel, own["lora_b"])
        of_b = lora.scale * jnp.einsum("lio,lir->lro", kernel, own["lora_a"])
        close({"lora_a": node["lora_a"], "lora_b": node["lora_b"]}, {"lora_a": of_a, "lora_b": of_b})
        assert node["kernel"] is None


@pytest.mark.slow
def test_gradients_of_experts_adapters_are_the_projected_ones_of_each_experts_matrix():
    """Of gpt-oss' kind too, whose experts have biases; the attention is DeepSeek's."""
    lora, tree = EXPERTS.lora, params(EXPERTS)
    full = jax.jit(jax.grad(lambda tree: objective(adapted(EXPERTS, None), tree)))(merged(tree, lora))
    found = wanted(config=EXPERTS)["layers"]
    for name, node in found["moe"]["experts"]["adapters"].items():
        matrix, own = (
            full["layers"]["moe"]["experts"][name],
            tree["layers"]["moe"]["experts"]["adapters"][name],
        )
        of_a = lora.scale * jnp.einsum("leio,lero->leir", matrix, own["lora_b"])
        of_b = lora.scale * jnp.einsum("leio,leir->lero", matrix, own["lora_a"])
        close(node, {"lora_a": of_a, "lora_b": of_b})
        assert found["moe"]["experts"][name] is None and np.all(np.any(of_b, axis=(2, 3)))
    names = {name for name, node in projections(found) if "lora_a" in node}
    latent = ("query_down", "query_up", "key_value_down", "key_value_up", "output")
    assert names == {f"attention.{name}" for name in latent}
    for name, node in projections(found):
        kernel = dict(projections(full["layers"]))[name]["kernel"]
        if "lora_a" in node:
            own = dict(projections(tree["layers"]))[name]
            close(node["lora_b"], lora.scale * jnp.einsum("lio,lir->lro", kernel, own["lora_a"]))
    assert abs(objective(adapted(EXPERTS, None), merged(tree, lora)) / objective(EXPERTS, tree) - 1) < 1e-12


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


MESHES = [
    ({}, 2, {}),
    slow({"data": 2, "tensor": 2}, 2, {}),
    slow({"fsdp": 2, "context": 2}, 2, {}),
    slow({"data": 2}, 2, {"optimizer_sharding": "gradients"}),
    slow({"pipe": 2, "fsdp": 2}, 2, {"schedule": "1f1b", "remat": "selective"}),
    slow({"pipe": 2, "tensor": 2}, 4, {"schedule": "zero_bubble"}),
]


@pytest.mark.parametrize(("mesh", "count", "options"), MESHES, ids=str)
def test_the_law_on_meshes(mesh, count, options):
    on = jaxfb.make_mesh(**mesh)
    plan = jaxfb.BatchPlan(
        rows=ROWS, data_parallel=mesh.get("data", 1) * mesh.get("fsdp", 1), num_microbatches=count
    )
    fb = jaxfb.get_forward_backward_func(on, trainable=PATTERNS, **options)
    out = fb(transformer(ADAPTED), params(), batch(), plan)
    close(out.grads, wanted())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        slow({"expert": 2, "fsdp": 2}, {"remat": "layer", "optimizer_sharding": "data"}),
        slow({"pipe": 2, "expert": 2, "tensor": 2}, {"schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_the_law_of_experts_on_meshes(mesh, options):
    on = jaxfb.make_mesh(**mesh)
    plan = jaxfb.BatchPlan(
        rows=ROWS, data_parallel=mesh.get("expert", 1) * mesh.get("fsdp", 1), num_microbatches=2
    )
    fb = jaxfb.get_forward_backward_func(on, trainable=PATTERNS, **options)
    close(fb(transformer(EXPERTS), params(EXPERTS), batch(), plan).grads, wanted(config=EXPERTS))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"pipe": 2, "context": 2}], ids=str)
def test_dropout_of_adapters_depends_on_the_row_alone(mesh):
    config = adapted(BASE, replace(ADAPTED.lora, dropout=0.4, targets=("query", "down")))
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=mesh.get("data", 1), num_microbatches=2)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), trainable=PATTERNS)
    out = fb(transformer(config), params(config), batch(), plan, 3)
    close(out.grads, wanted(3, config))
    other = jax.tree.leaves(wanted(None, config))
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(jax.tree.leaves(out.grads), other, strict=True))


def test_new_adapters_change_nothing_and_leave_the_base_as_it_was_drawn():
    base, tree = init_params(BASE, KEY, jnp.float64), init_params(ADAPTED, KEY, jnp.float64)
    chex.assert_trees_all_equal(without_adapters(tree), base)
    assert objective(ADAPTED, tree) == objective(BASE, base)
    for name, node in projections(tree["layers"]):
        assert set(node) == {"kernel", "lora_a", "lora_b"} and name.rpartition(".")[2] in PROJECTIONS
        bound = node["kernel"].shape[1] ** -0.5
        assert 0 < np.abs(node["lora_a"]).max() <= bound and not np.any(node["lora_b"])
        assert np.any(node["lora_a"][0] != node["lora_a"][1])


def test_merged_kernels_compute_the_same():
    assert abs(objective(BASE, merged(params(), ADAPTED.lora)) / objective(ADAPTED, params()) - 1) < 1e-12


def test_a_model_without_adapters_leaves_them_out():
    assert objective(BASE, params()) == objective(BASE, without_adapters(params()))


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("query", "down"), {"attention.query", "mlp.down"}),
        (("attention.*",), {f"attention.{name}" for name in ("query", "key", "value", "output")}),
        (("mlp.up",), {"mlp.up"}),
    ],
)
def test_targets_are_names_or_patterns(targets, names):
    tree = jax.eval_shape(lambda: init_params(adapted(BASE, LoRA(targets=targets)), KEY))
    assert {name for name, node in projections(tree["layers"]) if "lora_a" in node} == names


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("query", "down"), set()),
        (("experts.down",), {"down"}),
        (("moe.experts.gate", "*.up"), {"gate", "up"}),
        (("*",), {"gate", "up", "down"}),
    ],
)
def test_experts_are_targets_by_patterns_alone(targets, names):
    """Their adapters are many, so that a bare name does not ask for them."""
    config = replace(EXPERTS, lora=LoRA(targets=targets), latent=None, variant=Variant())
    tree = jax.eval_shape(lambda: init_params(config, KEY))
    assert set(tree["layers"]["moe"]["experts"].get("adapters", ())) == names


def test_refusals():
    experts = replace(BASE, num_experts=4)
    with pytest.raises(
        ValueError,
        match=r"'gate' is not a projection .*moe.experts.gate, .*use targets=\[query, key, value, output\]",
    ) as error:
        init_params(adapted(experts, LoRA()), KEY)
    legal = adapted(experts, LoRA(**error.value.choices[0]))
    assert jax.eval_shape(lambda: init_params(legal, KEY))
    with pytest.raises(ValueError, match=r"\[lora\] dropout=0.1 is not for adapters of experts") as error:
        init_params(adapted(experts, LoRA(targets=("query", "experts.down"), dropout=0.1)), KEY)
    assert error.value.choices == ({"dropout": 0.0},)
    for wrong in (
        {"rank": 0},
        {"alpha": 0},
        {"alpha": -1.0},
        {"dropout": 1.0},
        {"targets": ()},
        {"targets": "query"},
        {"targets": None},
        {"targets": (3,)},
        {"targets": ("query", "")},
        {"rank": 2.0},
    ):
        with pytest.raises(ValueError, match=rf"\[lora\] {next(iter(wrong))}") as error:
            LoRA(**wrong)
        for choice in error.value.choices:
            LoRA(**choice)


@pytest.mark.parametrize(("targets", "most"), [(("query", "up"), 8), (("experts.*",), 6), (("key", "up"), 8)])
def test_a_rank_that_no_target_can_use_is_warned_of(targets, most):
    sizes = replace(BASE, num_experts=4, expert_mlp_size=6) if "experts.*" in targets else BASE

    def shapes(rank):
        return jax.eval_shape(lambda: init_params(adapted(sizes, LoRA(rank=rank, targets=targets)), KEY))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes(most)
    _warn_of_rank.cache_clear()
    with pytest.warns(UserWarning, match=rf"\[lora\] rank={most + 1} is above .* rank={most}$") as warned:
        for _ in range(2):  # a run looks at the targets four times, from two places
            shapes(most + 1)
    assert len(warned) == 1


def test_one_target_is_a_list_of_it():
    with pytest.raises(ValueError, match=r"targets=\['query'\]") as error:
        LoRA(targets="query")  # type: ignore[arg-type]
    assert error.value.choices == ({"targets": ["query"]},)


def test_sizes_with_adapters_stay_so_when_they_are_replaced():
    assert replace(ADAPTED, dropout=0.1).lora == ADAPTED.lora and isinstance(ADAPTED, AdaptedConfig)
    assert adapted(ADAPTED, None) == BASE
