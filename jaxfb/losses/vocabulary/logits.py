"""Logits, a chunk of tokens at a time: the pieces that every loss over the vocabulary is made of.

Part of the head in forward_backward. The vocabulary may be cut over the automatic `tensor` axis and
over one manual axis besides (a pipeline's stages); sums over the manual axis are written here.

Shapes: T = tokens in a chunk, D = width, V = vocabulary, or this device's share of it.
Dtypes: logits, softmax, sums and accumulated gradients are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.parallel.shares import Shares
from jaxfb.parallel.table import Table, after, gathers_early
from jaxfb.parallel.tensor import constrain

# float16 flushes the tail of a softmax to zero; a power of two is exact in every dtype.
_FLOAT16_SCALE = 1024.0
# The logit of an id that cannot be drawn. Finite, so that a probability of 0 times its log is 0 and not NaN.
_NEVER = -1e30

# Ranges (first, end) of ids.
IdRanges = tuple[tuple[int, int], ...]


def sum_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype for sums over x: float32, or float64 for float64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def project(hidden: jax.Array, kernel: jax.Array, softcap: float | None) -> jax.Array:
    """Computes logits: [T, D] @ [D, V] -> float32[T, V], soft-capped."""
    logits = jnp.matmul(hidden, kernel, preferred_element_type=sum_dtype(hidden))
    return constrain(capped(logits, softcap), None, "tensor")


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Computes softcap * tanh(logits / softcap); returns the logits themselves for None."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def capped_slope(logits: jax.Array, softcap: float | None) -> jax.Array | float:
    """Computes d capped / d logits, from the capped logits."""
    return 1.0 if softcap is None else 1 - (logits / softcap) ** 2


def gradients_by_chunk(
    logits_grad: Callable[..., tuple[jax.Array, Any]],
    hidden: jax.Array,
    counted: jax.Array,
    kernel: jax.Array,
    others: tuple[jax.Array, ...],
    *,
    chunk: int,
    axis: str | None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Computes gradients of both factors of hidden @ kernel, with one chunk's logits at a time.

    What the products read, the gradient of the logits in the kernel's dtype, is kept for all tokens where that takes no
    more memory than the sum of the kernel's gradients: then there is one product instead of a sum over chunks.

    Args:
      logits_grad: (hidden [T, D], *others [T, ...]) -> (float32[T, V] before it is masked, anything to stack).
      hidden: float[rows, seq, D]. counted: bool[rows, seq], where a gradient flows.
      others: [rows, seq, ...] each.
    Returns:
      (float32[rows, seq, D] summed over `axis`, float32[D, V], what was stacked: [chunks, T, ...]).
    """

    def rounded(hidden, counted, *others):
        grad, kept = logits_grad(hidden, *others)
        return (jnp.where(counted[:, None], grad, 0) * half_scale(kernel)).astype(kernel.dtype), kept

    tokens = cut_tokens(chunk, hidden, counted, *others)
    run = _at_once if _keeps_all(tokens[1].size, kernel) else _summed_over_chunks
    hidden_grad, kernel_grad, kept = run(rounded, tokens, kernel)
    # split by tokens over `tensor`, so that what its devices add up is scattered, and `axis` adds up the parts
    hidden_grad = constrain(join_tokens(hidden_grad, hidden.shape), None, "tensor", None)
    return summed(hidden_grad, axis), kernel_grad, kept


def _keeps_all(num_tokens: int, kernel: jax.Array) -> bool:
    """Returns whether [tokens, V] in the kernel's dtype takes no more memory than [D, V] in that of its sums."""
    return num_tokens * kernel.dtype.itemsize <= kernel.shape[0] * sum_dtype(kernel).itemsize


def _at_once(rounded: Callable, tokens: tuple, kernel: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """Returns gradients of hidden and kernel, and what was stacked, by one product each."""
    grads, kept = lax.map(lambda one: rounded(*one), tokens)
    grads = constrain(grads, None, None, "tensor").reshape(-1, kernel.shape[1])
    hidden, counted = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in tokens[:2])
    return *_products(hidden, counted, kernel, grads), kept


