"""Softmax cross entropy over a large vocabulary, a chunk of tokens at a time.

The head of the story's forward_backward: [tokens, vocab] logits never exist whole, neither forward nor
backward. The loss is a sum, so its gradient is known as soon as a chunk's logits are: the differentiated
forward pass makes the gradients in the same loop (6 instead of 8 multiplications per weight and token; Liger,
arXiv:2410.10989) and the backward pass only scales them.

The vocabulary may be split over the automatic `tensor` axis, and over one manual axis besides (a pipeline's
stages, each with its share of the head); sums over the manual axis are written here.

Shapes: T = tokens in a chunk, D = width, V = vocabulary, or this device's share of it.
Dtypes: logits, softmax, sums and the accumulated gradients are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.parallel.tensor import constrain

# float16 flushes the tail of a softmax to zero; a power of two is exact in every dtype.
_FLOAT16_SCALE = 1024.0


class CrossEntropy(NamedTuple):
    """Sums over the counted tokens of a microbatch. Only `loss_sum` can be differentiated.

    loss_sum:    f32[], sum of mask * -log p(target).
    correct_sum: f32[], sum of mask over tokens whose likeliest token is the target.
    log_probs:   f32[rows, seq], log p(target), 0 where the mask is 0.
    """

    loss_sum: jax.Array
    correct_sum: jax.Array
    log_probs: jax.Array


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    loss_mask: jax.Array,
    *,
    chunk: int = 1024,
    axis: str | None = None,
) -> CrossEntropy:
    """Cross entropy of `softmax(hidden @ kernel)` against `targets`, with `chunk` rows of logits at a time.

    Equals `-sum(mask * log_softmax(hidden @ kernel)[targets])`. Where the mask is 0 nothing counts: NaN in
    `hidden` and targets outside the vocabulary (-100) are inert, in the gradient too.

    Args:
      hidden: float[rows, seq, width].
      kernel: float[width, vocab/tensor].
      targets: i32[rows, seq].
      loss_mask: float[rows, seq], weight of each token; no gradient flows to it.
      chunk: tokens whose logits exist at one time.
      axis: a manual mesh axis over which `kernel` is cut as well: float[width, vocab/axis/tensor]. The other
        arguments, the results and the gradient of `hidden` are then equal on all its devices.
    Returns:
      CrossEntropy.
    """
    loss_mask = lax.stop_gradient(loss_mask).astype(_sum_dtype(hidden))
    loss_sum, correct, log_probs = _cross_entropy(hidden, kernel, targets, loss_mask, chunk, axis)
    counted = loss_mask != 0
    correct_sum = jnp.sum(jnp.where(counted & correct, loss_mask, 0))
    return CrossEntropy(loss_sum, correct_sum, lax.stop_gradient(jnp.where(counted, log_probs, 0)))


class _Tokens(NamedTuple):
    """One chunk of tokens: hidden [T, D], targets [T], mask [T]; stacked: [chunks, T, ...]."""

    hidden: jax.Array
    targets: jax.Array
    mask: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(hidden, kernel, targets, mask, chunk, axis):
    def step(tokens: _Tokens):
        _, log_probs, correct = _score(_logits(tokens.hidden, kernel), tokens.targets, axis)
        return log_probs, correct

    log_probs, correct = lax.map(step, _split(hidden, targets, mask, chunk))
    return _collect(log_probs, correct, mask)


def _cross_entropy_forward(hidden, kernel, targets, mask, chunk, axis):
    def step(kernel_grad, tokens: _Tokens):
        logits = _logits(tokens.hidden, kernel)
        normalizer, log_probs, correct = _score(logits, tokens.targets, axis)
        logits_grad = _logits_grad(logits, normalizer, tokens, axis)
        hidden_grad, added = _matmul_grads(tokens, kernel, logits_grad)
        return constrain(kernel_grad + added, None, "tensor"), (log_probs, correct, hidden_grad)

    zeros = constrain(jnp.zeros(kernel.shape, _sum_dtype(hidden)), None, "tensor")
    kernel_grad, (log_probs, correct, hidden_grad) = lax.scan(
        step, zeros, _split(hidden, targets, mask, chunk)
    )
    grads = (_summed(_join(hidden_grad, hidden.shape), axis), kernel_grad)
    return _collect(log_probs, correct, mask), (grads, _like(hidden), _like(kernel))


def _cross_entropy_backward(chunk, axis, residuals, cotangents):
    (hidden_grad, kernel_grad), hidden, kernel = residuals
    scale = cotangents[0]
    return (scale * hidden_grad).astype(hidden.dtype), (scale * kernel_grad).astype(kernel.dtype), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _logits(hidden, kernel):
    """[T, D] @ [D, V] -> float32[T, V]."""
    logits = jnp.matmul(hidden, kernel, preferred_element_type=_sum_dtype(hidden))
    return constrain(logits, None, "tensor")


def _score(logits, targets, axis):
    """[T, V], [T] -> log normaliser, log p(target), is the target the first of the likeliest tokens: all [T].

    Compares an iota with the target instead of gathering, so a vocabulary split over devices stays split.
    """
    vocab = _token_ids(logits, targets.dtype, axis)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = top if axis is None else lax.pmax(top, axis)
    normalizer = top[:, 0] + jnp.log(_summed(jnp.sum(jnp.exp(logits - top), axis=-1), axis))
    target_logits = _summed(jnp.sum(jnp.where(vocab == targets[:, None], logits, 0), axis=-1), axis)
    likeliest = jnp.min(jnp.where(logits == top, vocab, jnp.iinfo(vocab.dtype).max), axis=-1)
    likeliest = likeliest if axis is None else lax.pmin(likeliest, axis)
    return normalizer, target_logits - normalizer, likeliest == targets


def _token_ids(logits, dtype, axis):
    """The id of the token that each column of this device's logits stands for: [T, V]."""
    first = 0 if axis is None else lax.axis_index(axis).astype(dtype) * logits.shape[1]
    return lax.broadcasted_iota(dtype, logits.shape, 1) + first


