"""Sequences that go through a pipeline in pieces: the gradient is that of whole sequences on one device."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb
from jaxfb import BatchPlan, LossOutput, Pipelined, Sum, make_mesh
from jaxfb.forward_backward.pipeline.pieces import check_lengths, warn_of_places, whole_records
from jaxfb.models.adapted import LoRA, adapted
from jaxfb.models.attention import packed_attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind
from jaxfb.models.piece_attention import Keys, piece_attention
from jaxfb.models.transformer import init_params, transformer
from jaxfb.models.variant import Variant
from jaxfb.parallel.scores import Scores
from jaxfb.platforms.compat import equations
from jaxfb.schedules import Schedule, make
from jaxfb.types import Last, Max, Min

ROWS, LENGTH, WIDTH = 4, 8, 3


def embed(outer, microbatch, rng):
    return microbatch["x"] @ outer["in"]


def layer(weights, hidden, microbatch, rng):
    """Adds a function of the mean of all tokens so far."""
    own = jnp.tanh(hidden @ weights["own"])
    return hidden + jnp.cumsum(own, axis=1) @ weights["mix"]


def layer_piece(weights, hidden, microbatch, rng, piece):
    own = jnp.tanh(hidden @ weights["own"])
    before = 0.0
    if piece.past is not None:
        is_earlier = jnp.arange(piece.past.shape[1]) < piece.number * hidden.shape[1]
        before = jnp.where(is_earlier[:, None], piece.past, 0).sum(1, keepdims=True)
    return hidden + (before + jnp.cumsum(own, axis=1)) @ weights["mix"], own


def head(outer, hidden, microbatch, rng):
    error = jnp.square(hidden @ outer["out"] - microbatch["y"])
    if "by_row" in microbatch:
        error = error * microbatch["by_row"][:, None, None]
    metrics = {"largest": Max(error.max()), "count": Sum(error.sum(), error.size)}
    return LossOutput(
        {"squares": Sum((microbatch["mask"] * error).sum(), microbatch["mask"].sum())}, metrics, error
    )


RUNNING_SUM = Pipelined(embed, layer, head, layer_piece=layer_piece)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


PARAMS = {
    "in": numbers(2, WIDTH),
    "out": numbers(WIDTH, 1, seed=1),
    "layers": {"own": numbers(4, WIDTH, WIDTH, seed=2), "mix": 0.3 * numbers(4, WIDTH, WIDTH, seed=3)},
}
BATCH = {
    "x": numbers(ROWS, LENGTH, 2, seed=4),
    "y": numbers(ROWS, LENGTH, 1, seed=5),
    "mask": np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH, 1) % 3 / 2.0,
    "by_row": numbers(ROWS, seed=6) ** 2,
}
PLAN = BatchPlan(rows=ROWS, rows_per_microbatch=2)


def one_device(model, params, batch, plan=PLAN):
    return jaxfb.get_forward_backward_func()(model, params, batch, plan)


def in_pieces(model, params, batch, mesh=None, plan=PLAN, forward_only=False, **options):
    mesh = make_mesh(
        **(mesh or {"pipe": 2}), devices=jax.devices()[: np.prod(list((mesh or {"pipe": 2}).values()))]
    )
    fb = jaxfb.get_forward_backward_func(mesh, poison_bubbles=True, **options)
    return fb(model, params, batch, plan, forward_only=forward_only)


@pytest.mark.parametrize(
    "options",
    [
        {"num_pieces": 4},
        pytest.param({"num_pieces": 2, "num_chunks": 2, "remat": "full"}, marks=pytest.mark.slow),
        pytest.param(
            {"num_pieces": 4, "schedule": "seq_abreast", "mesh": {"pipe": 4}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_pieces_of_a_model_of_ones_own_change_nothing(options):
    wanted, found = one_device(RUNNING_SUM, PARAMS, BATCH), in_pieces(RUNNING_SUM, PARAMS, BATCH, **options)
    chex.assert_trees_all_close(
        (found.loss, found.grads, found.metrics, found.per_microbatch, found.outputs),
        (wanted.loss, wanted.grads, wanted.metrics, wanted.per_microbatch, wanted.outputs),
        rtol=1e-12,
        atol=1e-12,
    )


def test_the_last_layer_of_a_stage_is_not_run_for_an_input_that_no_layer_has():
    """remat="full" finds the inputs of a stage's layers in another forward; of the only layer that is the stage's."""

    def forwards(remat):
        grads = jax.make_jaxpr(
            lambda params: in_pieces(RUNNING_SUM, params, BATCH, {"pipe": 4}, num_pieces=2, remat=remat).grads
        )(PARAMS)
        return sum(eqn.primitive.name == "tanh" for eqn in equations(grads))

    assert forwards("full") == forwards("layer") > 0


def test_a_forward_pass_in_pieces_gives_outputs_in_the_order_of_tokens():
    wanted = one_device(RUNNING_SUM, PARAMS, BATCH)
    found = in_pieces(RUNNING_SUM, PARAMS, BATCH, num_pieces=2, forward_only=True)
    chex.assert_trees_all_close((found.loss, found.outputs), (wanted.loss, wanted.outputs), rtol=1e-12)
    assert found.grads is None


LATENT = Latent(key_value_rank=4, rotary_size=2, value_size=2)
PATTERN = (LayerKind(window=3), LayerKind(rope=False))
CASES = {  # mesh, options, documents in a row, sizes
    "data, uneven": (
        {"pipe": 2, "data": 2},
        {"num_pieces": 2, "remat": "layer", "layers_per_stage": [1, 3]},
        True,
        {},
    ),
    "tensor, sinks, soft cap": (
        {"pipe": 2, "tensor": 2},
        {"num_pieces": 4},
        True,
        {"variant": Variant(attention_sinks=True, attention_softcap=2.0)},
    ),
    "fsdp, full, pattern": (
        {"pipe": 2, "fsdp": 2},
        {"num_pieces": 4, "remat": "full"},
        False,
        {"tied_embeddings": True, "pattern": PATTERN},
    ),
    "fsdp, half a layer ahead": (
        {"pipe": 2, "fsdp": 2},
        {"num_pieces": 2, "remat": "layer", "gather_ahead": "half"},
        True,
        {},
    ),
    "chunks, selective, latent": (
        {"pipe": 2},
        {"num_pieces": 2, "num_chunks": 2, "remat": "selective"},
        False,
        {"latent": LATENT, "num_kv_heads": None, "head_size": 4},
    ),
    "window, adapters": (
        {"pipe": 2},
        {"num_pieces": 4},
        True,
        {"window": 3, "num_layers": 2, "lora": LoRA(rank=2)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_pieces_of_the_transformer_change_nothing(case):
    mesh, options, packed, sizes = CASES[case]
    widths = {
        "vocab_size": 16,
        "hidden_size": 8,
        "mlp_size": 12,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    sizes = dict(widths | sizes)
    adapters = sizes.pop("lora", None)
    config = adapted(TransformerConfig(**sizes), adapters)
    model, params = transformer(config), init_params(config, jax.random.key(0), jnp.float64)
    rng, shape = np.random.default_rng(0), (8, LENGTH)
    batch = {name: rng.integers(0, 16, shape).astype(np.int32) for name in ("tokens", "targets")}
    batch["loss_mask"] = (rng.random(shape) < 0.7).astype(np.float64)
    if packed:
        batch["segments"] = np.sort(rng.integers(1, 4, shape), 1).astype(np.int32)
        batch["positions"] = rng.integers(0, 5, shape).astype(np.int32)
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = BatchPlan(rows=8, rows_per_microbatch=4 // replicas, data_parallel=replicas)
    found = in_pieces(model, params, batch, mesh, plan, **options)
    wanted = one_device(model, params, batch, BatchPlan(rows=8, rows_per_microbatch=8))
    chex.assert_trees_all_close(
        (found.loss, found.grads), (wanted.loss, wanted.grads), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_pieces_is_that_of_the_sequence(window):
    query, key, value = numbers(2, 12, 4, 5), numbers(2, 12, 2, 5, seed=1), numbers(2, 12, 2, 5, seed=2)
    segments, scores = (
        np.sort(np.arange(24).reshape(2, 12) % 3, 1),
        Scores(softcap=2.0, sinks=numbers(4, seed=3)),
    )
    weights = numbers(2, 12, 4, 5, seed=4)

    def whole(query, key, value, sinks):
        here = scores._replace(sinks=sinks)
        out = packed_attention(
            query, key, value, here, segments=jnp.asarray(segments), backend="xla", window=window
        )
        return (weights * out).sum(), out

    def pieces(query, key, value, sinks):
        out = []
        for number in range(3):
            own = slice(4 * number, 4 * number + 4)
            earlier = jnp.arange(12)[:, None, None] < 4 * number
            past = Keys(*(jnp.where(earlier, x, jnp.nan) for x in (key, value)))
            here = scores._replace(sinks=sinks)
            given = {
                "past": past,
                "number": jnp.int32(number),
                "segments": jnp.asarray(segments),
                "window": window,
            }
            out.append(piece_attention(query[:, own], key[:, own], value[:, own], here, **given))
        out = jnp.concatenate(out, 1)
        return (weights * out).sum(), out

    given = (query, key, value, scores.sinks)
    found, wanted = (
        jax.jit(jax.value_and_grad(one, (0, 1, 2, 3), has_aux=True))(*given) for one in (pieces, whole)
    )
    chex.assert_trees_all_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_records_of_pieces_become_those_of_microbatches():
    of_pieces = LossOutput(
        {"loss": Sum(jnp.arange(6.0), jnp.ones(6))},
        {"most": Max(jnp.arange(6.0)), "least": Min(jnp.arange(6.0)), "last": Last(jnp.arange(6.0))},
        jnp.arange(24).reshape(6, 2, 2),
    )
    whole = whole_records(of_pieces, 3)
    assert whole.terms["loss"].total.tolist() == [3, 12] and whole.terms["loss"].weight.tolist() == [3, 3]
    assert [whole.metrics[name].array.tolist() for name in ("most", "least", "last")] == [
        [2, 5],
        [0, 3],
        [2, 5],
    ]
    assert whole.outputs[0].tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def refusal(*arguments, **options):
    with pytest.raises(ValueError) as caught:
        in_pieces(*arguments, **options)
    return str(caught.value)


def test_what_cannot_run_in_pieces_is_refused():
    without = Pipelined(embed, layer, head)
    assert "needs a model with Pipelined.layer_piece" in refusal(without, PARAMS, BATCH, num_pieces=2)
    assert "use num_pieces=2" in refusal(RUNNING_SUM, PARAMS, BATCH, num_pieces=3)
    assert "use schedule=seq1f1b" in refusal(RUNNING_SUM, PARAMS, BATCH, num_pieces=2, schedule="zero_bubble")
    assert "context=2" in refusal(RUNNING_SUM, PARAMS, BATCH, {"pipe": 2, "context": 2}, num_pieces=2)
    assert "pipe=2 or more" in refusal(RUNNING_SUM, PARAMS, BATCH, {"data": 2}, num_pieces=2)
    own = make("seq1f1b", 2, 2, 1, 4)
    assert "has num_pieces=4" in refusal(RUNNING_SUM, PARAMS, BATCH, num_pieces=2, schedule=own)
    with pytest.raises(ValueError, match="same for all"):
        check_lengths({"a": np.zeros((2, 2, 4)), "b": np.zeros((2, 2, 6))}, 2)


def test_what_a_piece_cannot_answer_for_is_refused():
    def of_rows(*given):
        out = head(*given)
        return LossOutput(out.terms, {}, out.outputs.sum((1, 2)))

    def with_term(*given):
        return layer(*given), {"norm": Sum(jnp.square(given[1]).sum(), 1)}

    rows, term = (
        Pipelined(embed, layer, of_rows, layer_piece=layer_piece),
        Pipelined(embed, with_term, head, layer_piece=layer_piece),
    )
    assert "must be of tokens" in refusal(rows, PARAMS, BATCH, num_pieces=2, forward_only=True)
    assert "the term 'norm'" in refusal(term, PARAMS, BATCH, num_pieces=2, forward_only=True)


@pytest.mark.parametrize(
    "sizes",
    [{"dropout": 0.1}, {"num_experts": 2, "experts_per_token": 1}, {"mtp_depth": 1}],
    ids=lambda sizes: next(iter(sizes)),
)
def test_the_transformer_offers_pieces_where_they_are_exact(sizes):
    plain = {"vocab_size": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    assert transformer(TransformerConfig(**plain)).layer_piece is not None
    assert transformer(TransformerConfig(**plain, **sizes)).layer_piece is None
    replaced = jaxfb.policy_loss_fn(transformer(TransformerConfig(**plain)), lambda *_: None)
    assert replaced.layer_piece is None


def test_a_schedule_of_ones_own_may_have_pieces():
    table = make("seq1f1b", 2, 1, 1, 2).table
    own = Schedule.from_table([[()] * 2, *table], num_pieces=2)
    assert (own.num_microbatches, own.num_items) == (1, 2)


def test_a_term_that_each_piece_would_count_is_refused():
    """Sums over tokens of what is the same for each are none."""

    def with_term(term):
        def loss_and_term(outer, hidden, *rest):
            out = head(outer, hidden, *rest)
            return LossOutput({**out.terms, "penalty": term(jnp.square(outer["out"]).sum(), hidden)})

        return Pipelined(embed, layer, loss_and_term, layer_piece=layer_piece)

    layers = {"own": numbers(2, WIDTH, WIDTH), "mix": numbers(2, WIDTH, WIDTH, seed=1)}
    params = jax.tree.map(jnp.asarray, {"in": numbers(2, WIDTH), "out": numbers(WIDTH, 1), "layers": layers})
    batch = {"x": numbers(ROWS, LENGTH, 2), "y": numbers(ROWS, LENGTH, 1), "mask": np.ones((ROWS, LENGTH, 1))}
    plan = BatchPlan(rows=ROWS, rows_per_microbatch=2)
    fb = jaxfb.get_forward_backward_func(make_mesh(pipe=2), num_pieces=2)
    with pytest.raises(
        ValueError, match="sum over tokens, but 'penalty' has something that reads none.*num_pieces=1"
    ):
        fb(with_term(lambda squares, _: Sum(squares, 1.0)), params, batch, plan)
    with pytest.raises(ValueError, match="sum over tokens, but 'penalty' has something that reads none"):
        fb(with_term(lambda squares, hidden: Sum(hidden.sum() + squares, 1.0)), params, batch, plan)
    model = with_term(lambda squares, hidden: Sum(squares * hidden[..., 0].size, hidden[..., 0].size))
    wanted = jaxfb.get_forward_backward_func()(model, params, batch, plan)
    chex.assert_trees_all_close(fb(model, params, batch, plan).grads, wanted.grads, rtol=1e-12)


@pytest.mark.parametrize(
    "metric",
    [
        lambda hidden, outer: Sum(hidden.sum(), 1.0),
        lambda hidden, outer: Sum(outer["out"].sum(), hidden.size),
    ],
    ids=["constant_weight", "of_parameters"],
)
def test_a_metric_that_each_piece_would_count_is_refused(metric):
    def loss_and_metric(outer, hidden, *rest):
        return LossOutput(head(outer, hidden, *rest).terms, {"measured": metric(hidden, outer)})

    layers = {"own": numbers(2, WIDTH, WIDTH), "mix": numbers(2, WIDTH, WIDTH, seed=1)}
    params = jax.tree.map(jnp.asarray, {"in": numbers(2, WIDTH), "out": numbers(WIDTH, 1), "layers": layers})
    batch = {"x": numbers(ROWS, LENGTH, 2), "y": numbers(ROWS, LENGTH, 1), "mask": np.ones((ROWS, LENGTH, 1))}
    plan = BatchPlan(rows=ROWS, rows_per_microbatch=2)
    model = Pipelined(embed, layer, loss_and_metric, layer_piece=layer_piece)
    with pytest.raises(ValueError, match="a metric of the head must be a sum over tokens, but 'measured'"):
        jaxfb.get_forward_backward_func(make_mesh(pipe=2), num_pieces=2)(model, params, batch, plan)


def embed_by_place(outer, microbatch, rng):
    return microbatch["x"] @ outer["in"] + jnp.arange(microbatch["x"].shape[1])[:, None] * outer["in"][0]


def embed_with_draws(outer, microbatch, rng):
    hidden = microbatch["x"] @ outer["in"]
    return hidden * jax.vmap(lambda key: jax.random.normal(key, hidden.shape[1:]))(rng)


def mean_of_rows(outer, hidden, microbatch, rng):
    error, mask = jnp.square(hidden @ outer["out"]), microbatch["mask"]
    return Sum(((mask * error).sum((1, 2)) / mask.sum((1, 2))).sum(), (mask.sum((1, 2)) > 0).sum())


@pytest.mark.parametrize(
    "own, named",
    [
        ({}, None),
        ({"embed": embed_by_place}, "embedding"),
        ({"embed": embed_with_draws}, "embedding"),
        ({"head": mean_of_rows}, "loss"),
        ({"embed": embed_by_place, "head": mean_of_rows}, "embedding and another loss"),
    ],
    ids=["right", "place", "draws", "mean", "both"],
)
def test_what_a_piece_computes_otherwise_than_the_whole_is_warned_of(own, named):
    """Gradients were wrong without a word: a piece does not know where in its sequence it is."""
    model = Pipelined(**{"embed": embed, "layer": layer, "head": head, "layer_piece": layer_piece, **own})
    microbatches = jax.tree.map(lambda leaf: leaf[None], BATCH)
    keys = jax.random.split(jax.random.key(0), (1, ROWS))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_places(model, PARAMS, microbatches, keys, 2)
    assert [str(one.message).partition(" than whole")[0] for one in heard] == (
        [f"with num_pieces=2, pieces give another {named}"] if named else []
    )


def test_a_call_warns_of_a_model_that_computes_otherwise_of_pieces():
    model = Pipelined(embed_by_place, layer, head, layer_piece=layer_piece)
    with pytest.warns(UserWarning, match="pieces give another embedding than whole sequences"):
        in_pieces(model, PARAMS, BATCH, num_pieces=2, forward_only=True)
