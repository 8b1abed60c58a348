"""A token budget changes neither loss nor gradient nor what is collected: widths, packing, replicas, microbatches."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from whole import ragged_batch, value_and_grad

import jaxfb
from jaxfb.batch_plan import PlanError
from jaxfb.forward_backward.packed import Packed
from jaxfb.losses.language_model import next_token_loss
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

ROWS, LENGTH = 13, 12
CONFIG = TransformerConfig(vocab_size=16, num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1)


def loss(hidden, kernel, microbatch, axis=None):
    return next_token_loss(hidden, kernel, microbatch, chunk=64, outputs="tokens", axis=axis)


MODEL = transformer(CONFIG, loss=loss)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(CONFIG, key, jnp.float64))(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    return ragged_batch(np.array([3, 11, 0, 5, 7, 2, 11, 4, 6, 1, 9, 3, 8]), LENGTH)


@pytest.fixture(scope="module")
def whole(params, batch):
    return value_and_grad(MODEL, params, batch)


def close(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))


BUDGETS = [
    ({}, dict(max_tokens_per_microbatch=36)),
    pytest.param({"data": 2}, dict(max_tokens_per_microbatch=24, packing=True), marks=pytest.mark.slow),
    pytest.param(
        {"data": 4}, dict(max_tokens_per_microbatch=12, packing=True, widths=(12,)), marks=pytest.mark.slow
    ),
    pytest.param(
        {"pipe": 2}, dict(max_tokens_per_microbatch=40, packing=True, widths=(20,)), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("mesh, budget", BUDGETS, ids=str)
def test_a_budget_changes_nothing(mesh, budget, params, batch, whole):
    (value, out), grads = whole
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=mesh.get("data", 1), sequence_length=LENGTH, **budget)
    got = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh))(MODEL, params, batch, plan)
    close((got.loss, got.grads, got.outputs), (value, grads, out.outputs))
    assert float(got.terms["cross_entropy"].weight) == batch["loss_mask"].sum()
    assert len(got.per_microbatch["cross_entropy"].total) > 1


def test_padding_within_rows_and_positions_of_the_batch_stay_when_rows_are_packed(params, batch):
    """Rows padded on the left, a row whose padding is between its tokens, and positions with gaps."""
    padded = {name: leaf.copy() for name, leaf in batch.items()}
    for row in range(3, 9):
        by = LENGTH - int((batch["segments"][row] > 0).sum())
        for leaf in padded.values():
            leaf[row] = np.roll(leaf[row], by)
    padded["segments"][1, 4:6] = padded["loss_mask"][1, 3:6] = 0
    positions = np.where(padded["segments"] > 0, 2 * np.arange(LENGTH) // 3, 0)
    padded["positions"] = positions.astype(np.int32)
    (value, out), grads = value_and_grad(MODEL, params, padded)
    plan = jaxfb.BatchPlan(rows=ROWS, max_tokens_per_microbatch=24, sequence_length=LENGTH, packing=True)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(devices=jax.devices()[:1]))
    got = fb(MODEL, params, padded, plan)
    close((got.loss, got.grads, got.outputs), (value, grads, out.outputs))


def test_positions_of_packed_rows_begin_at_their_first_token():
    """Behind padding on the left too: from positions some models read how long a row is."""
    segments = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]])
    plan = jaxfb.BatchPlan(
        rows=3, max_tokens_per_microbatch=12, sequence_length=4, packing=True, widths=(12,)
    )
    batch = Packed({"tokens": segments, "segments": segments}, plan).batch
    (row,) = (line for line in range(len(batch["segments"])) if batch["segments"][line].any())
    np.testing.assert_array_equal(batch["positions"][row, :10], [0, 0, 0, 1, 0, 1, 0, 0, 1, 2])


@pytest.mark.slow
def test_an_update_under_a_budget_is_the_update(params, batch):
    mesh, optimizer = jaxfb.make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)
    plans = [
        jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=ROWS),
        jaxfb.BatchPlan(rows=ROWS, max_tokens_per_microbatch=24, sequence_length=LENGTH, packing=True),
    ]
    steps = [jaxfb.make_train_step(MODEL, optimizer, mesh, plan, dropout=False) for plan in plans]
    (one, _), (other, metrics) = (step(step.init(params), batch) for step in steps)
    close(one.params, other.params)
    assert int(other.samples) == ROWS and not metrics.skipped


def test_a_row_keeps_its_dropout_mask_under_a_budget(batch):
    def dropped(table, microbatch, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(keys)
        per_row = jnp.where(microbatch["segments"] > 0, 1.0, 0).sum(1) * (keep * table).sum(1)
        return jaxfb.LossOutput(
            {"loss": jaxfb.Sum(per_row.sum(), (microbatch["segments"] > 0).sum())}, outputs=per_row
        )

    fb, table = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2)), np.arange(8.0)
    by_tokens = jaxfb.BatchPlan(
        rows=ROWS, data_parallel=2, max_tokens_per_microbatch=24, sequence_length=LENGTH
    )
    by_rows = jaxfb.BatchPlan(rows=ROWS, data_parallel=2, rows_per_microbatch=2, remainder="pad")
    outs = [fb(dropped, table, batch, plan, jax.random.key(3)) for plan in (by_tokens, by_rows)]
    close((outs[0].loss, outs[0].grads, outs[0].outputs), (outs[1].loss, outs[1].grads, outs[1].outputs))


def test_what_a_budget_cannot_do_is_refused(params, batch):
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(devices=jax.devices()[:1]))
    plan = jaxfb.BatchPlan(rows=ROWS, max_tokens_per_microbatch=24, sequence_length=LENGTH, packing=True)
    with pytest.raises(PlanError, match="not known inside jax.jit"):
        jax.jit(lambda b: fb(MODEL, params, b, plan).loss)(batch)
    with pytest.raises(PlanError, match=r'needs batch\["segments"\]'):
        fb(MODEL, params, {"tokens": batch["tokens"]}, plan)
    with pytest.raises(PlanError, match=r"segments.* length 12, but batch\['features'\] has shape \(13, 3\)"):
        fb(MODEL, params, batch | {"features": np.ones((ROWS, 3))}, plan)
    with pytest.raises(PlanError, match="dropout would depend on the packing"):
        fb(MODEL, params, batch, plan, jax.random.key(0))
    with pytest.raises(ValueError, match="pass dropout=False"):
        jaxfb.make_train_step(MODEL, optax.sgd(0.1), None, plan)
    with pytest.raises(PlanError, match="row 1 has 11 tokens"):
        fb(MODEL, params, batch, plan.replace(sequence_length=9, widths=(9,)))


def scores_of_rows(table, microbatch, rng):
    """Gives as many numbers for each row as a microbatch is wide, and one for each of its tokens."""
    valid = microbatch["segments"] > 0
    of_tokens = jnp.where(valid, microbatch["tokens"] * table.sum(), 0.0)
    of_rows = of_tokens.sum(1)[:, None] * table
    total = jaxfb.Sum(of_rows.sum(), valid.sum())
    return jaxfb.LossOutput({"loss": total}, outputs={"rows": of_rows, "tokens": of_tokens})


@pytest.mark.parametrize("mesh, more", [({}, {}), ({"data": 2, "context": 2}, {"max_context": 2})])
def test_numbers_of_a_row_as_many_as_tokens_stay_those_of_the_row(mesh, more, batch):
    table = np.arange(1.0, LENGTH + 1)
    plan = jaxfb.BatchPlan(
        rows=ROWS,
        data_parallel=mesh.get("data", 1),
        max_tokens_per_microbatch=24,
        sequence_length=LENGTH,
        **more,
    )
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh, devices=devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not communicate over context
        got = fb(scores_of_rows, table, batch, plan, forward_only=True)
    close(got.outputs, scores_of_rows(table, batch, None).outputs)
    if not more:
        with pytest.raises(
            ValueError, match=r"per token, .* got shape \(6, 12\), of which the second dim does not"
        ):
            fb(scores_of_rows, table, batch, plan.replace(packing=True), forward_only=True)


def test_a_model_of_one_width_may_give_numbers_of_tokens(batch):
    def of_one_width(table, microbatch, rng):
        assert microbatch["tokens"].shape[1] == LENGTH
        out = scores_of_rows(table, microbatch, rng)
        return jaxfb.LossOutput(out.terms, outputs=out.outputs["tokens"])

    plan = jaxfb.BatchPlan(rows=ROWS, max_tokens_per_microbatch=24, sequence_length=LENGTH)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(devices=jax.devices()[:1]))
    got = fb(of_one_width, np.ones(LENGTH), batch, plan, forward_only=True)
    close(got.outputs, scores_of_rows(np.ones(LENGTH), batch, None).outputs["tokens"])


@pytest.mark.parametrize("packing", [False, True])
def test_outputs_at_padding_reach_no_row(packing):
    """What a model gives at padding is whatever it is; every token gets back its own, and only its own."""
    lengths = np.array([3, 1, 4, 2, 5])
    segments = (np.arange(6) < lengths[:, None]).astype(int)
    names = 1 + np.arange(5 * 6).reshape(5, 6)
    plan = jaxfb.BatchPlan("eval", rows=5, max_tokens_per_microbatch=16, sequence_length=6, packing=packing)
    packed = Packed({"tokens": names, "segments": segments}, plan)
    real = np.arange(packed.arrangement.width) < packed.arrangement.width
    given = np.where(packed.batch["segments"] > 0, packed.batch["tokens"], -7) * real
    chex.assert_trees_all_equal(packed.restore({"out": given})["out"] * segments, names * segments)
    assert (packed.restore(given)[segments == 0] == 0).all()


def test_keys_and_numbers_of_rows_go_with_their_rows():
    """The restored is what each row had; without `of_tokens` a leaf as wide as an array row is taken for tokens."""
    lengths = np.array([3, 1, 4, 2, 5])
    segments = (np.arange(6) < lengths[:, None]).astype(int)
    batch = {"row": np.arange(1, 6), "segments": segments}
    plan = jaxfb.BatchPlan("eval", rows=5, max_tokens_per_microbatch=12, sequence_length=6)
    packed, keys = Packed(batch, plan), jax.random.split(jax.random.key(0), 5)
    given, width = packed.batch["row"], packed.arrangement.width
    assert len(given) > 5 and width != 3
    data = jax.random.key_data(packed.keys(keys))
    chex.assert_trees_all_equal(data[given > 0], jax.random.key_data(keys)[given[given > 0] - 1])
    one = jax.random.key(1)
    assert packed.keys(None) is None and (packed.keys(one) == one).all() and packed.keys(one).ndim == 0
    with pytest.raises(ValueError, match="packed rows share array rows"):
        Packed(batch, plan.replace(packing=True)).keys(keys)

    outputs = {"row": given, "three": np.stack([given] * 3, 1), "token": np.stack([given] * width, 1)}
    restored = packed.restore(outputs)
    chex.assert_trees_all_equal(restored["row"], batch["row"])
    chex.assert_trees_all_equal(restored["three"], np.stack([batch["row"]] * 3, 1))
    chex.assert_trees_all_equal(restored["token"], batch["row"][:, None] * segments)