def _summed(x, axis):
    return x if axis is None else lax.psum(x, axis)


def _logits_grad(logits, normalizer, tokens: _Tokens, axis):
    """d(sum of mask * -log p(target)) / d logits = mask * (softmax - one_hot(target)), float32[T, V]."""
    vocab = _token_ids(logits, tokens.targets.dtype, axis)
    softmax = jnp.exp(logits - normalizer[:, None])
    grad = tokens.mask[:, None] * (softmax - (vocab == tokens.targets[:, None]))
    return jnp.where(tokens.mask[:, None] != 0, grad, 0)


def _matmul_grads(tokens: _Tokens, kernel, logits_grad):
    """Gradients of both factors of hidden @ kernel: float32[T, D] and float32[D, V]."""
    scale = _FLOAT16_SCALE if kernel.dtype == jnp.float16 else 1.0
    grad = (logits_grad * scale).astype(kernel.dtype)
    hidden = jnp.where(tokens.mask[:, None] != 0, tokens.hidden, 0)
    matmul = partial(jnp.matmul, preferred_element_type=logits_grad.dtype)
    return matmul(grad, kernel.T) / scale, matmul(hidden.T, grad) / scale


def _split(hidden, targets, mask, chunk: int) -> _Tokens:
    """[rows, seq, ...] -> [chunks, T, ...]: equal chunks of at most `chunk` tokens, padded with mask 0."""
    num_tokens = mask.size
    num_chunks = -(-num_tokens // chunk)
    size = -(-num_tokens // num_chunks)

    def cut(x, tail):
        flat = x.reshape(num_tokens, *tail)
        padded = jnp.pad(flat, [(0, num_chunks * size - num_tokens)] + [(0, 0)] * len(tail))
        return padded.reshape(num_chunks, size, *tail)

    return _Tokens(cut(hidden, hidden.shape[2:]), cut(targets, ()), cut(mask, ()))


def _join(chunks, shape: tuple[int, ...]):
    """[chunks, T, ...] -> [rows, seq, ...], the padding dropped."""
    flat = chunks.reshape(-1, *shape[2:])
    return flat[: shape[0] * shape[1]].reshape(shape)


def _collect(log_probs, correct, mask):
    log_probs, correct = _join(log_probs, mask.shape), _join(correct, mask.shape)
    return -jnp.sum(jnp.where(mask != 0, mask * log_probs, 0)), correct, log_probs


def _like(x):
    """An empty array that remembers x's dtype."""
    return jnp.zeros((0,), x.dtype)


def _sum_dtype(x) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
