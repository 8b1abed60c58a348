"""KL to a distribution over the whole vocabulary, a chunk of tokens at a time, with its gradient.

Shapes: T = tokens in a chunk, V = vocabulary, or this device's share of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import (
    capped_slope,
    cut_tokens,
    gradients_by_chunk,
    join_tokens,
    largest,
    project,
    sum_dtype,
    summed,
)
from jaxfb.parallel.tensor import constrain
from jaxfb.platforms.compat import custom_vjp


def full_kl(
    hidden: jax.Array,
    kernel: jax.Array,
    teacher_log_probs: jax.Array,
    loss_mask: jax.Array,
    *,
    reverse: bool = False,
    chunk: int = 1024,
    axis: str | None = None,
    logit_softcap: float | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Computes KL(teacher || student), or KL(student || teacher) if `reverse`, at each position: f32[rows, seq].

    The student is softmax(capped(hidden @ kernel) / temperature). 0 where the mask is 0, which makes NaN there inert.

    Args:
      hidden: float[rows, seq, width].
      kernel: float[width, vocab/tensor], cut over `axis` as well if that is given.
      teacher_log_probs: float[rows, seq, vocab], of the whole vocabulary; finite if `reverse`. No gradient.
      loss_mask: float[rows, seq]; only whether it is 0 matters.
      others: as in `token_log_probs`.
    """
    how = _How(reverse, chunk, axis, logit_softcap, temperature)
    return _full_kl(hidden, kernel, lax.stop_gradient(teacher_log_probs), loss_mask != 0, how)


class _How(NamedTuple):
    reverse: bool
    chunk: int
    axis: str | None
    softcap: float | None
    temperature: float


@custom_vjp(4)
def _full_kl(hidden, kernel, teacher, counted, how: _How):
    def step(tokens):
        hidden, teacher, counted = tokens
        return _kl(*_log_probs(hidden, kernel, how)[1:], _own(teacher, kernel, how), how)

    kl = join_tokens(lax.map(step, cut_tokens(how.chunk, hidden, teacher, counted)), counted.shape)
    return jnp.where(counted, kl, 0)


def _forward(hidden, kernel, teacher, counted, how):
    return _full_kl(hidden, kernel, teacher, counted, how), (hidden, kernel, teacher, counted)


def _backward(how, residuals, cotangent):
    hidden, kernel, teacher, counted = residuals
    scale = jnp.max(jnp.where(counted, jnp.abs(cotangent), 0))
    seeds = jnp.where(scale > 0, cotangent / jnp.where(scale > 0, scale, 1), 0)

    def logits_grad(hidden, teacher, seed):
        logits, log_p, p = _log_probs(hidden, kernel, how)
        teacher = _own(teacher, kernel, how)
        if how.reverse:
            grad = p * (log_p - teacher - _kl(log_p, p, teacher, how)[:, None])
        else:
            t = jnp.exp(teacher)
            grad = p * summed(t.sum(-1), how.axis)[:, None] - t
        return seed[:, None] * grad * capped_slope(logits, how.softcap) / how.temperature, None

    hidden_grad, kernel_grad, _ = gradients_by_chunk(
        logits_grad, hidden, counted, kernel, (teacher, seeds), chunk=how.chunk, axis=how.axis
    )
    return (scale * hidden_grad).astype(hidden.dtype), (scale * kernel_grad).astype(kernel.dtype), None, None


_full_kl.defvjp(_forward, _backward)


def _log_probs(hidden, kernel, how):
    """Returns (capped logits, log p, p), all [T, V]."""
    capped = project(hidden, kernel, how.softcap)
    logits = capped / how.temperature
    top = largest(jnp.max(logits, axis=-1, keepdims=True), how.axis)
    total = summed(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True), how.axis)
    log_p = logits - top - jnp.log(total)
    return capped, log_p, jnp.exp(log_p)


def _own(teacher, kernel, how):
    """Returns the teacher's log-probs of the tokens of which this device has the logits: [T, V]."""
    share = kernel.shape[1]
    if how.axis is not None:
        teacher = lax.dynamic_slice_in_dim(teacher, lax.axis_index(how.axis) * share, share, axis=1)
    return constrain(teacher.astype(sum_dtype(kernel)), None, "tensor")


def _kl(log_p, p, teacher, how):
    """Computes KL [T]; a token to which the teacher gives -inf adds nothing to the forward KL."""
    if how.reverse:
        return summed(jnp.sum(p * (log_p - teacher), axis=-1), how.axis)
    t = jnp.exp(teacher)
    return summed(jnp.sum(jnp.where(t > 0, t * (teacher - log_p), 0), axis=-1), how.axis)
