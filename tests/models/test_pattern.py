"""Layers of several kinds compute what the same layers do one by one, on every mesh; a stack is described one way."""

import math
from dataclasses import replace
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close
from whole import apply, logits

import jaxfb
from jaxfb.models.adapted import LoRA, adapted
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.models.generate import generate
from jaxfb.models.lora import merged
from jaxfb.models.pattern import LayerKind, found_in, stack_of
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.transformer import init_params, transformer

LOCAL, FULL, DENSE = LayerKind(window=3), LayerKind(), LayerKind(experts=False)
PLAIN = TransformerConfig(
    vocab_size=32, num_layers=5, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=16, loss_chunk=16,
    tied_embeddings=True,
)  # fmt: skip
NO_ROPE = LayerKind(rope=False)
MIXED = replace(
    PLAIN,
    pattern=(replace(LOCAL, experts=False), replace(NO_ROPE, rope_theta=100.0)),
    leading=(LayerKind(window=5, experts=False),),
    num_experts=4,
    expert_mlp_size=16,
    batch_balance_coefficient=0.1,
    batch_balance_layers="together",
    router_bias_rate=0.01,
    dropout=0.1,
)
ROWS, LENGTH = 8, 8
all_logits = jax.jit(logits, static_argnums=0)


def tokens(rows=2, length=12):
    return np.random.default_rng(0).integers(0, 32, (rows, length)).astype(np.int32)


def made(config, dtype=jnp.float64):
    """Three times the initial weights, so that attention has preferences."""
    params = jax.jit(lambda key: init_params(config, key, dtype))(jax.random.key(0))
    return jax.tree.map(lambda leaf: 3 * leaf, params)


def one_by_one(config, params):
    """The parameters of each layer in order, out of a stack of several kinds."""
    stack, layers = stack_of(config), list(params.get("leading", {}).values())
    for period in range(stack.num_periods):
        layers += [jax.tree.map(lambda x: x[period], tree) for tree in stack.split(params["layers"])]  # noqa: B023
    return layers


