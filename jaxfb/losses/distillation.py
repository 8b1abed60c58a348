"""Distillation: the student's distribution at each position is drawn to the teacher's.

Used in the head of forward_backward through `distillation_loss_fn`. The teacher is given either by its K likeliest
tokens (leaves `teacher_ids` i32[rows, seq, K], -1 for none, and `teacher_log_probs` f32[rows, seq, K]) or by the whole
vocabulary (`teacher_log_probs` f32[rows, seq, vocab] alone). Of the student, [tokens, vocab] never exists whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfb.losses.aggregation import aggregate, check_aggregation
from jaxfb.losses.heads import unembed_of, with_head
from jaxfb.losses.policy import mean_metric, microbatch_leaf
from jaxfb.losses.sequences import Sequences
from jaxfb.losses.settings import check_not_negative, check_word
from jaxfb.losses.token_log_probs import check_temperature, token_log_probs
from jaxfb.losses.vocabulary.full_kl import full_kl
from jaxfb.refusal import boolean, instance
from jaxfb.types import LossOutput, Pipelined, Unembedding

DIRECTIONS = ("forward", "reverse")
_SMALLEST = 1e-12


@dataclass(frozen=True)
class DistillationLoss:
    """Computes coef * KL between teacher t and student s at each counted token, aggregated.

        forward   sum t (log t - log s)   covers all that the teacher may produce (arXiv:1503.02531)
        reverse   sum s (log s - log t)   keeps to what it is likely to produce (arXiv:2306.08543)

    With the K likeliest tokens the rest of the vocabulary is one more outcome, so that the KL is a true one, of the
    coarser distribution: never negative, at most the full one, 0 where both agree. rest=False leaves that
    outcome out: then it is only the sum over the K tokens. A token to which the teacher gives -inf adds nothing to the
    forward KL; the reverse one needs finite log-probs.

    Returns LossOutput with the term "distillation", and the metrics distillation_kl (without coef) and
    student_mass (the student's probability of the K tokens).
    """

    direction: str = "forward"
    rest: bool = True
    coef: float = 1.0
    aggregation: str = "token-mean"
    scale: float | None = None

    def __post_init__(self):
        check_word("distillation", "direction", self.direction, DIRECTIONS)
        boolean("rest", self.rest, who="[distillation]")
        check_aggregation(self.aggregation, self.scale)
        check_not_negative("distillation", 1.0, coef=self.coef)

    def of_top(self, log_probs: jax.Array, teacher_ids: jax.Array, microbatch: Mapping) -> LossOutput:
        """Computes the loss from the student's log-probs of the teacher's tokens, float[rows, seq, K]."""
        there = (teacher_ids != -1) & (microbatch["loss_mask"] != 0)[..., None]
        teacher = jnp.where(there, microbatch_leaf(microbatch, "teacher_log_probs", 3), -jnp.inf)
        student = jnp.where(there, log_probs, -jnp.inf)
        mass = jnp.exp(student).sum(-1)
        kl = self._sum(teacher, student, there)
        if self.rest:
            of_teacher, of_student = _log_rest(jnp.exp(teacher).sum(-1)), _log_rest(mass)
            kl += self._sum(of_teacher[..., None], of_student[..., None], jnp.ones_like(there[..., :1]))
        metrics = {"student_mass": mean_metric(mass, Sequences.of(microbatch))}
        return self.of_kl(kl, microbatch, metrics)

    def of_kl(self, kl: jax.Array, microbatch: Mapping, metrics: dict | None = None) -> LossOutput:
        """Computes the loss from the KL at each token, float[rows, seq]."""
        sequences = Sequences.of(microbatch)
        term = aggregate(self.coef * kl, sequences, self.aggregation, scale=self.scale)
        metrics = {"distillation_kl": mean_metric(kl, sequences)} | (metrics or {})
        return LossOutput({"distillation": term}, metrics)

    def _sum(self, teacher: jax.Array, student: jax.Array, there: jax.Array) -> jax.Array:
        """Sums p (log p - log q) over the tokens that are there; one with p = 0 adds nothing, its log is -inf."""
        p, q = (teacher, student) if self.direction == "forward" else (student, teacher)
        there &= p > -jnp.inf
        p, q = jnp.where(there, p, 0), jnp.where(there, q, 0)
        return jnp.sum(jnp.where(there, jnp.exp(p) * (p - q), 0), axis=-1)


def distillation_loss_fn(
    model: Pipelined, loss: DistillationLoss | None = None, *, temperature: float = 1.0
) -> Pipelined:
    """Returns `model` with a distillation loss; a microbatch with `teacher_ids` has the K likeliest tokens.

    temperature: of the student's logits; the teacher's log-probs come with theirs.
    Raises:
      ValueError: the model offers no `unembed`, or temperature is not positive.
    """
    unembed_of(model)
    check_temperature(temperature)
    loss = DistillationLoss() if loss is None else loss
    instance("loss", loss, DistillationLoss, "a jaxfb.DistillationLoss", who="[distillation]")

    def head_loss(unembedding: Unembedding, microbatch: Mapping, axis: str | None) -> LossOutput:
        how = {
            "chunk": unembedding.chunk,
            "axis": axis,
            "logit_softcap": unembedding.softcap,
            "temperature": temperature,
        }
        factors, mask = (unembedding.hidden, unembedding.kernel), microbatch["loss_mask"]
        if "teacher_ids" in microbatch:
            ids = microbatch["teacher_ids"]
            return loss.of_top(token_log_probs(*factors, ids, mask, **how).log_probs, ids, microbatch)
        teacher = microbatch_leaf(microbatch, "teacher_log_probs", 3)
        kl = full_kl(*factors, teacher, mask, reverse=loss.direction == "reverse", **how)
        return loss.of_kl(kl, microbatch)

    return with_head(model, head_loss)


def _log_rest(mass: jax.Array) -> jax.Array:
    """Computes log(1 - mass), the probability outside of the K tokens; bounded where that is only rounding."""
    return jnp.log(jnp.maximum(1 - mass, _SMALLEST))
