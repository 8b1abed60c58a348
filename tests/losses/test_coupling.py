"""A loss that looks across rows is refused when the batch is in parts, and only then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfb
from jaxfb.losses.coupling import check_rows_uncoupled, coupled
from jaxfb.losses.heads import policy_loss_fn
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.sequences import Sequences
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.types import LossOutput, Pipelined, Sum, Unembedding

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, mlp_size=12, vocab_size=16
)
ROWS, SEQ = 4, 6


def local_mean(log_probs, entropy, microbatch):
    return Sum(log_probs.mean(), 1.0)


def whitened_here(log_probs, entropy, microbatch):
    """The value adds up over rows; its gradient does not."""
    advantages = microbatch["advantages"]
    advantages = (advantages - advantages.mean()) / advantages.std()
    return Sum((advantages * (log_probs - lax.stop_gradient(log_probs))).sum(), microbatch["loss_mask"].sum())


def rows_squared(log_probs, entropy, microbatch):
    return Sum(log_probs.sum(), float(log_probs.shape[0] ** 2))


def biased_metric(log_probs, entropy, microbatch):
    mask = microbatch["loss_mask"]
    return LossOutput({"loss": Sum(log_probs.sum(), mask.sum())}, {"mean": Sum(log_probs.mean(), 1.0)})


def most_likely_half(log_probs, entropy, microbatch):
    kept = log_probs >= jnp.median(log_probs)
    return Sum(jnp.where(kept, log_probs, 0).sum(), microbatch["loss_mask"].sum())


def by_sequence(log_probs, entropy, microbatch):
    sequences = Sequences.of(microbatch)
    return Sum(sequences.total(log_probs - sequences.means(log_probs) ** 2), sequences.number())


def _check(loss, num_parts):
    floats = np.zeros((ROWS, SEQ), np.float32)
    leaves = ("loss_mask", "old_log_probs", "advantages", "ref_log_probs")
    microbatch = {name: floats for name in leaves} | {"segments": np.zeros((ROWS, SEQ), np.int32)}
    policy_loss_fn(transformer(CONFIG), loss).check(microbatch, num_parts)


@pytest.mark.parametrize(
    "loss, what",
    [
        (local_mean, "the total of term 'loss'"),
        (whitened_here, "the gradient"),
        (rows_squared, "the weight of term 'loss'"),
        (biased_metric, "the metric 'mean'"),
        (most_likely_half, "the"),
    ],
)
def test_a_loss_that_couples_rows_is_refused(loss, what):
    with pytest.raises(ValueError, match=f"{loss.__name__} couples rows: {what}.*into 2 parts"):
        _check(loss, 2)
    _check(loss, 1)


def test_a_loss_may_read_one_number_a_row():
    def weighted(log_probs, entropy, microbatch):
        return Sum((microbatch["row_weight"][:, None] * log_probs).sum(), microbatch["loss_mask"].sum())

    floats = np.zeros((ROWS, SEQ), np.float32)
    check_rows_uncoupled(weighted, 2, {"loss_mask": floats, "row_weight": floats[:, 0]}, 2)


@pytest.mark.slow
def test_losses_over_sequences_pass():
    _check(by_sequence, 2)
    _check(PolicyLoss(aggregation="seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.1), 2)


@pytest.mark.parametrize("jit", [False, True])
def test_the_engine_asks_before_it_compiles(jit):
    """With parameters that nothing could compute with; inside the caller's jit too, where only shapes are known."""

    def unembed(outer, hidden):
        return Unembedding(hidden, outer["head"])

    def nothing(*_):
        raise AssertionError("nothing is computed")

    model = policy_loss_fn(Pipelined(nothing, nothing, nothing, unembed=unembed), local_mean)
    params = {"layers": {"w": np.zeros((2, 1))}, "head": np.zeros(1)}
    batch = {"loss_mask": np.ones((ROWS, SEQ)), "targets": np.zeros((ROWS, SEQ), np.int32)}
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2)
    call = lambda params, batch: jaxfb.get_forward_backward_func()(model, params, batch, plan).loss  # noqa: E731
    coupled.cache_clear()
    with pytest.raises(ValueError, match="couples rows"):
        (jax.jit(call) if jit else call)(params, batch)


def test_a_model_that_cannot_unembed_is_refused():
    with pytest.raises(ValueError, match="give the Pipelined `unembed="):
        policy_loss_fn(Pipelined(None, None, None), local_mean)


def test_what_is_too_large_to_make_up_is_said_not_to_be_checked():
    def loss(values, microbatch):
        raise AssertionError("never asked")

    huge = {
        "loss_mask": jax.ShapeDtypeStruct((ROWS, 4096), jnp.float32),
        "teacher_log_probs": jax.ShapeDtypeStruct((ROWS, 4096, 32768), jnp.float32),
    }
    with pytest.warns(UserWarning, match="134,217,728 numbers a row"):
        check_rows_uncoupled(loss, 1, huge, 2)


def _bare(log_probs, entropy, microbatch):
    return log_probs.sum()


def _surrogate_of_one(tokens, sequences):
    return -tokens.advantages


def _surrogate_of_rows(tokens, sequences):
    return -tokens.advantages.mean(1), {}


def _surrogate_of_kept_rows(tokens, sequences):
    return -tokens.advantages.mean(1, keepdims=True), {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_bare, "_bare must return jaxfb.Sum.total, weight. or jaxfb.LossOutput"),
        (PolicyLoss(_surrogate_of_one), r"the surrogate _surrogate_of_one must return \(loss per token, metrics\)"),
        (PolicyLoss(_surrogate_of_rows), "_surrogate_of_rows must return a loss of every token, .*jnp.broadcast_to"),
        (PolicyLoss(_surrogate_of_kept_rows), r"must return a loss of every token, .*, got one of \(3, 1\)"),
    ],
    ids=["bare", "surrogate", "a loss of rows", "of rows, kept"],
)  # fmt: skip
def test_a_loss_that_returns_something_else_is_refused_by_its_name(loss, message):
    with pytest.raises(ValueError, match=message):
        _check(loss, 2)


def test_a_loss_of_other_arguments_is_refused_when_its_model_is_made():
    with pytest.raises(ValueError, match=r"loss must take \(log_probs, entropy, microbatch\)"):
        policy_loss_fn(transformer(CONFIG), lambda log_probs, microbatch: 0)


@pytest.mark.parametrize("name", ["targets", "loss_mask"])
@pytest.mark.parametrize("rows_per_microbatch", [ROWS, 2])
def test_a_batch_without_what_every_loss_reads_is_refused(name, rows_per_microbatch):
    leaves = {
        "tokens": np.int32,
        "targets": np.int32,
        "positions": np.int32,
        "segments": np.int32,
        "loss_mask": float,
    }
    batch = {one: np.ones((ROWS, SEQ), dtype) for one, dtype in leaves.items() if one != name}
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=rows_per_microbatch)
    params = init_params(CONFIG, jax.random.key(0))
    with pytest.raises(ValueError, match=f"reads the leaf '{name}'"):
        jaxfb.get_forward_backward_func()(
            policy_loss_fn(transformer(CONFIG), by_sequence), params, batch, plan
        )
