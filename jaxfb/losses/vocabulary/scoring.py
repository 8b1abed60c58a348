"""Makes log-probs of a sampler, and their gradients, from logits of some ids: of a whole vocabulary or a part of it.

Shapes: T = tokens, V = ids at hand, K = tokens scored at each position.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import IdRanges, capped_slope, without


class Scoring(NamedTuple):
    """Settings of the logits: the arguments that shape the program.

    chunk: tokens whose logits exist at one time. axis: a manual mesh axis over which the vocabulary is cut, or None.
    softcap, temperature: of the logits. absent: ranges of ids of probability 0.
    """

    chunk: int
    axis: str | None
    softcap: float | None
    temperature: float
    absent: IdRanges

    def scaled(self, logits: jax.Array, vocab: jax.Array) -> jax.Array:
        """Returns the log-probs of the sampler but for their normalizer, from the model's logits [T, V] of ids."""
        return without(self.absent, logits / self.temperature, vocab)


def picked(logits: jax.Array, ids: jax.Array, vocab: jax.Array) -> jax.Array:
    """Picks the logits of the ids, 0 where they are not of `vocab`: [T, V], [T, K], ids of the columns -> [T, K].

    Compares instead of gathering, so a vocabulary split over devices stays split.
    """
    one = lambda target: jnp.sum(jnp.where(vocab == target[:, None], logits, 0), axis=-1)  # noqa: E731
    return lax.map(one, ids.T).T


def logits_gradient(
    logits, vocab, scoring: Scoring, ids, normalizer, entropy, log_prob_seed, entropy_seed
) -> jax.Array:
    """Turns cotangents of log-probs [T, K] and entropy [T] into that of the model's logits, [T, V].

    d log p_i / dz_j = [i = j] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy), z being logits / temperature.
    """
    log_p = scoring.scaled(logits, vocab) - normalizer[:, None]
    log_prob_seed = jnp.where(ids != -1, log_prob_seed, 0)
    from_all = log_prob_seed.sum(-1, keepdims=True) + entropy_seed[:, None] * (log_p + entropy[:, None])

    def add(grad, target_and_seed):
        target, seed = target_and_seed
        return grad + jnp.where(vocab == target[:, None], seed[:, None], 0), None

    grad = lax.scan(add, -jnp.exp(log_p) * from_all, (ids.T, log_prob_seed.T))[0]
    return grad * capped_slope(logits, scoring.softcap) / scoring.temperature


def in_units(
    cotangents: tuple[jax.Array, jax.Array], counted: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns (the largest cotangent, both divided by it): a half-precision product would flush 1 / tokens to zero."""
    of_log_probs, of_entropy = cotangents
    size = jnp.maximum(jnp.max(jnp.abs(of_log_probs), axis=-1), jnp.abs(of_entropy))
    scale = jnp.max(jnp.where(counted, size, 0))
    return scale, (jnp.where(scale > 0, of_log_probs / scale, 0), jnp.where(scale > 0, of_entropy / scale, 0))
