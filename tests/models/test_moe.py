"""Experts: a layer equals a plain loop over tokens, Mixtral's numbers are met, and no split changes a gradient."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close
from interpreted import use_kernels_of_gpus
from safetensors.numpy import load_file
from whole import apply, logits

sys.path.insert(0, str(Path(__file__).parent))
from hf_weights import hf_leaves, load_hf  # noqa: E402
from test_golden import _microbatch, _same_gradients, _same_logits  # noqa: E402

import jaxfb
from jaxfb import hlo
from jaxfb.models.attention import packed_attention
from jaxfb.models.balance import balance_of_sequences
from jaxfb.models.block import Block, rebuilder
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.moe import Experts, MoE, Router
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import expert as expert_axis
from jaxfb.types import outer_params

GOLDEN = Path(__file__).parent.parent / "golden"
SIZES = {"vocab_size": 16, "num_layers": 2, "hidden_size": 8, "num_heads": 2, "mlp_size": 4, "loss_chunk": 16}
SOFTMAX = TransformerConfig(**SIZES, num_experts=4, shared_expert_size=6, router_z_coefficient=0.3)
SIGMOID = replace(
    SOFTMAX, router_scores="sigmoid", router_renormalize=False, router_scale=2.5, shared_expert_size=0
)
SEGMENTS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
COUNTED = SEGMENTS != 0


def _layer_params(config):
    params = jax.jit(lambda key: init_params(config, key, jnp.float64))(jax.random.key(0))
    return jax.tree.map(lambda leaf: 3 * leaf[0], params["layers"]["moe"])


def _scores(config, params, token):
    scores = token @ params["router"]["kernel"]
    return jax.nn.softmax(scores) if config.router_scores == "softmax" else jax.nn.sigmoid(scores)


def _chosen(config, params, x, capacity):
    """{(row, place): its experts}, and of those the ones that take it."""
    chosen, kept, taken = {}, {}, np.zeros(config.num_experts, int)
    for spot in zip(*np.nonzero(COUNTED), strict=True):
        best = np.argsort(-np.asarray(_scores(config, params, x[spot])))[: config.experts_per_token]
        taken[best] += 1
        chosen[spot] = best
        kept[spot] = [index for index in best if capacity is None or taken[index] <= capacity]
    return chosen, kept


def _plain(config, params, x, chosen, kept):
    """A loop over tokens: outputs [R, T, D], {name: (total, weight)}."""
    outputs, z = {}, 0.0
    choices, probs = np.zeros((len(x), config.num_experts)), jnp.zeros((len(x), config.num_experts))
    for spot in np.ndindex(COUNTED.shape):
        token = x[spot] if COUNTED[spot] else jnp.zeros(x.shape[-1])
        outputs[spot] = 0 * token
        if config.shared_expert_size:
            outputs[spot] += _swiglu(token, *(params["shared"][name]["kernel"] for name in KERNELS))
        if COUNTED[spot]:
            scores = _scores(config, params, token)
            share = scores[chosen[spot]].sum() if config.router_renormalize else 1.0
            for index in kept[spot]:
                output = _swiglu(token, *(params["experts"][name][index] for name in KERNELS))
                outputs[spot] += config.router_scale * scores[index] / share * output
            z += jax.nn.logsumexp(token @ params["router"]["kernel"]) ** 2
            choices[spot[0], chosen[spot]] += 1
            probs = probs.at[spot[0]].add(scores / scores.sum())
    balance = sum(  # of each row its tokens times E sum_e (share of its choices) (mean probability)
        length * config.num_experts * (choices[row] / choices[row].sum() * probs[row] / length).sum()
        for row, length in enumerate(COUNTED.sum(1))
        if length
    )
    losses = {
        "balance": (config.balance_coefficient * balance, COUNTED.sum()),
        "router_z": (config.router_z_coefficient * z, COUNTED.sum()),
    }
    return jnp.stack([outputs[spot] for spot in np.ndindex(COUNTED.shape)]).reshape(x.shape), losses


KERNELS = ("gate", "up", "down")


IN_GROUPS = replace(
    SIGMOID, num_experts=6, router_renormalize=True, router_bias=True, router_groups=3, router_top_groups=2
)


@pytest.mark.parametrize(
    "config", [SOFTMAX, SIGMOID, IN_GROUPS], ids=["softmax", "sigmoid", "biased, in groups"]
)
def test_a_router_equals_a_loop_over_its_tokens(config):
    """The bias chooses and weighs nothing; groups are the best by their two best experts."""
    draw = np.random.default_rng(3)
    x, number = draw.normal(size=(1, 12, config.hidden_size)), config.num_experts
    weights = {"kernel": draw.normal(size=(config.hidden_size, number))}
    weights |= {"bias": draw.normal(size=number)} if config.router_bias else {}
    found = jax.jit(lambda weights: tuple(rebuilder(Router, config)(weights)(x)))(weights)
    for scored, probs, experts, shares, token in zip(*(leaf[0] for leaf in found), x[0], strict=True):
        np.testing.assert_allclose(scored, token @ weights["kernel"])
        exps = np.exp(np.asarray(scored))
        scores = exps / exps.sum() if config.router_scores == "softmax" else exps / (1 + exps)
        np.testing.assert_allclose(probs, scores / scores.sum())
        biased = (scores + weights.get("bias", 0)).reshape(config.router_groups, -1)
        worst = np.sort(biased)[:, -2:].sum(1).argsort()[: config.router_groups - config.router_top_groups]
        biased[worst] = -np.inf
        assert list(experts) == list((-biased.reshape(-1)).argsort()[: config.experts_per_token])
        picked = scores[np.asarray(experts)]
        picked = picked / picked.sum() if config.router_renormalize else picked
        np.testing.assert_allclose(shares, picked * config.router_scale)


def _swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize(
    "config, capacity",
    [
        pytest.param(SOFTMAX, None, id="softmax-dropless", marks=pytest.mark.slow),
        pytest.param(SIGMOID, 0.75, id="sigmoid-capacity", marks=pytest.mark.slow),
        pytest.param(SOFTMAX, 0.75, id="softmax-capacity", marks=pytest.mark.slow),
        pytest.param(SIGMOID, None, id="sigmoid-dropless", marks=pytest.mark.slow),
    ],
)
def test_a_layer_equals_a_loop_over_its_tokens(config, capacity):
    """Values and gradients; what padding holds, NaN here, reaches neither."""
    config = replace(config, expert_capacity=capacity)
    params, draw = _layer_params(config), np.random.default_rng(1)
    cotangent, x = draw.normal(size=(2, *SEGMENTS.shape, 8))
    x[~COUNTED] = np.nan
    limit = None if capacity is None else int(np.ceil(capacity * SEGMENTS.size * 2 / 4))
    chosen, kept = _chosen(config, params, x, limit)
    assert (capacity is None) == (sum(map(len, kept.values())) == 2 * COUNTED.sum())
    moe_of = rebuilder(MoE, config)

    def ours(params, x):
        outputs, said, _ = moe_of(params)(x, jnp.asarray(COUNTED))
        return outputs, {name: (term.total, term.weight) for name, term in said.terms.items()}

    def summed(layer):
        def run(params, x):
            outputs, losses = layer(params, x)
            total = (outputs * cotangent).sum() + 0.7 * losses["balance"][0] + 0.2 * losses["router_z"][0]
            return total, (outputs, losses)

        return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))

    wanted = summed(lambda params, x: _plain(config, params, x, chosen, kept))(params, jnp.asarray(x))
    got = summed(ours)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), got, wanted)


def test_what_an_expert_reads_is_weighted_in_float32_and_rounded_once():
    """Its three matrices are the identity here, so its output is what the last one multiplies."""
    config = replace(SOFTMAX, num_experts=1, experts_per_token=1, shared_expert_size=0, mlp_size=8)
    x = jax.random.normal(jax.random.key(0), (64, 8), jnp.bfloat16)
    weights = jax.random.uniform(jax.random.key(1), (64, 1), jnp.float32)
    same = dict.fromkeys(KERNELS, jnp.eye(8, dtype=jnp.bfloat16)[None])
    experts = rebuilder(Experts, config)(same)
    outputs, _ = experts(expert_axis.Weighted(x, weights), jnp.array([64], jnp.int32), experts.kernels())
    wanted = jax.nn.silu(x.astype(jnp.float32)) * x.astype(jnp.float32) * weights
    assert outputs.dtype == jnp.bfloat16 and bool((outputs == wanted.astype(jnp.bfloat16)).all())


def _mixtral():
    """(config, params in float64, hf names of a tree like params)."""
    directory = GOLDEN / "hf_mixtral_tiny"
    hf, (config, params) = json.loads((directory / "config.json").read_text()), load_hf(directory)
    tensors = load_file(directory / "model.safetensors")
    config = replace(config, num_experts=hf["num_local_experts"], experts_per_token=hf["num_experts_per_tok"])
    named = lambda name: np.stack([tensors[f"model.layers.{i}.block_sparse_moe.{name}"].T for i in range(2)])  # noqa: E731
    params["layers"]["moe"] = {
        "router": {"kernel": named("gate.weight")},
        "experts": {
            ours: np.stack([named(f"experts.{e}.{theirs}.weight") for e in range(config.num_experts)], axis=1)
            for ours, theirs in THEIR_KERNELS.items()
        },
    }
    return config, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)


THEIR_COEFFICIENT = 0.02
THEIR_KERNELS = {"gate": "w1", "up": "w3", "down": "w2"}


def _mixtral_leaves(params):
    moe, leaves = params["layers"]["moe"], hf_leaves(params)
    for layer, kernel in enumerate(moe["router"]["kernel"]):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        leaves[f"{prefix}.gate.weight"] = kernel
        for ours, theirs in THEIR_KERNELS.items():
            for index, expert in enumerate(moe["experts"][ours][layer]):
                leaves[f"{prefix}.experts.{index}.{theirs}.weight"] = expert
    return leaves


def _router_logits(config, params, microbatch):
    """[layers, R, T, E], read from inside each layer."""
    block_of, model = rebuilder(Block, config), transformer(config)
    attend = lambda *qkv: (packed_attention(*qkv, segments=microbatch["segments"], backend="xla"), None)  # noqa: E731
    hidden, found = model.embed(outer_params(params), microbatch), []
    for index in range(config.num_layers):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        block = block_of(weights)
        mixed, _ = block.attention(block.attention_norm(hidden), microbatch["positions"], attend)
        found.append(block.moe.router(block.mlp_norm(hidden + mixed)).logits)
        hidden = model.layer(weights, hidden, microbatch)[0]
    return jnp.stack(found)


@pytest.mark.slow
def test_mixtral_is_theirs(golden):
    """Logits, losses and every gradient; router logits; all of it with their loss for the router, of all layers."""
    config, params = _mixtral()
    config = replace(config, balance_coefficient=0.0, batch_balance_layers="together")
    without = transformer(config)
    routed = transformer(
        replace(config, batch_balance_coefficient=THEIR_COEFFICIENT * config.experts_per_token)
    )

    @partial(jax.jit, static_argnums=0)
    def run(model, params, microbatch):
        def loss(params):
            return sum(term.value for term in apply(model, params, microbatch).terms.values())

        loss, grads = jax.value_and_grad(loss)(params)
        return loss, grads, logits(config, params, microbatch), _router_logits(config, params, microbatch)

    cases = [case for case in golden("llama_tiny.json")["cases"] if "mixtral" in case["name"]]
    assert len(cases) == 6
    for case in cases:
        microbatch, expected = _microbatch(case["inputs"]), case["expected"]
        aux = expected.get("aux_loss", 0.0)
        loss, grads, all_logits, router_logits = run(routed if aux else without, params, microbatch)
        _same_logits(all_logits, expected["logits"])
        wanted = expected["loss_from_logits_float64"] + THEIR_COEFFICIENT * aux
        np.testing.assert_allclose(loss, wanted, rtol=5e-6)
        _same_gradients(_mixtral_leaves(grads), expected)
        if aux:
            _same_router_logits(router_logits, np.asarray(case["inputs"]["attention_mask"]), expected)


def _same_router_logits(ours, attention_mask, expected):
    (rows, length), real = attention_mask.shape, attention_mask != 0
    ours = np.asarray(ours)[:, :rows, :length][:, real]
    theirs = np.asarray(expected["router_logits"]).reshape(2, rows, length, -1)[:, real]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5)


LAW = replace(SOFTMAX, tied_embeddings=True, z_loss=1e-2, label_smoothing=0.1, logit_softcap=4.0, dropout=0.1)
ROWS, LENGTH = 16, 8


def _batch():
    """Packed rows of every length, two of them empty."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(1, LENGTH + 1, ROWS)
    lengths[[3, 10]] = 0
    place = np.arange(LENGTH)
    segments = np.where(place < lengths[:, None], 1 + (place >= 3), 0)
    tokens = draw.integers(0, LAW.vocab_size, (2, ROWS, LENGTH))
    return {
        "tokens": np.where(segments > 0, tokens[0], 0),
        "targets": tokens[1],
        "loss_mask": (segments > 0) * draw.integers(0, 2, (ROWS, LENGTH)).astype(np.float64),
        "segments": segments,
    }


