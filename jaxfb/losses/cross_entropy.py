"""Softmax cross entropy over a large vocabulary, a chunk of tokens at a time.

Part of the head in forward_backward: [tokens, vocab] logits never exist whole, neither forward nor
backward; their gradient does, in the compute dtype, where it is small (`gradients_by_chunk`). The loss is a sum, so its
gradient is known as soon as a chunk's logits are: the differentiated forward pass makes the gradients at once (6
instead of 8 multiplications per weight and token; Liger, arXiv:2410.10989) and the backward pass only scales them. With
regularizers there are several sums, whose cotangents only the backward knows: then it runs the loop, logits included (8
multiplications, one gradient).

The vocabulary may be split over the automatic `tensor` axis, and over one manual axis besides (a pipeline's
stages, each with its share of the head); sums over the manual axis are written here.

Shapes: T = tokens in a chunk, D = width, V = vocabulary, or this device's share of it.
Dtypes: logits, softmax, sums and the accumulated gradients are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.cross_entropy_by_parts import (
    gradients_in_parts,
    scores_and_residuals,
    scores_in_parts,
)
from jaxfb.losses.vocabulary.cross_entropy_by_shares import gradients_by_shares, scores_by_shares
from jaxfb.losses.vocabulary.logits import (
    capped_slope,
    cut_tokens,
    gradients_by_chunk,
    join_tokens,
    largest,
    project,
    sum_dtype,
    summed,
    token_ids,
    vocab_size,
)
from jaxfb.losses.vocabulary.part_scores import Head, Scores
from jaxfb.parallel.shares import Shares, shares_of
from jaxfb.parallel.table import Table, pays
from jaxfb.platforms.compat import custom_vjp


class CrossEntropy(NamedTuple):
    """Sums over the counted tokens of a microbatch. The loss, smoothing and z sums can be differentiated.

    loss_sum:      f32[], sum of mask * -log p(target).
    correct_sum:   f32[], sum of mask over tokens whose likeliest token is the target.
    log_probs:     f32[rows, seq], log p(target), 0 where the mask is 0.
    smoothing_sum: f32[], sum of mask * (log p(target) - mean over the vocabulary of log p); None unless asked
      for. loss_sum + a * smoothing_sum is the loss against targets smoothed by a (arXiv:1512.00567).
    z_sum:         f32[], sum of mask * (log of the softmax's normalizer)^2 (arXiv:2204.02311); None likewise.
    """

    loss_sum: jax.Array
    correct_sum: jax.Array
    log_probs: jax.Array
    smoothing_sum: jax.Array | None = None
    z_sum: jax.Array | None = None


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array | Table,
    targets: jax.Array,
    loss_mask: jax.Array,
    *,
    chunk: int = 1024,
    axis: str | None = None,
    logit_softcap: float | None = None,
    regularizers: bool = False,
) -> CrossEntropy:
    """Computes cross entropy of `softmax(hidden @ kernel)` against `targets`, with `chunk` rows of logits at a time.

    Equals `-sum(mask * log_softmax(hidden @ kernel)[targets])`. Where the mask is 0 nothing counts: NaN in
    `hidden` and targets outside the vocabulary (-100) are inert, in the gradient too.

    Args:
      hidden: float[rows, seq, width].
      kernel: float[width, vocab/tensor], or a `Table` of it or of its transpose, of which a share or a part at a
        time is gathered where that takes less memory.
      targets: i32[rows, seq].
      loss_mask: float[rows, seq], weight of each token; no gradient flows to it.
      chunk: tokens whose logits exist at one time.
      axis: a manual mesh axis over which `kernel` is cut as well: float[width, vocab/axis/tensor]. The other
        arguments, the results and the gradient of `hidden` are then equal on all its devices.
      logit_softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118); None: as they are.
      regularizers: sums up label smoothing and z-loss too.
    Returns:
      CrossEntropy.
    """
    loss_mask = lax.stop_gradient(loss_mask).astype(sum_dtype(hidden))
    if isinstance(kernel, Table) and (regularizers or not pays(targets.size, hidden.shape[-1], kernel.dtype)):
        kernel = kernel.as_head(kernel.whole())
    head = Head(chunk, axis, logit_softcap, regularizers)
    run = _in_shards if isinstance(kernel, Table) else _cross_entropy
    sums, correct, log_probs = run(hidden, kernel, targets, loss_mask, head)
    counted = loss_mask != 0
    correct_sum = jnp.sum(jnp.where(counted & correct, loss_mask, 0))
    log_probs = lax.stop_gradient(jnp.where(counted, log_probs, 0))
    return CrossEntropy(sums.loss, correct_sum, log_probs, sums.smoothing, sums.z)


class _Sums(NamedTuple):
    """The differentiable sums, or the cotangents of them; None for those that were not asked for."""

    loss: Any
    smoothing: Any = None
    z: Any = None


@custom_vjp(4)
def _cross_entropy(hidden, kernel, targets, mask, head: Head):
    return _summed_up(hidden, kernel, targets, mask, head)


def _cross_entropy_forward(hidden, kernel, targets, mask, head):
    if head.regularizers:
        return _summed_up(hidden, kernel, targets, mask, head), (hidden, kernel, targets, mask)
    out, grads = _with_gradients(hidden, kernel, targets, mask, head, _Sums(1.0))
    return out, (grads, *jax.tree.map(_like, (hidden, kernel)))


def _cross_entropy_backward(head, residuals, cotangents):
    if head.regularizers:
        hidden, kernel, targets, mask = residuals
        scale = jnp.max(jnp.abs(jnp.stack(cotangents[0])))
        seeds = jax.tree.map(lambda cotangent: cotangent / jnp.where(scale > 0, scale, 1), cotangents[0])
        (hidden_grad, kernel_grad) = _with_gradients(hidden, kernel, targets, mask, head, seeds)[1]
    else:
        (hidden_grad, kernel_grad), hidden, kernel = residuals
        scale = cotangents[0].loss
    return (scale * hidden_grad).astype(hidden.dtype), (scale * kernel_grad).astype(kernel.dtype), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _in_shards(hidden, table, targets, mask, head):
    """Scores with a head of which no device has all: by shares, or in parts where those are better."""
    shares = shares_of(table, targets.size)
    given = hidden, table, targets, mask, head
    return _in_parts(*given) if shares is None else _by_shares(*given, shares)


@custom_vjp(4)
def _in_parts(hidden, table: Table, targets, mask, head: Head):
    return _collect(scores_in_parts(hidden, table, targets, head), mask)


def _in_parts_forward(hidden, table, targets, mask, head):
    scores, kept = scores_and_residuals(hidden, table, targets, head)
    return _collect(scores, mask), (hidden, table, targets, mask, kept)


def _in_parts_backward(head, residuals, cotangents):
    hidden, table, targets, mask, kept = residuals
    grads = gradients_in_parts(hidden, table, targets, mask, kept, head, cotangents[0].loss)
    return *grads, None, None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward)


@custom_vjp(4, 5)
def _by_shares(hidden, table: Table, targets, mask, head: Head, shares: Shares):
    return _by_shares_forward(hidden, table, targets, mask, head, shares)[0]


def _by_shares_forward(hidden, table, targets, mask, head, shares):
    scores, kept = scores_by_shares(hidden, table, targets, mask, head, shares)
    return _collect(scores, mask), (table, mask, kept)


def _by_shares_backward(head, shares, residuals, cotangents):
    table, mask, kept = residuals
    return *gradients_by_shares(table, mask, kept, head, cotangents[0].loss, shares), None, None


_by_shares.defvjp(_by_shares_forward, _by_shares_backward)


def _summed_up(hidden, kernel, targets, mask, head):
    """Returns (_Sums, correct [rows, seq], log_probs [rows, seq])."""

    def step(tokens):
        hidden, targets = tokens
        return _score(project(hidden, kernel, head.softcap), targets, head)

    return _collect(lax.map(step, cut_tokens(head.chunk, hidden, targets)), mask)


def _with_gradients(hidden, kernel, targets, mask, head, seeds: _Sums):
    """Returns the same, and the gradients of both factors for these cotangents of the sums, in the sums' dtype."""

    def logits_grad(hidden, targets, mask):
        logits = project(hidden, kernel, head.softcap)
        scores = _score(logits, targets, head)
        return _logits_grad(logits, scores.normalizer, targets, mask, head, seeds), scores

    hidden_grad, kernel_grad, scores = gradients_by_chunk(
        logits_grad, hidden, mask != 0, kernel, (targets, mask), chunk=head.chunk, axis=head.axis
    )
    return _collect(scores, mask), (hidden_grad, kernel_grad)


