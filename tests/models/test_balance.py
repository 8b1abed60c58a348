"""Balance of the whole update: the loss equals its plain formula under any split; biases move once an update."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from whole import apply

import jaxfb
from jaxfb.models.attention import packed_attention
from jaxfb.models.balance import (
    Routing,
    balance_of_sequences,
    counted_leaves,
    router_losses,
    router_metrics,
    where_counted,
)
from jaxfb.models.block import Block, rebuilder
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import dropout
from jaxfb.models.transformer import init_params, transformer
from jaxfb.types import outer_params

ROWS, LENGTH, NUM_EXPERTS = 8, 8, 4
CONFIG = TransformerConfig(
    vocab_size=16, num_layers=2, hidden_size=8, num_heads=2, mlp_size=4, loss_chunk=16, num_experts=NUM_EXPERTS,
    dropout=0.1, balance_coefficient=0.0, batch_balance_coefficient=0.5, router_bias_rate=0.25,
)  # fmt: skip
KEY = jax.random.key(7)


def test_tokens_that_do_not_count_are_zeros_whatever_they_are():
    values = np.array([[[1.0, 2.0], [np.nan, np.inf]]])
    np.testing.assert_array_equal(where_counted(np.array([[True, False]]), values), [[[1, 2], [0, 0]]])
    assert where_counted(None, values) is values


def batch():
    """Rows of every length, one of them empty; two documents in most."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(2, LENGTH + 1, ROWS)
    lengths[3] = 0
    place = np.arange(LENGTH)
    segments = np.where(place < lengths[:, None], 1 + (place >= 3), 0)
    tokens, targets = draw.integers(0, CONFIG.vocab_size, (2, ROWS, LENGTH))
    mask = (segments > 0) * draw.integers(0, 2, (ROWS, LENGTH)).astype(np.float64)
    return {"tokens": tokens, "targets": targets, "loss_mask": mask, "segments": segments}


@cache
def params():
    made = jax.tree.map(lambda leaf: 2 * leaf, init_params(CONFIG, jax.random.key(3), jnp.float64))
    made["layers"]["moe"]["router"]["bias"] = jnp.array([[0.1, -0.1, 0.05, 0.0], [0.0, 0.2, 0.0, -0.3]])
    return made


def plain_routing(config, params, keys):
    """(hidden after the last layer; probabilities and choices of every counted token, a pair a layer)."""
    model, rows, hidden, found = transformer(config), batch(), None, []
    block_of, hidden = rebuilder(Block, config), model.embed(outer_params(params), rows)
    attend = lambda *qkv: (packed_attention(*qkv, segments=rows["segments"], backend="xla"), None)  # noqa: E731
    for index in range(config.num_layers):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        block, folded = block_of(weights), jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
        mixed, _ = block.attention(block.attention_norm(hidden), positions, attend)
        mixed = block.mlp_norm(hidden + dropout(mixed, config.dropout, folded, site=0))
        probs = jax.nn.softmax(mixed @ weights["moe"]["router"]["kernel"])[rows["segments"] != 0]
        best = jnp.argsort(-(probs + weights["moe"]["router"]["bias"]))[:, : config.experts_per_token]
        found.append((probs, jax.nn.one_hot(best, NUM_EXPERTS).sum(1)))
        hidden = model.layer(weights, hidden, rows, folded)[0]
    return hidden, found


@cache
def plain(layers):
    """(loss, gradient, choices [L, E], mean entropy [L]): the formula, of all rows at once, without the engine."""
    config = replace(CONFIG, batch_balance_layers=layers)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(ROWS))

    def balance(probs, choices):
        f, p = choices.mean(0) / config.experts_per_token, probs.mean(0)
        return NUM_EXPERTS * (f * p).sum()

    def loss(params):
        hidden, found = plain_routing(config, params, keys)
        head = transformer(config).head(outer_params(params), hidden, batch(), keys).terms
        if layers == "each":
            aux = sum(balance(*layer) for layer in found) / config.num_layers
        else:
            aux = balance(*(jnp.concatenate(parts) for parts in zip(*found, strict=True)))
        entropy = jnp.stack([-(probs * jnp.log(probs)).sum(-1).mean() for probs, _ in found])
        choices = jnp.stack([choices.sum(0) for _, choices in found])
        return sum(term.value for term in head.values()) + 0.5 * aux, (choices, entropy)

    (value, (choices, entropy)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params())
    return value, grads, choices, entropy