@pytest.fixture(scope="module")
def whole():
    """(params, key, loss, terms and gradient of all rows at once, without the engine)."""
    params, key = (
        jax.jit(lambda key: init_params(LAW, key, jnp.float64))(jax.random.key(3)),
        jax.random.key(4),
    )
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(ROWS))

    @jax.jit
    def run(params):
        def loss(params):
            terms = apply(transformer(LAW), params, _batch(), keys).terms
            return sum(term.value for term in terms.values()), terms

        return jax.value_and_grad(loss, has_aux=True)(params)

    return params, key, run(params)


def test_what_a_matrix_writes_begins_as_large_as_what_it_reads(whole):
    """What writes into the residual stream does so once in attention and once behind it, in every layer."""
    layers = jax.tree.map(lambda leaf: leaf / 2, whole[0]["layers"])  # which the fixture has doubled
    experts, attention, shared = layers["moe"]["experts"], layers["attention"], layers["moe"]["shared"]
    reads = *(attention[name]["kernel"] for name in ("query", "key", "value")), shared["up"]["kernel"]
    writes = attention["output"]["kernel"], shared["down"]["kernel"], experts["down"]
    for matrices, share in (
        ((*reads, experts["gate"], experts["up"]), 1),
        (writes, 1 / (2 * LAW.num_layers)),
    ):
        for matrix in matrices:
            np.testing.assert_allclose(matrix.var() * matrix.shape[-2], share, rtol=0.3)


