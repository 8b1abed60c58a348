"""Samples from the transformer with a cache of keys and values.

One program: the prompts run through the layers at once (prefill), then a scan writes one token a step. Rows
may have prompts of different lengths: each keeps its own position and writes over its padding.

Shapes: R = rows, P = longest prompt, N = new tokens, S = P + N cache slots, L = num_layers, V = vocab_size,
D = hidden_size, G = kv heads, K = head_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.losses.logits import IdRanges, capped, is_within
from jaxfb.models.attention import attention, packed_attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layers import Outer, statistics_dtype
from jaxfb.models.transformer import Block, rebuilder
from jaxfb.parallel.context import within_window
from jaxfb.refusal import Refused
from jaxfb.types import outer_params

Cache = tuple[jax.Array, jax.Array]  # keys and values, each [L, R, S, G, K]; a layer sees [R, S, G, K]


class Generated(NamedTuple):
    """The sampled tokens.

    tokens:    i32[R, N]; after a stop token, more of it.
    log_probs: f32[R, N], of each token among all, at `log_prob_temperature`; 0 after the stop.
    """

    tokens: jax.Array
    log_probs: jax.Array


def generate(
    config: TransformerConfig,
    params: dict,
    prompt_tokens: jax.Array,
    max_new_tokens: int,
    *,
    prompt_lengths: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_token: int | Sequence[int] | None = None,
    absent_ids: IdRanges = (),
    key: jax.Array | None = None,
    log_prob_temperature: float = 1.0,
) -> Generated:
    """Continues each row's prompt by `max_new_tokens` tokens.

    Compiled once for each config, shape, top_k and choice of greedy or not. Row r draws from `key` folded
    with r, so what one row draws does not depend on the others.

    Args:
      config, params: of `transformer`; computes in the params' dtype.
      prompt_tokens: i32[R, P], padded on the right.
      max_new_tokens: N, at least 1.
      prompt_lengths: i32[R], each from 1 to P; P for every row if None.
      temperature: 0 takes the likeliest token.
      top_k: draw among the k likeliest only.
      stop_token: ends its row; of several, any does.
      absent_ids: ranges (first, end) of ids that are never drawn and have probability 0, such as those that the
        tokenizer lacks (`jaxfb.data.tokenizer.absent_ids`).
      key: a PRNG key, needed where temperature > 0.
      log_prob_temperature: of the log-probs that are reported: 1.0 is the model itself, `temperature` the policy
        that was sampled from (but for top_k).
    Raises:
      ValueError: an empty prompt, no tokens asked for, a temperature, top_k or stop token out of range, or no key.
    """
    rows, longest = prompt_tokens.shape
    _check(config, longest, max_new_tokens, temperature, top_k, key)
    lengths = jnp.full(rows, longest) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(0) if key is None else key))(jnp.arange(rows))
    pick = _Pick(greedy=temperature == 0, top_k=top_k, absent=absent_ids)
    stops = jnp.asarray(_stop_ids(config, stop_token), jnp.int32)
    prompt, temperatures = jnp.asarray(prompt_tokens, jnp.int32), (float(temperature), log_prob_temperature)
    params = _in_one_dtype(params)
    return _generate(config, max_new_tokens, pick, params, prompt, lengths, temperatures, stops, keys)


def _in_one_dtype(params):
    """Returns the parameters in the widest of their dtypes: frozen ones may be stored in a narrower one."""
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


class _Pick(NamedTuple):
    """Chooses a token from logits; its fields are the settings that shape the program."""

    greedy: bool
    top_k: int | None
    absent: IdRanges

    def only_tokens(self, logits):
        """Returns logits [R, V] with -inf at ids that are never drawn."""
        return jnp.where(is_within(self.absent, jnp.arange(logits.shape[1])), -jnp.inf, logits)

    def __call__(self, logits, temperature, keys):
        """Picks a token for each row: [R, V] -> i32[R]."""
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.top_k is not None:
            kth = lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits >= kth, logits, -jnp.inf)
        return jax.vmap(jax.random.categorical)(keys, logits / temperature).astype(jnp.int32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(config, max_new_tokens, pick, params, prompt, lengths, temperatures, stops, keys):
    temperature, log_prob_temperature = temperatures

    def step(state, index):
        logits, cache, stopped, last = state
        logits = pick.only_tokens(logits)
        drawn = pick(logits, temperature, jax.vmap(jax.random.fold_in, (0, None))(keys, index))
        token = jnp.where(stopped, last, drawn)
        log_prob = jnp.take_along_axis(
            jax.nn.log_softmax(logits / log_prob_temperature), token[:, None], axis=1
        )[:, 0]
        log_prob = jnp.where(stopped, 0, log_prob)
        hidden, cache = _decode(config, params, token, lengths + index, cache)
        stopped |= (token[:, None] == stops).any(1)
        return (_logits(config, params, hidden), cache, stopped, token), (token, log_prob)

    hidden, cache = _prefill(config, params, prompt, max_new_tokens)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    rows = prompt.shape[0]
    state = (_logits(config, params, last), cache, jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32))
    _, (tokens, log_probs) = lax.scan(step, state, jnp.arange(max_new_tokens))
    return Generated(tokens.T, log_probs.T)


def _prefill(config, params, prompt, max_new_tokens) -> tuple[jax.Array, Cache]:
    """Runs the prompt: [R, P] -> hidden [R, P, D], and the cache with space for the new tokens."""

    def attend(query, key, value, *scores):
        room = [(0, 0), (0, max_new_tokens), (0, 0), (0, 0)]
        # the backend that training names may refuse a prompt: its length and dtype are other ones
        context = packed_attention(
            query, key, value, *scores, segments=None, backend="auto", window=config.window
        )
        return context, (jnp.pad(key, room), jnp.pad(value, room))

    block_of, outer = rebuilder(Block, config), rebuilder(Outer, config)(outer_params(params))
    positions = jnp.broadcast_to(jnp.arange(prompt.shape[1]), prompt.shape)

    def layer(hidden, layer_params):
        return block_of(layer_params)(hidden, positions, attend)

    return lax.scan(layer, outer.embed(prompt), params["layers"])


def _decode(config, params, token, slot, cache: Cache) -> tuple[jax.Array, Cache]:
    """Runs one token of each row, [R] at position `slot` [R], through the layers: hidden [R, D] and the longer
    cache.
    """
    block_of, outer = rebuilder(Block, config), rebuilder(Outer, config)(outer_params(params))
    places = jnp.arange(cache[0].shape[2])
    visible = places <= slot[:, None]
    if config.window is not None:
        visible &= within_window(slot, places, config.window)
    rows = jnp.arange(slot.shape[0])

    def layer(hidden, scanned):
        layer_params, (keys, values) = scanned

        def attend(query, key, value, *scores):
            kept = keys.at[rows, slot].set(key[:, 0]), values.at[rows, slot].set(value[:, 0])
            return attention(query, *kept, *scores, mask=visible[:, None, None, :]), kept

        return block_of(layer_params)(hidden, slot[:, None], attend)

    hidden, cache = lax.scan(layer, outer.embed(token[:, None]), (params["layers"], cache))
    return hidden[:, 0], cache


def _logits(config, params, hidden):
    """Computes logits: [R, D] -> float32[R, V]."""
    outer = rebuilder(Outer, config)(outer_params(params))
    wide = statistics_dtype(hidden.dtype)
    logits = jnp.matmul(outer.norm(hidden), outer.head_kernel, preferred_element_type=wide)
    return capped(logits, config.logit_softcap)


def _stop_ids(config: TransformerConfig, stop_token: int | Sequence[int] | None) -> list[int]:
    ids = [] if stop_token is None else np.atleast_1d(stop_token).tolist()
    for stop in ids:
        if not isinstance(stop, int) or not 0 <= stop < config.vocab_size:
            raise Refused(f"[generate] {stop_token=} must be ids from 0 to {config.vocab_size - 1}, or None")
    return ids


def _check(config, longest, max_new_tokens, temperature, top_k, key) -> None:
    if longest < 1 or max_new_tokens < 1:
        raise Refused(
            f"[generate] prompts of {longest} tokens and {max_new_tokens=} must both be at least 1; "
            "start an empty prompt with the document separator"
        )
    if not 0 <= temperature < float("inf") or (temperature > 0 and key is None):
        raise Refused(f"[generate] {temperature=} must be 0 (greedy), or positive with a key to draw from")
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        raise Refused(f"[generate] {top_k=} must be from 1 to vocab_size={config.vocab_size}")
