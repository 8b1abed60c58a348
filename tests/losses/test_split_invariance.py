"""Law 1 for post-training: every surrogate x aggregation, KL, entropy, preference, value and distillation loss gives
one device's full batch, however rows, tokens, layers and vocabulary are split: float64, 1e-12.

All losses are terms of one objective, each with a coefficient of its own, so that a mesh costs one compilation.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import hidden_states, logits

import jaxfb
from jaxfb.losses.aggregation import AGGREGATIONS
from jaxfb.losses.distillation import DistillationLoss, distillation_loss_fn
from jaxfb.losses.heads import log_prob_fn, policy_loss_fn
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.preference import PreferenceLoss
from jaxfb.losses.sft import SFTLoss
from jaxfb.losses.surrogates import SURROGATES, make_surrogate
from jaxfb.losses.token_log_probs import log_probs_of_logits
from jaxfb.losses.value import ValueLoss, critic_params, value_fn, value_loss_fn
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parts import PREFERENCES
from jaxfb.types import LossOutput, Sum, outer_params

ROWS, SEQ, VOCAB, TOP = 8, 8, 16, 3
CONFIG = TransformerConfig(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, mlp_size=12, vocab_size=VOCAB, loss_chunk=7
)
TEMPERATURE = 0.8


def _policy(name, mode, **settings):
    scale = 5.0 if mode.endswith("norm") else None
    clips = {"clip_low": 0.1, "clip_high": 0.2} if name in ("gspo", "geo_mean") else {}
    return PolicyLoss(make_surrogate(name, **clips), mode, scale=scale, **settings)


def _product():
    """Every surrogate x aggregation, KL and entropy under every aggregation, every preference loss."""
    losses = {f"{name} {mode}": _policy(name, mode) for name in SURROGATES for mode in AGGREGATIONS}
    for mode, estimator in zip(AGGREGATIONS, ("k1", "k2", "k3", "abs", "k3+"), strict=True):
        losses[f"terms {mode}"] = _policy("ppo", mode, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1)
    losses |= {kind: PreferenceLoss(kind, beta=0.5, sft_coef=0.2) for kind in PREFERENCES}
    return losses


def _pairwise():
    """Every surrogate once, every aggregation once or twice."""
    losses = {name: _policy(name, AGGREGATIONS[i % 5]) for i, name in enumerate(SURROGATES)}
    losses["terms"] = _policy("ppo", "seq-mean-token-mean", kl_coef=0.3, kl_estimator="k3+", entropy_coef=0.1)
    losses["sft"] = SFTLoss()
    losses["dpo"] = PreferenceLoss(beta=0.5, sft_coef=0.2)
    losses["simpo"] = PreferenceLoss(reference_free=True, length_normalized=True, margin=0.3)
    return losses


class Together:
    """All of them, each with a coefficient of its own."""

    def __init__(self, losses):
        self._losses = losses

    def __call__(self, log_probs, entropy, microbatch):
        terms, metrics = {}, {}
        for number, (name, loss) in enumerate(self._losses.items()):
            out = loss(log_probs, entropy, microbatch)
            for key, term in out.terms.items():
                terms[f"{name} {key}"] = Sum((1 + number / 7) * term.total, term.weight)
            metrics |= {f"{name} {key}": metric for key, metric in out.metrics.items()}
        return LossOutput(terms, metrics)


PAIRWISE, PRODUCT = Together(_pairwise()), Together(_product())
FEW = Together({name: _pairwise()[name] for name in ("ppo", "gspo", "geo_mean", "terms")})
MODELS = {
    loss: policy_loss_fn(transformer(CONFIG), loss, temperature=TEMPERATURE)
    for loss in (PAIRWISE, PRODUCT, FEW)
}
CRITIC = value_loss_fn(
    transformer(replace(CONFIG, tied_embeddings=True)),
    ValueLoss(clip=0.1, aggregation="seq-mean-token-mean"),
)
TOP_STUDENT = distillation_loss_fn(transformer(CONFIG), DistillationLoss("reverse"), temperature=TEMPERATURE)
FULL_STUDENT = distillation_loss_fn(
    transformer(CONFIG), DistillationLoss(aggregation="seq-mean-token-mean"), temperature=TEMPERATURE
)


@cache
def _params():
    return init_params(CONFIG, jax.random.key(0), jnp.float64)


@cache
def _critic_params():
    params = critic_params(_params())
    return params | {"value_head": {"kernel": 0.1 + jnp.arange(8.0) / 8, "bias": jnp.float64(0.2)}}


@cache
def _batch():
    """Pairs packed in rows; row 3 counts nothing, row 5 only in its first sequence; NaN where nothing counts."""
    rng = np.random.default_rng(1)
    first = rng.integers(2, SEQ - 2, (ROWS, 1))
    segments = np.where(np.arange(SEQ) < first, 1, 2)
    segments[:, -1] = rng.integers(0, 2, ROWS) * segments[:, -1]
    mask = (rng.random((ROWS, SEQ)) > 0.3) * (segments > 0) * 1.0
    mask[3], mask[5] = 0, mask[5] * (segments[5] == 1)
    around = lambda centre: centre + 0.4 * rng.normal(size=(ROWS, SEQ))  # noqa: E731
    floats = {
        "old_log_probs": around(-2.8),
        "ref_log_probs": around(-2.8),
        "advantages": around(0),
        "rollout_weights": np.exp(around(0)),
        "returns": around(0.5),
        "old_values": around(0.5),
    }
    start = np.where(np.arange(SEQ) < first, 0, first)
    return {
        "tokens": rng.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32),
        "targets": np.where(mask > 0, rng.integers(0, VOCAB, (ROWS, SEQ)), -100).astype(np.int32),
        "segments": segments.astype(np.int32),
        "positions": (np.arange(SEQ) - start).astype(np.int32),
        "loss_mask": mask,
    } | {name: np.where(mask > 0, leaf, np.nan) for name, leaf in floats.items()}


@cache
def _ragged():
    """One sequence a row, of 2 to SEQ tokens; row 3 counts nothing."""
    rng = np.random.default_rng(2)
    inside = np.arange(SEQ) < rng.integers(2, SEQ + 1, (ROWS, 1))
    mask = inside * (rng.random((ROWS, SEQ)) > 0.3) * 1.0
    mask[3] = 0
    leaves = ("tokens", "old_log_probs", "ref_log_probs", "advantages", "rollout_weights")
    numbers = {name: np.nan_to_num(_batch()[name], nan=-1.5) for name in leaves}
    targets = np.where(mask > 0, np.maximum(_batch()["targets"], 0), -100).astype(np.int32)
    return numbers | {"targets": targets, "segments": inside.astype(np.int32), "loss_mask": mask}


@cache
def _taught():
    """The batch with a teacher's log-probs of the whole vocabulary."""
    teacher = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (ROWS, SEQ, VOCAB), jnp.float64))
    return _batch() | {"teacher_log_probs": np.where(_batch()["loss_mask"][..., None] > 0, teacher, np.nan)}


