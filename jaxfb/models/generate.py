"""Samples from the transformer with a cache of keys and values.

One program: the prompts run through the layers at once (prefill), then a loop writes one token a step, until all rows
have stopped. Rows may have prompts of different lengths: each keeps its own position and writes over its padding.

Shapes: R = rows, P = longest prompt, N = new tokens, S = P + N cache slots, L = num_layers, V = vocab_size,
D = hidden_size, G = kv heads, K = head_size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.losses.vocabulary.logits import IdRanges, capped
from jaxfb.models.attention import packed_attention
from jaxfb.models.attention_kernels.blocked_attention import blocked_attention
from jaxfb.models.block import Block, rebuilder
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate_arguments import (
    check_filters,
    checked_key,
    checked_lengths,
    checked_prompt,
    checked_ranges,
    checked_stops,
    checked_temperatures,
)
from jaxfb.models.layers import Outer, statistics_dtype
from jaxfb.models.pattern import LEADING, layer_name, stack_of
from jaxfb.models.pick import Pick
from jaxfb.models.transformer import init_params
from jaxfb.parallel.online_softmax import within_window
from jaxfb.refusal import instance, integer
from jaxfb.types import outer_params

Kept = tuple[jax.Array, jax.Array]  # keys and values of a layer, each [R, S, G, K]
# of each leading layer; of each layer of a period, [number of periods, R, S, G, K]
Cache = tuple[list[Kept], list[Kept]]


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
    prompt_tokens: jax.Array | np.ndarray,
    max_new_tokens: int,
    *,
    prompt_lengths: jax.Array | np.ndarray | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_token: int | Sequence[int] | None = None,
    absent_ids: IdRanges = (),
    key: jax.Array | None = None,
    log_prob_temperature: float = 1.0,
) -> Generated:
    """Continues each row's prompt by `max_new_tokens` tokens, or until every row has stopped.

    Compiled once for each config, shape, filter (top_k, top_p, min_p) and choice of greedy or not. Row r draws from
    `key` folded with r, so what one row draws does not depend on the others.

    Args:
      config, params: of `transformer`; computes in the params' dtype.
      prompt_tokens: i32[R, P], padded on the right with any ids.
      max_new_tokens: N, at least 1.
      prompt_lengths: i32[R], each from 1 to P; P for every row if None.
      temperature: 0 takes the likeliest token.
      top_k: draw among the k likeliest only.
      top_p: draw among the fewest tokens whose probabilities add up to at least p.
      min_p: draw among the tokens that are at least min_p times as likely as the likeliest.
      stop_token: ends its row; of several, any does.
      absent_ids: ranges (first, end) of ids that are never drawn and have probability 0, such as those that the
        tokenizer lacks (`jaxfb.data.tokenizer.absent_ids`).
      key: a PRNG key or an integer, needed where temperature > 0.
      log_prob_temperature: of the log-probs that are reported: 1.0 is the model itself, `temperature` the policy
        that was sampled from (but for the filters).
    Raises:
      ValueError: an empty prompt, an id that the vocabulary lacks, no tokens asked for, a temperature, filter or stop
        token out of range, no id that may be drawn, or no key. Values are not looked at while they are traced.
    """
    how = {
        "prompt_lengths": prompt_lengths,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    ends = {"stop_token": stop_token, "absent_ids": absent_ids}
    prompt, pick, rest = _request(
        config, prompt_tokens, max_new_tokens, key, log_prob_temperature, **how, **ends
    )
    return _generate(config, max_new_tokens, pick, _in_one_dtype(params), prompt, *rest)


def stream(
    config: TransformerConfig,
    params: dict,
    prompt_tokens: jax.Array | np.ndarray,
    max_new_tokens: int,
    *,
    every: int = 4,
    key: jax.Array | None = None,
    **how: Any,
) -> Iterator[Generated]:
    """Yields what `generate` returns as it is made, [R, every] at a time (the last may be fewer).

    how: as for `generate`. Ends once every row has stopped; after a stop token a row has more of it.

    Raises:
      ValueError: as `generate`, before the first token.
    """
    every = integer("every", every, who="[generate]")
    prompt, pick, rest = _request(config, prompt_tokens, max_new_tokens, key, **how)
    return _pieces(config, _in_one_dtype(params), prompt, max_new_tokens, every, pick, rest)


def _pieces(config, params, prompt, total, every, pick, rest) -> Iterator[Generated]:
    size = prompt.shape[1] + total
    short, end = _of_length(config, size), total
    if _becomes_long(config, size) and (drawn := int(_short_tokens(config, total, rest[0]))):
        short, end = _of_length(config, 1), drawn
    state = _begun(short, total, params, prompt, rest[0])
    pieces = [np.zeros((prompt.shape[0], 0), np.int32)]
    while (done := int(state.index)) < total and not bool(state.stopped.all()):
        if done == end:
            written = np.pad(np.concatenate(pieces, axis=1), [(0, 0), (0, total - done)])
            short, end = _of_length(config, size), total
            state = _begun_again(short, params, prompt, rest[0], state, jnp.asarray(written))
        state, piece = _advanced(short, min(every, end - done), pick, state, params, *rest)
        piece = jax.device_get(piece)
        pieces.append(np.asarray(piece.tokens))
        yield piece


def _request(
    config: TransformerConfig,
    prompt_tokens: Any,
    max_new_tokens: int,
    key: jax.Array | None,
    log_prob_temperature: float = 1.0,
    *,
    prompt_lengths: Any = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_token: int | Sequence[int] | None = None,
    absent_ids: IdRanges = (),
) -> tuple[jax.Array, Pick, tuple]:
    """Returns the prompt, what picks tokens, and (lengths, temperatures, stops, keys), checked."""
    instance("config", config, TransformerConfig, "a TransformerConfig", who="[generate]")
    integer("max_new_tokens", max_new_tokens, who="[generate]")
    prompt = checked_prompt(config, prompt_tokens)
    rows, longest = prompt.shape
    lengths = checked_lengths(prompt_lengths, rows, longest)
    temperatures = checked_temperatures(temperature, log_prob_temperature, key)
    check_filters(config, top_k, top_p=top_p, min_p=min_p)
    pick = Pick(temperature == 0, top_k, top_p, min_p, checked_ranges(config, absent_ids))
    keys = jax.vmap(partial(jax.random.fold_in, checked_key(key)))(jnp.arange(rows))
    return prompt, pick, (lengths, temperatures, checked_stops(config, stop_token), keys)


def _of_length(config: TransformerConfig, length: int) -> TransformerConfig:
    """Returns the config for sequences of up to so many tokens, of which "longrope" turns the long ones otherwise."""
    if config.rope_scaling is None:
        return config
    return replace(config, rope_scaling=config.rope_scaling.of_length(length))


def _becomes_long(config: TransformerConfig, length: int) -> bool:
    """Returns whether a sequence of so many tokens is turned otherwise than its first tokens would be alone."""
    return _of_length(config, length) != _of_length(config, 1)


def _short_tokens(config: TransformerConfig, max_new_tokens: int, lengths: jax.Array) -> jax.Array:
    """Returns how many tokens are drawn until the longest sequence is a long one, i32[]."""
    scaling = config.rope_scaling
    original = 0 if scaling is None else scaling.original_length or 0
    return jnp.clip(original - lengths.max() + 1, 0, max_new_tokens)


def _in_one_dtype(params):
    """Returns the parameters in the widest of their dtypes: frozen ones may be stored in a narrower one."""
    dtype = jnp.result_type(*jax.tree.leaves(params))
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), params)


class _State(NamedTuple):
    """A generation after `index` tokens: the logits of the next, the cache, the rows that stopped, the last tokens."""

    index: jax.Array
    logits: jax.Array
    cache: Cache
    stopped: jax.Array
    last: jax.Array


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(config, max_new_tokens, pick, params, prompt, lengths, temperatures, stops, keys):
    size, rest = prompt.shape[1] + max_new_tokens, (params, lengths, temperatures, stops, keys)
    long = _of_length(config, size)
    if not _becomes_long(config, size):
        state = _begin(long, max_new_tokens, params, prompt, lengths)
        return _advance(long, max_new_tokens, pick, state, *rest)[1]
    short, drawn = _of_length(config, 1), _short_tokens(config, max_new_tokens, lengths)
    begin = [partial(_begin, one, max_new_tokens, params, prompt, lengths) for one in (short, long)]
    state = lax.cond(drawn > 0, *begin)
    state, first = _advance(short, max_new_tokens, pick, state, *rest, end=drawn)
    goes_on = (drawn > 0) & (drawn < max_new_tokens) & ~state.stopped.all()
    again = partial(_begin_again, long, params, prompt, lengths, state, first.tokens)
    state = lax.cond(goes_on, again, lambda: state)
    second = _advance(long, max_new_tokens, pick, state, *rest, end=max_new_tokens)[1]
    is_first = jnp.arange(max_new_tokens) < state.index
    return jax.tree.map(lambda a, b: jnp.where(is_first, a, jnp.roll(b, state.index, 1)), first, second)


def _begin(config, max_new_tokens, params, prompt, lengths) -> _State:
    hidden, cache = _prefill(config, params, prompt, max_new_tokens)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    rows = prompt.shape[0]
    nothing = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    return _State(jnp.int32(0), _logits(config, params, last), cache, *nothing)


def _begin_again(config, params, prompt, lengths, state, written) -> _State:
    """Returns the same state with the cache of another config. written: the tokens until now, i32[R, N]."""
    rows, places = jnp.arange(prompt.shape[0])[:, None], jnp.arange(written.shape[1])
    whole = jnp.pad(prompt, [(0, 0), (0, written.shape[1])])
    whole = whole.at[rows, lengths[:, None] + places].set(jnp.where(places < state.index, written, 0))
    hidden, cache = _prefill(config, params, whole, 0)
    last = jnp.take_along_axis(hidden, (lengths + state.index - 1)[:, None, None], axis=1)[:, 0]
    return state._replace(logits=_logits(config, params, last), cache=cache)


def _advance(
    config, steps, pick, state, params, lengths, temperatures, stops, keys, end=None
) -> tuple[_State, Generated]:
    """Writes so many tokens, fewer where every row has stopped; the rest is then the rows' last token.

    end: of all tokens, at most so many.
    """
    temperature, log_prob_temperature = temperatures
    first, rows = state.index, lengths.shape[0]

    def step(carried):
        state, written = carried
        logits = pick.only_tokens(state.logits)
        drawn = pick(logits, temperature, jax.vmap(jax.random.fold_in, (0, None))(keys, state.index))
        token = jnp.where(state.stopped, state.last, drawn)
        log_prob = jnp.take_along_axis(
            jax.nn.log_softmax(logits / log_prob_temperature), token[:, None], axis=1
        )[:, 0]
        log_prob = jnp.where(state.stopped, 0, log_prob)
        hidden, cache = _decode(config, params, token, lengths + state.index, state.cache)
        stopped = state.stopped | (token[:, None] == stops).any(1)
        at = state.index - first
        written = Generated(written.tokens.at[:, at].set(token), written.log_probs.at[:, at].set(log_prob))
        return _State(state.index + 1, _logits(config, params, hidden), cache, stopped, token), written

    def unfinished(carried):
        state, _ = carried
        return (state.index < first + steps if end is None else state.index < end) & ~state.stopped.all()

    nothing = Generated(jnp.zeros((rows, steps), jnp.int32), jnp.zeros((rows, steps), state.logits.dtype))
    state, written = lax.while_loop(unfinished, step, (state, nothing))
    left_out = jnp.arange(steps) >= state.index - first
    return state, Generated(jnp.where(left_out, state.last[:, None], written.tokens), written.log_probs)


_begun = jax.jit(_begin, static_argnums=(0, 1))
_begun_again = jax.jit(_begin_again, static_argnums=0)
_advanced = jax.jit(_advance, static_argnums=(0, 1, 2), donate_argnums=3)


def _prefill(config, params, prompt, max_new_tokens) -> tuple[jax.Array, Cache]:
    """Runs the prompt: [R, P] -> hidden [R, P, D], and the cache with space for the new tokens."""

    def attend(window, _, query, key, value, *scores):
        padding = [(0, 0), (0, max_new_tokens), (0, 0), (0, 0)]
        # the backend that training names may refuse a prompt: its length and dtype are other ones
        context = packed_attention(query, key, value, *scores, segments=None, backend="auto", window=window)
        return context, (jnp.pad(key, padding), jnp.pad(value, padding))

    positions = jnp.broadcast_to(jnp.arange(prompt.shape[1]), prompt.shape)
    return _through_layers(config, params, prompt, positions, attend, None)


def cache_of(config: TransformerConfig, rows: int, slots: int, dtype: Any) -> Cache:
    """Returns the shapes and dtypes of the keys and values of so many rows of so many tokens.

    dtype: of the parameters that are sampled with.
    """

    def filled():
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(config, jax.random.key(0)))
        return _prefill(config, params, jnp.zeros((rows, 1), jnp.int32), slots - 1)[1]

    return jax.eval_shape(filled)


def _decode(config, params, token, slot, cache: Cache) -> tuple[jax.Array, Cache]:
    """Runs one token of each row, [R] at position `slot` [R], through the layers: hidden [R, D] and the longer
    cache.
    """
    rows = jnp.arange(slot.shape[0])

    def attend(window, before, query, key, value, *scores):
        keys, values = before
        kept = keys.at[rows, slot].set(key[:, 0]), values.at[rows, slot].set(value[:, 0])
        places = jnp.arange(keys.shape[1])
        visible = places <= slot[:, None]
        if window is not None:
            visible &= within_window(slot, places, window)
        return blocked_attention(query, *kept, *scores, mask=visible[:, None, None, :]), kept

    hidden, cache = _through_layers(config, params, token[:, None], slot[:, None], attend, cache)
    return hidden[:, 0], cache


def _through_layers(
    config, params, tokens, positions, attend, cache: Cache | None
) -> tuple[jax.Array, Cache]:
    """Runs tokens [R, T] through all layers.

    Args:
      attend: (window, what the layer kept before, query, key, value, scores if they are not plain) -> (context, what
        it keeps).
      cache: of the tokens before; None: there are none.
    """
    stack = stack_of(config)
    of_leading, of_periods = cache or ([None] * len(stack.leading), [None] * len(stack.period))
    hidden = rebuilder(Outer, config)(outer_params(params)).embed(tokens)

    def run(configs, layers, hidden, before):
        kept = []
        for one, layer_params, last in zip(configs, layers, before, strict=True):
            block = rebuilder(Block, one)(layer_params)
            hidden, now = block(hidden, positions, partial(attend, one.window, last))
            kept.append(now)
        return hidden, kept

    def period(hidden, scanned):
        layer_params, before = scanned
        return run(stack.period, stack.split(layer_params), hidden, before)

    leading = [params[LEADING][layer_name(place)] for place in range(len(stack.leading))]
    hidden, of_leading = run(stack.leading, leading, hidden, of_leading)
    hidden, of_periods = lax.scan(period, hidden, (params["layers"], of_periods))
    return hidden, (of_leading, of_periods)


def _logits(config, params, hidden):
    """Computes logits: [R, D] -> float32[R, V]."""
    outer = rebuilder(Outer, config)(outer_params(params))
    wide = statistics_dtype(hidden.dtype)
    logits = jnp.matmul(outer.norm(hidden), outer.head_kernel, preferred_element_type=wide)
    return capped(logits, config.logit_softcap)