def stacked(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@pytest.mark.slow
def test_kinds_that_are_alike_are_a_plain_stack():
    """A window longer than the row and a theta that is the model's hide nothing; a remainder of 1 leads."""
    config = replace(PLAIN, pattern=(LayerKind(window=99), LayerKind(rope_theta=PLAIN.rope_theta)))
    params = made(config)
    assert len(stack_of(config).leading) == 1 and stack_of(config).num_periods == 2
    plain = {**params, "layers": stacked(one_by_one(config, params))}
    plain.pop("leading")
    chex.assert_trees_all_equal(plain["layers"], made(PLAIN)["layers"])
    microbatch = {"tokens": tokens()}
    found, wanted = (
        jax.jit(logits, static_argnums=0)(c, p, microbatch) for c, p in ((config, params), (PLAIN, plain))
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_every_layer_is_of_its_own_kind():
    """Against plain models of one layer each, run one after the other."""
    kinds = (LOCAL, NO_ROPE, LayerKind(rope_theta=50.0, rope_scaling=RopeScaling("linear", 2.0)))
    config = replace(PLAIN, num_layers=7, pattern=kinds)
    params, microbatch = made(config), {"tokens": tokens(), "segments": np.repeat([[1] * 7 + [2] * 5], 2, 0)}
    same = [
        dict(window=3),
        dict(rope_theta=None),
        dict(rope_theta=50.0, rope_scaling=RopeScaling("linear", 2.0)),
    ]
    hidden = params["embed"]["embedding"][microbatch["tokens"]]
    for place, layer in enumerate(one_by_one(config, params)):
        model = transformer(replace(PLAIN, **same[place % 3]))
        hidden = jax.jit(model.layer)(layer, hidden, microbatch)
    found = jax.jit(lambda p: apply(transformer(config, loss=lambda hidden, *_: hidden), p, microbatch))(
        params
    )
    wanted = transformer(PLAIN, loss=lambda hidden, *_: hidden).head(params, hidden, microbatch)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def batch():
    """Packed rows of every length, one of them empty."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(1, LENGTH + 1, ROWS)
    lengths[3] = 0
    place = np.arange(LENGTH)
    segments = np.where(place < lengths[:, None], 1 + (place >= 5), 0)
    ids = draw.integers(0, 32, (2, ROWS, LENGTH)).astype(np.int32)
    mask = (segments > 0) * draw.integers(0, 2, (ROWS, LENGTH)).astype(np.float64)
    return {"tokens": ids[0], "targets": ids[1], "loss_mask": mask, "segments": segments}


@cache
def whole():
    """(loss, terms and gradient of all rows at once, without the engine)."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(4), jnp.arange(ROWS))

    @jax.jit
    def run(params):
        def loss(params):
            terms = apply(transformer(MIXED), params, batch(), keys).terms
            return sum(term.value for term in terms.values()), terms

        return jax.value_and_grad(loss, has_aux=True)(params)

    return run(made(MIXED))


SPLITS = [
    ({"data": 2, "expert": 2}, 2, {"fsdp_gather": "step", "optimizer_sharding": "data"}),
    ({"pipe": 2, "expert": 2, "tensor": 2}, 2, {"remat": "selective"}),
    ({"context": 2, "fsdp": 2, "tensor": 2}, 2, {"remat": "full"}),
    ({"pipe": 2, "context": 2, "data": 2}, 4, {"schedule": "zero_bubble", "poison_bubbles": True}),
    ({"pipe": 2, "fsdp": 2}, 2, {"head_placement": "rows"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, num_microbatches, options", SPLITS, ids=str)
def test_a_split_changes_nothing(mesh, num_microbatches, options):
    """A period of two kinds, one with experts, behind a layer beside the embedding, which the stages share by rows."""
    (loss, terms), grads = whole()
    replicas = math.prod(size for axis, size in mesh.items() if axis in ("data", "fsdp", "expert"))
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    out = fb(transformer(MIXED), made(MIXED), batch(), plan, jax.random.key(4))
    assert set(terms) == {"cross_entropy", "balance", "batch_balance"}
    close((out.loss, out.terms, out.grads), (loss, terms, grads))
    assert np.abs(grads["leading"]["layer_0"]["mlp"]["up"]["kernel"]).max() > 1e-6


@pytest.mark.slow
def test_the_bias_of_each_layers_router_moves_with_its_own_load():
    """The same experts in one kind of a period as in a plain stack of those layers."""
    load = np.random.default_rng(0).integers(0, 9, (2, 3, 4))
    kinds = (FULL, DENSE, LOCAL, NO_ROPE)
    both = replace(MIXED, num_layers=8, leading=(), pattern=kinds, batch_balance_layers="each")
    params = init_params(both, jax.random.key(0))
    metrics = {"expert_load": jaxfb.Sum(load, np.ones_like(load))}
    counted = transformer(both).counted
    told, after = counted.before(params, metrics)["layers"], counted.after(params, metrics)["layers"]
    for number, name in enumerate(("layer_0", "layer_2", "layer_3")):
        np.testing.assert_array_equal(told[name]["expert_load"], load[:, number])
        moved = np.sign(load[:, number].mean(-1, keepdims=True) - load[:, number])
        np.testing.assert_allclose(after[name]["moe"]["router"]["bias"], 0.01 * moved, rtol=1e-6)
    assert "expert_load" not in told["layer_1"]


@pytest.mark.slow
def test_generation_keeps_what_each_kind_sees():
    config = replace(PLAIN, pattern=(LOCAL, NO_ROPE))
    params = made(config)
    out = generate(
        config, params, np.array([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]]), 6, prompt_lengths=jnp.array([5, 2])
    )
    for row, prompt in enumerate(([3, 1, 4, 1, 5], [9, 2])):
        whole = np.concatenate([prompt, out.tokens[row]])[None]
        log_probs = jax.nn.log_softmax(all_logits(config, params, {"tokens": whole}))[0, len(prompt) - 1 : -1]
        np.testing.assert_array_equal(out.tokens[row], log_probs.argmax(-1))
        np.testing.assert_allclose(out.log_probs[row], log_probs.max(-1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_every_layer_has_its_adapters():
    lora = LoRA(rank=2, targets=("query", "mlp.*"))
    config = adapted(replace(PLAIN, num_layers=7, pattern=(LOCAL, LOCAL, FULL)), lora)
    params = jax.jit(lambda key: init_params(config, key, jnp.float64))(jax.random.key(0))
    random = lambda path, x: x + 0.3 if "lora_b" in jax.tree_util.keystr(path) else x  # noqa: E731
    params = jax.tree_util.tree_map_with_path(random, params)
    adapters = [layer[part][name] for layer in one_by_one(config, params) for part, name in
                (("attention", "query"), ("mlp", "gate"), ("mlp", "up"), ("mlp", "down"))]  # fmt: skip
    assert len(adapters) == 28 and all(node["lora_a"].shape[1] == 2 for node in adapters)
    assert len({float(node["lora_a"][0, 0]) for node in adapters}) == 28
    assert "lora_a" not in params["leading"]["layer_0"]["attention"]["key"]
    microbatch = {"tokens": tokens()}
    plain = all_logits(adapted(config, None), merged(params, lora), microbatch)
    np.testing.assert_allclose(all_logits(config, params, microbatch), plain, rtol=0, atol=1e-12)


def kinds_of(config):
    """(window, theta, experts) of every layer."""
    stack = stack_of(config)
    each = (*stack.leading, *stack.period * stack.num_periods)
    return [(one.window, one.rope_theta, bool(one.num_experts)) for one in each]


def test_a_stack_is_described_one_way():
    gemma = replace(PLAIN, num_layers=26, pattern=(replace(LOCAL, layers=5), LayerKind(rope_theta=1e6)))
    assert gemma.leading == (replace(LOCAL, layers=2),)
    assert [kind.layers for kind in gemma.pattern] == [3, 1, 2]
    assert kinds_of(gemma) == [(None, 1e6, False) if i % 6 == 5 else (3, 1e4, False) for i in range(26)]
    assert replace(gemma, mlp_size=24).pattern == gemma.pattern
    assert replace(PLAIN, pattern=(LOCAL, LOCAL)) == replace(PLAIN, window=3)
    assert replace(PLAIN, pattern=(NO_ROPE,)) == replace(PLAIN, rope_theta=None)
    twice = replace(PLAIN, num_layers=8, pattern=(LOCAL, FULL, LOCAL, FULL))
    assert twice.pattern == (LOCAL, FULL) and stack_of(twice).num_periods == 4
    deep = replace(MIXED, pattern=(), leading=(replace(DENSE, layers=2),), window=7, num_layers=6)
    assert kinds_of(deep) == 2 * [(None, 1e4, False)] + 4 * [(7, 1e4, True)]


@pytest.mark.parametrize(
    "kinds, leading, period",
    [
        ([LOCAL, FULL] * 4, 0, 2),
        ([LOCAL] * 5 + [FULL] + [LOCAL] * 5 + [FULL] + [LOCAL] * 2, 2, 6),
        ([DENSE] * 3 + [FULL] * 5, 3, 1),
        ([LOCAL] * 3, 0, 1),
        ([FULL, LOCAL, FULL, FULL, LOCAL], 0, 5),
    ],
)
def test_a_list_of_layers_is_taken_apart(kinds, leading, period):
    found = found_in(kinds)
    assert [sum(kind.layers for kind in part) for part in found] == [leading, period]
    config = replace(PLAIN, num_layers=len(kinds), leading=found[0], pattern=found[1])
    assert [window for window, *_ in kinds_of(config)] == [kind.window for kind in kinds]


def test_layers_with_experts_do_not_lead():
    leading, pattern = found_in([FULL, DENSE, FULL, FULL], has_experts=True)
    assert leading == () and sum(kind.layers for kind in pattern) == 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pattern": [LOCAL, FULL], "window": 3}, "window=3 cannot be combined with a pattern; use null"),
        ({"pattern": (replace(LOCAL, layers=6), FULL)}, "one period of 7; use num_layers=7"),
        (
            {"leading": (replace(LOCAL, layers=5),)},
            "the 5 leading layers and one period of 1; use num_layers=6",
        ),
        (
            {"pattern": (DENSE, FULL), "num_experts": 2, "leading": (LOCAL,)},
            "use experts=false in the leading kinds",
        ),
        (
            {"pattern": (FULL, DENSE), "num_experts": 2},
            "leading layers have no experts; use num_layers=4 or 6",
        ),
        ({"pattern": (DENSE,), "num_experts": 2}, "num_experts=2 needs a kind with experts"),
        ({"pattern": LOCAL}, r"must be a list of jaxfb.models.pattern.LayerKind; use \(\) for none"),
        ({"pattern": ({"window": 3},)}, "must be a list of jaxfb.models.pattern.LayerKind"),
    ],
)
def test_impossible_stacks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **change)


def test_parameters_and_operations_are_those_of_each_layer():
    shapes = jax.eval_shape(lambda: init_params(MIXED, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == num_params(MIXED)
    stack = stack_of(replace(MIXED, num_layers=9))
    alone = [replace(one, num_layers=1) for one in (*stack.leading, *stack.period * stack.num_periods)]
    head = 6 * MIXED.vocab_size * MIXED.hidden_size
    wanted = head + sum(flops_per_token(one, 64) - head for one in alone)
    assert flops_per_token(replace(MIXED, num_layers=9), 64) == wanted