@cache
def _taught_top():
    teacher = _taught()["teacher_log_probs"]
    ids = np.argsort(teacher, axis=-1)[..., ::-1][..., :TOP].astype(np.int32)
    top = np.take_along_axis(teacher, ids, axis=-1)
    ids[..., -1] = np.where(np.arange(SEQ) % 2, -1, ids[..., -1])  # some positions have one fewer
    return _batch() | {"teacher_log_probs": top, "teacher_ids": ids}


def _plain_policy(loss):
    def plain(params, batch):
        targets = jnp.maximum(batch["targets"], 0)
        return loss(*log_probs_of_logits(logits(CONFIG, params, batch), targets, TEMPERATURE), batch)

    return plain


def _plain_values(params, batch):
    model, head = transformer(replace(CONFIG, tied_embeddings=True)), params["value_head"]
    body = {name: leaf for name, leaf in params.items() if name != "value_head"}
    hidden = model.unembed(outer_params(body), hidden_states(model, body, batch)).hidden
    return hidden @ head["kernel"] + head["bias"]


def _plain_critic(params, batch):
    return ValueLoss(clip=0.1, aggregation="seq-mean-token-mean")(_plain_values(params, batch), batch)


def _plain_student(params, batch):
    """Both distillation losses from all the logits."""
    log_p = jax.nn.log_softmax(logits(CONFIG, params, batch) / TEMPERATURE)
    teacher = jnp.where(batch["loss_mask"][..., None] > 0, batch["teacher_log_probs"], -9.0)
    if "teacher_ids" not in batch:
        kl = (jnp.exp(teacher) * (teacher - log_p)).sum(-1)
        return DistillationLoss(aggregation="seq-mean-token-mean").of_kl(kl, batch)
    ids = batch["teacher_ids"]
    there = ids != -1
    student = jnp.take_along_axis(log_p, jnp.maximum(ids, 0), axis=-1)
    rest_s, rest_t = (1 - jnp.where(there, jnp.exp(x), 0).sum(-1) for x in (student, teacher))
    kl = jnp.where(there, jnp.exp(student) * (student - teacher), 0).sum(-1)
    kl += rest_s * (jnp.log(rest_s) - jnp.log(rest_t))
    return DistillationLoss().of_kl(kl, batch)