@pytest.mark.parametrize("remat, again", [("none", 0), ("selective", 0), ("layer", 3)])
def test_selective_computes_no_product_with_experts_again(remat, again):
    """A layer has three forward and six backward; each is one of several by platform."""
    fb = jaxfb.get_forward_backward_func(remat=remat)
    params = jax.eval_shape(lambda key: init_params(LAW, key), jax.random.key(0))
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2)
    program = jax.make_jaxpr(lambda params: fb(transformer(LAW), params, _batch(), plan).grads)(params)
    assert str(program).count("platform_index[") == 3 + 6 + again


SPLITS = [
    ({"data": 2, "expert": 2}, 4, {"remat": "selective"}),
    ({"expert": 2, "fsdp": 2}, 2, {"remat": "halves", "gather_ahead": True}),
    ({"expert": 2, "fsdp": 2}, 2, {"remat": "selective", "gather_ahead": True}),
    *(
        pytest.param(*split, marks=pytest.mark.slow)
        for split in [
            ({}, 4, {"remat": "full"}),
            ({"pipe": 2, "expert": 2}, 4, {"remat": "halves", "schedule": "zero_bubble"}),
            ({"pipe": 2, "expert": 2, "fsdp": 2}, 2, {"remat": "full"}),
            ({"pipe": 2, "expert": 2, "fsdp": 2}, 2, {"remat": "selective", "schedule": "zero_bubble"}),
            ({"data": 2, "context": 2, "expert": 2}, 2, {"remat": "full", "optimizer_sharding": "data"}),
            (
                {"pipe": 2, "expert": 2, "tensor": 2},
                4,
                {"schedule": "zero_bubble", "poison_bubbles": True},
            ),
            ({"fsdp": 2, "expert": 4}, 2, {"fsdp_gather": "step", "optimizer_sharding": "data"}),
        ]
    ),
]