def _summed_over_chunks(
    rounded: Callable, tokens: tuple, kernel: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the same with one chunk's gradient of the logits at a time."""

    def step(kernel_grad, one):
        grad, kept = rounded(*one)
        hidden, counted = one[:2]
        hidden_grad, added = _products(hidden, counted, kernel, grad)
        return constrain(kernel_grad + added, None, "tensor"), (hidden_grad, kept)

    zeros = constrain(jnp.zeros(kernel.shape, sum_dtype(kernel)), None, "tensor")
    kernel_grad, (hidden_grad, kept) = lax.scan(step, zeros, tokens)
    return hidden_grad, kernel_grad, kept


def _products(
    hidden: jax.Array, counted: jax.Array, kernel: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes gradients of both factors of hidden @ kernel, where `counted` [T]: float32[T, D] and float32[D, V].

    That of hidden first: the kernel is then not needed any more while its gradient is made.
    """
    scale, hidden = half_scale(kernel), jnp.where(counted[:, None], hidden, 0)
    matmul = partial(jnp.matmul, preferred_element_type=sum_dtype(kernel))
    hidden_grad, grad = lax.optimization_barrier((matmul(grad, kernel.T) / scale, grad))
    return hidden_grad, constrain(matmul(hidden.T, grad) / scale, None, "tensor")


def gradients_by_part(
    logits_grad: Callable[[int, jax.Array], jax.Array],
    hidden: jax.Array,
    counted: jax.Array,
    table: Table,
    scale: jax.Array,
    before: Sequence[jax.Array] = (),
) -> tuple[jax.Array, Table]:
    """Computes gradients of both factors of hidden @ head, with one part of the head's vocabulary at a time.

    Devices may scale them differently, such as by one over the weight of their microbatch. Since those of the head are
    summed over devices, each device multiplies its own before that sum.

    Args:
      logits_grad: (number of the part, kernel [D, W]) -> [T or more, W] of all tokens, times `half_scale` and in the
        kernel's dtype; 0 where not counted.
      hidden: float[rows, seq, D]. counted: bool[rows, seq], where a gradient flows.
      scale: float[], this device's factor.
      before: results of what runs before this, in turn: the first part is gathered once the last but one is there.
    Returns:
      (that of hidden in its dtype, that of the table's shard).
    """
    wide = sum_dtype(hidden)
    flat = jnp.where(counted[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    zeros, grads = jnp.zeros(flat.shape, wide), []
    # behind what runs before: the compiler would gather the first two parts at its start and keep them all the while
    earlier, hidden_grad = (
        lax.optimization_barrier((zeros, some))[0] for some in (before[-2:-1], before[-1:])
    )
    for number in range(table.num_parts):
        # one part after the other: the compiler would gather them, and make their gradients, all at once
        early = number == 0 or gathers_early()
        there = (earlier, *grads[:-2]) if early else (hidden_grad, *grads[:-1])
        kernel = table.as_head(after(table, *there).part(number))
        earlier = hidden_grad
        grad, half = logits_grad(number, kernel)[: flat.shape[0]], half_scale(kernel)
        added = jnp.matmul(grad, kernel.T, preferred_element_type=wide) / half
        # the part of the head is then not needed any more while its gradient is made
        hidden_grad, grad = lax.optimization_barrier((hidden_grad + added, grad))
        kernel_grad = jnp.matmul(flat.T, grad, preferred_element_type=wide) * (scale / half)
        grads.append(table.scattered(kernel_grad if table.vocabulary == 1 else kernel_grad.T))
    return (scale * hidden_grad).astype(hidden.dtype).reshape(hidden.shape), table.joined(grads)


def gradients_by_share(
    grad: jax.Array,
    hidden: jax.Array,
    kernel: jax.Array,
    table: Table,
    scale: jax.Array,
    shares: Shares,
) -> tuple[jax.Array, Table]:
    """Computes gradients of both factors of hidden @ head from those of the logits of this device's share.

    Args:
      grad: [T or more, W] of the tokens of all neighbours, times `half_scale` and in the kernel's dtype.
      hidden: float[rows, seq, D] of all neighbours, 0 where nothing is counted. kernel: [D, W], the share of the table.
      scale: float[], by which both are multiplied.
    Returns:
      (that of this device's own hidden states in their dtype, that of the table's shard).
    """
    flat, scale = hidden.reshape(-1, hidden.shape[-1]), scale / half_scale(kernel)
    grad = grad[: flat.shape[0]]
    matmul = partial(jnp.matmul, preferred_element_type=sum_dtype(kernel))
    # in this order 8B takes 9.31 s on v5p:4x4x4 and 4.91 s on v6e:8x8, in the other 9.30 s and 4.92 s (libtpu 0.0.48)
    hidden_grad, grad = lax.optimization_barrier((matmul(grad, kernel.T), grad))
    own = scale * shares.summed(hidden_grad.reshape(hidden.shape))
    return own.astype(hidden.dtype), shares.scattered(table, scale * matmul(flat.T, grad))


def half_scale(kernel: jax.Array) -> float:
    """Returns what a gradient of logits is multiplied by before it is rounded to the kernel's dtype."""
    return _FLOAT16_SCALE if kernel.dtype == jnp.float16 else 1.0


def summed(x: jax.Array, axis: str | None) -> jax.Array:
    """Sums over the manual axis that cuts the vocabulary; returns x itself where none does."""
    return x if axis is None else lax.psum(x, axis)


def largest(x: jax.Array, axis: str | None) -> jax.Array:
    """Returns the maximum over the manual axis that cuts the vocabulary."""
    return x if axis is None else lax.pmax(x, axis)


def token_ids(logits: jax.Array, dtype: Any, axis: str | None) -> jax.Array:
    """Returns the id of the token that each column of this device's logits stands for: [T, V]."""
    first = 0 if axis is None else lax.axis_index(axis).astype(dtype) * logits.shape[1]
    return lax.broadcasted_iota(dtype, logits.shape, 1) + first


def is_within(ranges: IdRanges, ids: jax.Array) -> jax.Array:
    """Returns bool like `ids`: which lie in one of the ranges."""
    inside = jnp.zeros(ids.shape, bool)
    for first, end in ranges:
        inside |= (ids >= first) & (ids < end)
    return inside


def without(absent: IdRanges, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the logits [T, V] of those ids with those of the absent ones so low that their probability is 0."""
    return jnp.where(is_within(absent, ids), _NEVER, logits) if absent else logits


def vocab_size(logits: jax.Array, axis: str | None) -> int:
    """Returns the size of the whole vocabulary, not of this device's share."""
    return logits.shape[-1] * (1 if axis is None else lax.axis_size(axis))


def cut_tokens(chunk: int, *leaves: jax.Array) -> tuple[jax.Array, ...]:
    """Cuts [rows, seq, ...] leaves into [chunks, T, ...]: equal chunks of at most `chunk` tokens, padded with zeros."""
    num_tokens = leaves[0].shape[0] * leaves[0].shape[1]
    num_chunks = -(-num_tokens // chunk)
    size = -(-num_tokens // num_chunks)

    def cut(x):
        flat = x.reshape(num_tokens, *x.shape[2:])
        padded = jnp.pad(flat, [(0, num_chunks * size - num_tokens)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(num_chunks, size, *x.shape[2:])

    return tuple(cut(leaf) for leaf in leaves)


def join_tokens(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Joins [chunks, T, ...] to [rows, seq, ...], without the padding."""
    flat = chunks.reshape(-1, *shape[2:])
    return flat[: shape[0] * shape[1]].reshape(shape)