KINDS_OF_LOSS = {
    "policy": (MODELS[PAIRWISE], _plain_policy(PAIRWISE), _params, _batch),
    "product": (MODELS[PRODUCT], _plain_policy(PRODUCT), _params, _batch),
    "rows": (MODELS[FEW], _plain_policy(FEW), _params, _ragged),
    "critic": (CRITIC, _plain_critic, _critic_params, _batch),
    "top": (TOP_STUDENT, _plain_student, _params, _taught_top),
    "full": (FULL_STUDENT, _plain_student, _params, _taught),
}


@cache
def _one_device(kind):
    """(loss, LossOutput), gradient of the whole batch, without an engine."""
    _, plain, params, batch = KINDS_OF_LOSS[kind]
    whole = batch()

    def objective(params):
        out = plain(params, whole)
        return sum(term.value for term in out.terms.values()), out

    return jax.jit(jax.value_and_grad(objective, has_aux=True))(params())


def _engine(kind, mesh, rows_per_microbatch=None, budget=None, **how):
    model, _, params, batch = KINDS_OF_LOSS[kind]
    size = int(np.prod(list(mesh.values()) or [1]))
    mesh = jaxfb.make_mesh(**mesh, devices=jax.devices()[:size])
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    cut = budget or {"rows_per_microbatch": rows_per_microbatch}
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, **cut)
    return jaxfb.get_forward_backward_func(mesh, **how)(model, params(), batch(), plan)


def _check(kind, mesh, rows_per_microbatch=None, **how):
    (loss, expected), grads = _one_device(kind)
    out = _engine(kind, mesh, rows_per_microbatch, **how)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    for name, term in expected.terms.items():
        np.testing.assert_allclose(out.terms[name].value, term.value, rtol=1e-12, atol=1e-13, err_msg=name)
    for name, metric in expected.metrics.items():
        np.testing.assert_allclose(
            np.asarray(out.metrics[name]), metric.value, rtol=1e-12, atol=1e-13, err_msg=name
        )
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(out.grads), jax.tree.leaves(grads), strict=True
    ):
        atol = 1e-12 * float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_a_pipeline_with_its_vocabulary_cut_and_its_sequences_too():
    _check("policy", {"pipe": 2, "context": 2}, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["critic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("top", "full"))]
)
def test_other_heads_in_microbatches_of_two_replicas(kind):
    _check(kind, {"data": 2}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_token_budgets_and_packing(packing):
    """Rows sorted by length into microbatches of at most 16 tokens on each of two replicas, several in an array row."""
    budget = {"max_tokens_per_microbatch": 16, "sequence_length": SEQ, "packing": packing}
    _check("rows", {"data": 2}, budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, rows, how",
    [
        ({}, 8, {}),
        ({}, 1, {}),
        ({"data": 4}, 1, {}),
        ({"data": 2, "fsdp": 2}, 2, {}),
        ({"context": 2, "tensor": 2}, 4, {}),
        ({"pipe": 2, "tensor": 2}, 2, {"schedule": "zero_bubble"}),
        ({"pipe": 2, "data": 2}, 2, {"head_placement": "rows"}),
    ],
)
def test_everywhere(mesh, rows, how):
    _check("policy", mesh, rows, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["product", "critic", "top", "full"])
def test_every_loss_and_aggregation_on_a_pipeline_with_its_vocabulary_cut_and_its_sequences_too(kind):
    _check(kind, {"pipe": 2, "context": 2}, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["critic", "top", "full"])
def test_other_heads_with_a_vocabulary_cut_over_two_axes(kind):
    _check(kind, {"pipe": 2, "tensor": 2}, 4)


@pytest.mark.slow
def test_forward_only_gives_log_probs_and_values_in_row_order():
    """On a pipeline whose sequences are cut as well, with purposes of their own."""
    mesh = jaxfb.make_mesh(pipe=2, context=2, devices=jax.devices()[:4])
    fb = jaxfb.get_forward_backward_func(mesh)
    mask = _batch()["loss_mask"]
    plan = jaxfb.BatchPlan(purpose="logprob_old", rows=ROWS, rows_per_microbatch=4)
    out = fb(
        log_prob_fn(transformer(CONFIG), temperature=TEMPERATURE),
        _params(),
        _batch(),
        plan,
        forward_only=True,
    )
    plain = log_probs_of_logits(
        logits(CONFIG, _params(), _batch()), jnp.maximum(_batch()["targets"], 0), TEMPERATURE
    )
    for ours, theirs in zip((out.outputs["log_probs"], out.outputs["entropy"]), plain, strict=True):
        np.testing.assert_allclose(ours, np.where(mask > 0, theirs, 0), rtol=0, atol=1e-12)
    model = transformer(replace(CONFIG, tied_embeddings=True))
    plan = jaxfb.BatchPlan(purpose="value", rows=ROWS, rows_per_microbatch=4)
    values = fb(value_fn(model), _critic_params(), _batch(), plan, forward_only=True).outputs["values"]
    expected = np.where(mask > 0, _plain_values(_critic_params(), _batch()), 0)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