def _score(logits, targets, head) -> Scores:
    """Scores logits [T, V] against targets [T]; correct: is the target the first of the likeliest tokens.

    Compares an iota with the target instead of gathering, so a vocabulary split over devices stays split; meets the
    other devices twice, once for the maxima and once for the sums. The maxima before and after the target are enough to
    see whether it is likeliest, so the logits are read twice: for the maxima and for the softmax's sum.
    """
    ids, target = token_ids(logits, targets.dtype, head.axis), targets[:, None]
    parts = [jnp.where(part, logits, -jnp.inf) for part in (ids < target, ids == target, ids > target)]
    before, target_logit, after = largest(jnp.stack([jnp.max(x, axis=-1) for x in parts]), head.axis)
    top = jnp.maximum(jnp.maximum(before, target_logit), after)
    summands = [jnp.exp(logits - top[:, None])] + ([logits] if head.regularizers else [])
    total, *all_logits = summed(jnp.stack([jnp.sum(x, axis=-1) for x in summands]), head.axis)
    mean = all_logits[0] / vocab_size(logits, head.axis) if all_logits else None
    likeliest = (target_logit > before) & (target_logit >= after)
    return Scores(top + jnp.log(total), target_logit, likeliest, mean)


def _logits_grad(logits, normalizer, targets, mask, head, seeds: _Sums):
    """Computes d(sum of seed * sum) / d(hidden @ kernel), float32[T, V]; for the loss, mask * (softmax -
    one_hot(target)).
    """
    vocab = token_ids(logits, targets.dtype, head.axis)
    softmax, target = jnp.exp(logits - normalizer[:, None]), vocab == targets[:, None]
    grad = seeds.loss * (softmax - target)
    if head.regularizers:
        grad += seeds.smoothing * (target - 1 / vocab_size(logits, head.axis))
        grad += seeds.z * 2 * normalizer[:, None] * softmax
    return mask[:, None] * grad * capped_slope(logits, head.softcap)


def _collect(scores: Scores, mask):
    scores = jax.tree.map(lambda leaf: join_tokens(leaf, mask.shape), scores)
    total = lambda per_token: jnp.sum(jnp.where(mask != 0, mask * per_token, 0))  # noqa: E731
    log_probs = scores.target_logit - scores.normalizer
    sums = _Sums(-total(log_probs))
    if scores.mean_logit is not None:
        sums = _Sums(sums.loss, total(scores.target_logit - scores.mean_logit), total(scores.normalizer**2))
    return sums, scores.correct, log_probs


def _like(x):
    """Returns an empty array that remembers x's dtype."""
    return jnp.zeros((0,), x.dtype)