def _name(value):
    return (
        "-".join(f"{key}{part}" for key, part in value.items()) or "-"
        if isinstance(value, dict)
        else f"M{value}"
    )


@pytest.mark.parametrize("mesh, num_microbatches, options", SPLITS, ids=_name)
def test_a_split_changes_nothing(whole, mesh, num_microbatches, options, monkeypatch):
    """Nor does space for half of a device's rows, so that they come in several rounds.

    With space for all of them, and without an expert axis: tests/forward_backward/test_axes.py.
    """
    if "expert" in mesh and {"pipe", "tensor"} & set(mesh):
        monkeypatch.setattr(expert_axis, "TILE", 1)
    params, key, ((loss, terms), grads) = whole
    replicas = int(
        np.prod([size for axis, size in mesh.items() if axis in ("data", "fsdp", "expert")], dtype=int)
    )
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    in_turns = options.get("remat") in ("full", "halves")  # where the forward is not differentiated
    config = replace(LAW, expert_overlap=in_turns, expert_buffer=0.5)
    out = fb(transformer(config), params, _batch(), plan, key)
    assert set(terms) == {"cross_entropy", "label_smoothing", "z_loss", "balance", "router_z"}
    close((out.loss, out.terms, out.grads), (loss, terms, grads))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, num_microbatches, options",
    [
        ({"expert": 2, "fsdp": 2}, 2, {"remat": "halves", "gather_ahead": True}),
        ({"pipe": 2, "expert": 2}, 4, {"remat": "layer", "schedule": "zero_bubble"}),
    ],
    ids=_name,
)
def test_kernels_for_gpus_change_nothing(whole, mesh, num_microbatches, options, monkeypatch):
    """With rows from other devices, undefined ones behind them, further rounds, and a backward in two parts."""
    use_kernels_of_gpus(monkeypatch)
    test_a_split_changes_nothing(whole, mesh, num_microbatches, options, monkeypatch)


