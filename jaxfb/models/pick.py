"""Chooses the next token of each row from its logits: the likeliest, or one drawn among those that filters leave."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.losses.vocabulary.logits import IdRanges, is_within


class Pick(NamedTuple):
    """Chooses a token; its fields are the settings that shape the program.

    The filters act one after the other, in this order, on the probabilities at the temperature.

    greedy: take the likeliest token, whatever the filters.
    top_k:  keep the k likeliest.
    top_p:  keep the fewest tokens whose probabilities add up to at least p.
    min_p:  keep tokens at least min_p times as likely as the likeliest.
    absent: ranges (first, end) of ids that are never drawn.
    """

    greedy: bool
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    absent: IdRanges = ()

    def only_tokens(self, logits: jax.Array) -> jax.Array:
        """Returns logits [R, V] with -inf at ids that are never drawn."""
        return jnp.where(is_within(self.absent, jnp.arange(logits.shape[1])), -jnp.inf, logits)

    def __call__(self, logits: jax.Array, temperature: jax.Array, keys: jax.Array) -> jax.Array:
        """Picks a token for each row: [R, V] -> i32[R]."""
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        kept = self.filtered(logits / temperature)
        return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)

    def filtered(self, logits: jax.Array) -> jax.Array:
        """Returns logits [R, V] with -inf at the tokens that the filters remove."""
        if self.top_k is not None:
            kth = lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits >= kth, logits, -jnp.inf)
        if self.top_p is not None:
            logits = jnp.where(logits >= _edge_of_nucleus(logits, self.top_p), logits, -jnp.inf)
        if self.min_p is not None:
            highest = logits.max(-1, keepdims=True)
            logits = jnp.where(logits >= highest + jnp.log(self.min_p), logits, -jnp.inf)
        return logits


def _edge_of_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Returns the logit of the least likely token that is needed to reach a probability of top_p: [R, 1]."""
    falling = -jnp.sort(-logits, axis=-1)
    before = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1) - jax.nn.softmax(falling, axis=-1)
    needed = jnp.where(before < top_p, falling, jnp.inf)
    return needed.min(-1, keepdims=True)