SPLITS = [
    ({"data": 2, "expert": 2, "context": 2}, 2, "each", {}),
    ({}, 4, "together", {}),
    ({"pipe": 2, "expert": 2}, 2, "each", {"schedule": "zero_bubble", "poison_bubbles": True}),
    ({}, 1, "each", {"remat": "full"}),
    ({"data": 4, "tensor": 2}, 2, "each", {}),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, 2, "together", {"optimizer_sharding": "data"}),
    ({"pipe": 2, "context": 2, "tensor": 2}, 4, "each", {"remat": "full"}),
    ({"pipe": 2, "data": 2}, 4, "together", {"schedule": "1f1b", "fsdp_gather": "step"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes, num_microbatches, layers, options", SPLITS, ids=str)
def test_the_balance_of_a_batch_is_that_of_its_plain_formula(sizes, num_microbatches, layers, options):
    """Loss, gradient, choices of each expert and entropies, at any split."""
    loss, grads, choices, entropy = plain(layers)
    mesh = jaxfb.make_mesh(**sizes)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    model = transformer(replace(CONFIG, batch_balance_layers=layers))
    out = jaxfb.get_forward_backward_func(mesh, **options)(model, params(), batch(), plan, KEY)
    assert set(out.terms) == {"cross_entropy", "batch_balance"}
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    for (path, got), wanted in zip(
        jax.tree_util.tree_leaves_with_path(out.grads), jax.tree.leaves(grads), strict=True
    ):
        scale = np.abs(wanted).max() or 1
        np.testing.assert_allclose(got, wanted, atol=1e-12 * scale, err_msg=jax.tree_util.keystr(path))
    assert not out.grads["layers"]["moe"]["router"]["bias"].any()
    np.testing.assert_array_equal(out.metrics["expert_load"].total, choices)
    even = choices.sum(-1, keepdims=True) / NUM_EXPERTS
    np.testing.assert_allclose(out.metrics["expert_load"].value, choices / even, rtol=1e-12)
    np.testing.assert_allclose(out.metrics["router_entropy"].value, entropy, rtol=1e-12)


def test_a_bias_moves_towards_the_mean_without_rounding():
    """A load at the mean moves nothing, even where three of it add up to what float32 does not have."""
    many = 7000001
    choices = jnp.array([[many, many, many], [many + 1, many, many - 1], [0, 0, 1]], jnp.int32)
    layers = {"moe": {"router": {"bias": jnp.zeros((3, 3), jnp.float32), "kernel": 0}}}
    after = counted_leaves(replace(CONFIG, router_bias_rate=0.5)).after
    with jax.enable_x64(False):
        moved = after({"layers": layers}, {"expert_load": jaxfb.Sum(choices)})["layers"]["moe"]["router"]
    np.testing.assert_array_equal(moved["bias"], 0.5 * np.array([[0, 0, 0], [-1, 0, 1], [1, 1, -1]]))
    assert moved["kernel"] == 0


def test_an_update_in_which_no_load_is_counted_leaves_the_biases():
    """Of another loss alone; beside the model's own they move by its counts."""
    config = replace(CONFIG, batch_balance_coefficient=0.0)
    step = jaxfb.make_train_step(
        transformer(config), optax.sgd(0.1), jaxfb.make_mesh(), jaxfb.BatchPlan(rows=ROWS, num_microbatches=2)
    )

    def penalty(params, microbatch, rng):
        return jaxfb.LossOutput({"penalty": jaxfb.Sum((params["norm"]["scale"] ** 2).sum(), 1.0)})

    def after(with_model):
        state = step.init(params(), rng=KEY)
        gradients = step.gradients(state, batch(), model=penalty)
        gradients = gradients + step.gradients(state, batch()) if with_model else gradients
        return step.apply(state, gradients)[0].params

    bias = params()["layers"]["moe"]["router"]["bias"]
    alone, beside = after(False), after(True)
    np.testing.assert_array_equal(alone["layers"]["moe"]["router"]["bias"], bias)
    assert (alone["norm"]["scale"] < params()["norm"]["scale"]).all()
    assert (beside["layers"]["moe"]["router"]["bias"] != bias).any()


@pytest.mark.parametrize("layers, load", [("each", [[4, 0], [1, 3]]), ("together", [[2.5, 1.5], [2.5, 1.5]])])
def test_layers_read_the_load_of_their_own_experts_or_of_all(layers, load):
    """Relative to an even share: choices over the 1 and 2 that each expert would have."""
    config = replace(CONFIG, num_experts=2, batch_balance_layers=layers)
    counted = jaxfb.Sum(jnp.array([[4.0, 0.0], [1.0, 3.0]]), jnp.array([[1.0, 1.0], [1.0, 1.0]]))
    found = counted_leaves(config).before({"layers": {"kernel": 0}}, {"expert_load": counted})["layers"]
    np.testing.assert_array_equal(found["expert_load"], load)
    assert found["kernel"] == 0


def test_losses_of_routers_are_their_formulas():
    """Of two rows of which one has no tokens; a token that does not count may hold anything."""
    config = replace(CONFIG, balance_coefficient=0.3, batch_balance_coefficient=0.5, router_z_coefficient=0.7)
    logits = np.random.default_rng(0).normal(size=(2, 4, NUM_EXPERTS))
    logits[0, 3] = logits[1] = np.nan
    counted = np.array([[True, True, True, False], [False] * 4])
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = np.argsort(-logits)[..., :2].astype(np.int32)
    load = np.arange(1.0, 1 + NUM_EXPERTS)

    @jax.jit
    def losses(*routing):
        routing = Routing(*routing, None)
        known = router_losses(routing, jnp.asarray(counted), config, load)
        unknown = router_losses(routing, jnp.asarray(counted), config)["batch_balance"].total
        return {name: (term.total, term.weight) for name, term in known.items()}, unknown

    terms, unknown = losses(logits, probs, experts)
    exps = np.exp(logits[0, :3])
    shares = exps / exps.sum(-1, keepdims=True)
    chosen = np.bincount(experts[0, :3].reshape(-1), minlength=NUM_EXPERTS) / 6
    wanted = {
        "balance": (0.3 * NUM_EXPERTS * (chosen * shares).sum(), 3),
        "batch_balance": (0.5 * (shares * load).sum(), 3),
        "router_z": (0.7 * (np.log(exps.sum(-1)) ** 2).sum(), 3),
    }
    assert set(terms) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(terms[name], wanted[name], rtol=1e-12, err_msg=name)
    assert unknown == 0


def test_a_sequence_is_balanced_by_itself_wherever_it_stands():
    """Numbered in any way, with padding between, beside another or alone in its row; one of a token that counts not."""
    draw = np.random.default_rng(1)
    probs, experts = draw.dirichlet(np.ones(4), (2, 6)), draw.integers(0, 4, (2, 6, 2))
    segments = np.array([[7, 7, 0, 3, 3, 3], [2, 5, 5, 0, 0, 0]])
    counted = (segments != 0) & (segments != 2)
    together = jax.jit(balance_of_sequences)(probs, experts, counted, segments)
    alone = [
        balance_of_sequences(probs[row, at][None], experts[row, at][None], None)
        for row, at in ((0, slice(0, 2)), (0, slice(3, 6)), (1, slice(1, 3)))
    ]
    np.testing.assert_allclose(together.total, sum(one.total for one in alone), rtol=1e-12)
    assert together.weight == sum(one.weight for one in alone) == 7


def test_what_a_capacity_drops_is_counted():
    experts = jnp.array([[[0], [0], [0], [1], [2], [2]]])
    routing = Routing(jnp.zeros((1, 6, 4)), jnp.full((1, 6, 4), 0.25), experts, jnp.ones((1, 6, 1)))
    said = router_metrics(routing, None, capacity=1)
    assert (said["dropped_choices"].total, said["dropped_choices"].weight) == (3, 6)
    np.testing.assert_allclose(said["router_entropy"].value, np.log(4))


@pytest.mark.slow
def test_apply_takes_its_microbatch_for_the_whole_batch():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(ROWS))
    terms = jax.jit(lambda p: apply(transformer(CONFIG), p, batch(), keys).terms)(params())
    np.testing.assert_allclose(sum(float(t.value) for t in terms.values()), plain("each")[0], rtol=1e-12)