def _inside(computations, name):
    """The names of a computation and of all that it runs."""
    called = (callee for one in computations[name] for callee, _ in hlo.callees(one, computations))
    return {name}.union(*(_inside(computations, callee) for callee in called))


def _met_in_loops_of_unknown_length(text, mesh):
    """{whether the loop is for further rounds: axes of the mesh over which devices meet inside such loops}."""
    (computations, _), found = hlo.parse(text), hlo.collectives(text)
    axes = {True: set(), False: set()}
    loops = [one for body in computations.values() for one in body if one.opcode == "while"]
    for loop in (one for one in loops if "known_trip_count" not in one.rest):
        inside = _inside(computations, hlo.callees(loop, computations)[0][0])
        met = [one.axes(mesh) for one in found if one.computation in inside]
        axes[any("expert" in over for over in met)].update(*met)
    return axes


def test_devices_meet_in_a_loop_only_with_those_that_run_it_as_often(monkeypatch):
    """A collective waits for all of its devices, so one that left the loop before would be waited for without end.

    How many further rounds there are is the same along `expert`, as all of it knows all counts, and along `tensor`,
    which has the same tokens; how many tiles of rows a device multiplies is the same along `tensor` alone.
    """
    monkeypatch.setattr(expert_axis, "TILE", 1)
    config, mesh = replace(SOFTMAX, expert_buffer=0.5), jaxfb.make_mesh(fsdp=2, expert=2, tensor=2)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=4, num_microbatches=2)
    fb = jaxfb.get_forward_backward_func(mesh, remat="full")
    step = jax.jit(lambda params: fb(transformer(config), params, _batch(), plan))
    axes = _met_in_loops_of_unknown_length(step.lower(_shapes(config)).compile().as_text(), mesh)
    assert axes == {True: {"expert", "tensor"}, False: {"tensor"}}


