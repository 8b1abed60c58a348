"""The KL to a teacher is the formula's: over the K likeliest tokens with and without the rest, and over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.distillation import DistillationLoss, distillation_loss_fn
from jaxfb.types import Pipelined, Unembedding

ROWS, SEQ, VOCAB, TOP, WIDTH = 2, 4, 9, 3, 5
TEMPERATURE = 0.7
MASK = np.array([[1.0, 1, 0, 1], [1, 0, 1, 1]])


def _log_probs(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _teacher_and_student():
    """Log-probs [rows, seq, vocab] of both."""
    return _log_probs(np.random.default_rng(0).normal(size=(2, ROWS, SEQ, VOCAB)))


def _of_top(loss, teacher, student, ids):
    """The mean KL, and all metrics, with NaN wherever nothing counts."""
    counted = (ids >= 0) & (MASK > 0)[..., None]
    teacher, student = (
        np.where(counted, np.take_along_axis(x, np.maximum(ids, 0), -1), np.nan) for x in (teacher, student)
    )
    out = loss.of_top(student, ids, {"loss_mask": MASK, "teacher_log_probs": teacher})
    return out.terms["distillation"].value, {name: x.value for name, x in out.metrics.items()}


def _likeliest(teacher):
    """The K likeliest, of which one position has one fewer."""
    ids = np.argsort(-teacher, axis=-1)[..., :TOP]
    ids[0, 1, -1] = -1
    return ids


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("rest", [True, False])
def test_kl_over_the_likeliest_tokens_is_the_formula(direction, rest):
    teacher, student = _teacher_and_student()
    ids, kls, masses = _likeliest(teacher), [], []
    for row, place in np.argwhere(MASK > 0):
        picked = [i for i in ids[row, place] if i >= 0]
        t, s = (np.exp(x[row, place, picked]) for x in (teacher, student))
        masses.append(s.sum())
        if rest:
            t, s = np.append(t, 1 - t.sum()), np.append(s, 1 - s.sum())
        p, q = (t, s) if direction == "forward" else (s, t)
        kls.append((p * np.log(p / q)).sum())
    loss = DistillationLoss(direction, rest, coef=0.5)
    ours, metrics = _of_top(loss, teacher, student, ids)
    np.testing.assert_allclose(ours, 0.5 * np.mean(kls), rtol=1e-12)
    np.testing.assert_allclose(metrics["distillation_kl"], np.mean(kls), rtol=1e-12)
    np.testing.assert_allclose(metrics["student_mass"], np.mean(masses), rtol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_kl_with_the_rest_lies_between_0_and_that_over_all_tokens(direction):
    teacher, student = _teacher_and_student()
    loss, ids = DistillationLoss(direction), _likeliest(teacher)
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    over_all = (np.exp(p) * (p - q)).sum(-1)[MASK > 0].mean()
    assert 0.01 < _of_top(loss, teacher, student, ids)[0] < over_all
    assert abs(_of_top(loss, teacher, teacher, ids)[0]) < 1e-12


@pytest.mark.parametrize("rest", [True, False])
def test_a_token_that_the_teacher_never_gives_adds_nothing_to_the_forward_kl(rest):
    """As in the KL over all tokens; the student's probability of it still is no part of the rest."""
    teacher, student = _teacher_and_student()
    ids = np.argsort(-teacher, axis=-1)[..., :TOP]
    never = np.where(np.arange(VOCAB) == ids[..., 1:2], -np.inf, teacher)

    t, s = (np.take_along_axis(np.exp(x), ids, -1) for x in (never, student))
    if rest:
        t, s = (np.append(x, 1 - x.sum(-1, keepdims=True), axis=-1) for x in (t, s))
    kl = np.where(t > 0, t * np.log(np.where(t > 0, t, 1) / s), 0).sum(-1)[MASK > 0].mean()
    ours, _ = _of_top(DistillationLoss(rest=rest), never, student, ids)
    np.testing.assert_allclose(ours, kl, rtol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_model_is_compared_with_all_tokens_of_its_teacher(direction):
    """All given one by one, or as the whole vocabulary: the KL of softmax(logits / temperature) either way."""
    teacher, _ = _teacher_and_student()
    rng = np.random.default_rng(1)
    hidden, kernel = rng.normal(size=(ROWS, SEQ, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    student = _log_probs(hidden @ kernel / TEMPERATURE)
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    expected = (np.exp(p) * (p - q)).sum(-1)[MASK > 0].mean()
    model = Pipelined(*[None] * 3, unembed=lambda outer, hidden: Unembedding(hidden, outer["head"], chunk=3))
    head = distillation_loss_fn(model, DistillationLoss(direction), temperature=TEMPERATURE).head
    every = {"teacher_ids": jnp.broadcast_to(jnp.arange(VOCAB, dtype=jnp.int32), teacher.shape)}
    for leaves in ({}, every):
        microbatch = {"loss_mask": MASK, "teacher_log_probs": teacher} | leaves
        out = jax.jit(head)({"head": kernel}, hidden, microbatch, None)
        # a rest of 0 is known to 1e-12
        np.testing.assert_allclose(out.terms["distillation"].value, expected, rtol=0, atol=1e-9)