def _shapes(config):
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float64))


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_tokens_are_counted_once_where_sequences_are_cut(padded):
    """Without segments the padding rows of a short batch are known by their mask, and without a mask all count."""
    rows = 7 if padded else 8
    batch = {"tokens": _batch()["tokens"][:rows]}
    if padded:
        batch["loss_mask"] = np.ones((rows, LENGTH))

    def loss(hidden, kernel, microbatch, **_):
        mask = microbatch.get("loss_mask", jnp.ones(hidden.shape[:2]))  # a row of padding counts nothing
        return jaxfb.Sum(jnp.where(mask[..., None] > 0, hidden**2, 0).sum(), mask.sum())

    model = transformer(LAW, loss=loss)
    plan = jaxfb.BatchPlan(rows=rows, data_parallel=2, num_microbatches=2, remainder="pad")
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(context=2, expert=2))
    params = init_params(LAW, jax.random.key(3), jnp.float64)
    terms = fb(model, params, batch, plan, forward_only=True).terms
    assert terms["balance"].weight == terms["router_z"].weight == LAW.num_layers * rows * LENGTH


def test_an_even_row_has_a_balance_loss_of_one():
    probs = jnp.full((1, 4, 4), 0.25)
    even = jnp.array([[[0, 1], [2, 3], [1, 0], [3, 2]]])
    np.testing.assert_allclose(balance_of_sequences(probs, even, None).value, 1.0, rtol=1e-12)
    one_sided = jnp.zeros((1, 4, 4)).at[..., 0].set(1.0)
    one = balance_of_sequences(one_sided, even[:, :, :1] * 0, None)
    np.testing.assert_allclose(one.value, 4.0, rtol=1e-12)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"experts_per_token": 5},
            "experts_per_token=5 must be at most num_experts=4; use experts_per_token=4",
        ),
        ({"router_scores": "relu"}, "router_scores='relu' must be one of softmax, sigmoid"),
        ({"expert_capacity": 0.0}, "expert_capacity=0.0 must be positive"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must be at least 0 and below 1"),
    ],
)
def test_impossible_experts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SOFTMAX, **change)


def test_parameters_are_counted():
    for config in (SOFTMAX, replace(SIGMOID, expert_mlp_size=3)):
        assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(_shapes(config))) == num_params(
            config
        )


def test_a_layers_second_half_computes_what_it_is_given_while_rows_are_sent(monkeypatch):
    """The engine gives it attention that is computed again."""
    seen, dispatch = [], expert_axis.dispatch
    monkeypatch.setattr(
        expert_axis,
        "dispatch",
        lambda *args, **named: seen.append(named["beside"]) or dispatch(*args, **named),
    )
    params = init_params(SOFTMAX, jax.random.key(0), jnp.float64)
    params = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    batch = _batch()
    hidden = jnp.ones((*batch["tokens"].shape, SOFTMAX.hidden_size))
    halves = transformer(SOFTMAX).halves
    _, back = halves.second(params, hidden, batch, None, [hidden])
    assert any(leaf is hidden for leaf in jax.tree.leaves(seen)) and back[0] is hidden
