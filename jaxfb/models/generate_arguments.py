"""Checks of what `generate` and `stream` are asked for, before anything is compiled.

Arrays are checked by their values where these are known: not while a program is traced, and not where other processes
have a part of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.models.config import TransformerConfig
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import INT64, Refused, integer, is_several, number, refuse, shown

WHO = "[generate]"
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-30, 1e30


def checked_prompt(config: TransformerConfig, prompt_tokens: Any) -> jax.Array:
    """Returns the ids i32[R, P] of prompts, given as an array or as lists of one length."""
    array = _array("prompt_tokens", prompt_tokens, "ids [rows, length]")
    if array.ndim != 2 or not array.shape[0]:
        refuse("prompt_tokens", prompt_tokens, "ids [rows, length] of at least one row", who=WHO)
    if not array.shape[1]:
        raise Refused(
            f"{WHO} prompt_tokens of {shown(array.shape)} have no token; start an empty prompt with the id that "
            "stands between documents"
        )
    values, last = _values(array), config.vocab_size - 1
    if values is not None and (wrong := values[(values < 0) | (values > last)]).size:
        raise Refused(f"{WHO} prompt_tokens must be ids from 0 to {last}, padding too, got {wrong[0]}")
    return jnp.asarray(array, jnp.int32)


def checked_lengths(prompt_lengths: Any, rows: int, longest: int) -> jax.Array:
    """Returns the lengths i32[R] of the prompts, without any given the longest of each."""
    if prompt_lengths is None:
        return jnp.full(rows, longest, jnp.int32)
    array = _array("prompt_lengths", prompt_lengths, f"{rows} lengths, one a row")
    if array.shape != (rows,):
        refuse("prompt_lengths", prompt_lengths, f"{rows} lengths, one a row", who=WHO)
    values = _values(array)
    if values is not None and (wrong := values[(values < 1) | (values > longest)]).size:
        raise Refused(
            f"{WHO} prompt_lengths must be from 1 to the {longest} tokens of prompt_tokens, got {wrong[0]}"
        )
    return jnp.asarray(array, jnp.int32)


def checked_temperatures(temperature: Any, log_prob_temperature: Any, key: Any) -> tuple[float, float]:
    """Returns both temperatures; to draw takes a key."""
    number("temperature", temperature, who=WHO, least=0)
    number("log_prob_temperature", log_prob_temperature, who=WHO, above=0)
    for name, value in {"temperature": temperature, "log_prob_temperature": log_prob_temperature}.items():
        if value and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
            zero = "0, which takes the likeliest token, or " * (name == "temperature")
            raise Refused(
                f"{WHO} {name} must be {zero}from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, since logits divided "
                f"by another are not finite in 32 bits, got {value:g}"
            )
    if temperature > 0 and key is None:
        raise Refused(
            f"{WHO} {temperature=} needs a key to draw from, such as jax.random.key(0); or take the likeliest tokens: "
            "temperature=0",
            [{"temperature": 0.0}],
        )
    return float(temperature), float(log_prob_temperature)


def checked_key(key: Any) -> jax.Array:
    """Returns a key: of an integer its `jax.random.key`, of None that of 0, which nothing is drawn from."""
    if key is None:
        return jax.random.key(0)
    if isinstance(key, int | np.integer):
        return jax.random.key(integer("key", key, who=WHO, least=-INT64 - 1, most=INT64))
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.ndim:
        return key
    data = jax.random.key_data(jax.random.key(0))
    if isinstance(key, jax.Array | np.ndarray) and (key.dtype, key.shape) == (data.dtype, data.shape):
        return jax.random.wrap_key_data(jnp.asarray(key))
    refuse("key", key, "one key, such as jax.random.key(0), or an integer", who=WHO)


def check_filters(config: TransformerConfig, top_k: Any, **shares: Any) -> None:
    """Refuses more tokens than there are, and a share (top_p, min_p) that is not above 0 and at most 1."""
    if top_k is not None:
        integer("top_k", top_k, who=WHO, most=config.vocab_size)
    for name, share in shares.items():
        if share is not None and not 0 < number(name, share, who=WHO) <= 1:
            raise Refused(f"{WHO} {name}={share} must be above 0 and at most 1; use 0.9", [{name: 0.9}])


def checked_stops(config: TransformerConfig, stop_token: Any) -> jax.Array:
    """Returns the ids i32[n] that end a row."""
    if stop_token is None:
        return jnp.zeros(0, jnp.int32)
    stops = list(stop_token) if is_several(stop_token) else np.atleast_1d(stop_token).tolist()
    if not all(_is_id(stop) and stop < config.vocab_size for stop in stops):
        raise Refused(f"{WHO} {stop_token=} must be ids from 0 to {config.vocab_size - 1}, or None")
    return jnp.asarray(stops, jnp.int32)


def checked_ranges(config: TransformerConfig, absent_ids: Any) -> IdRanges:
    """Returns ranges of ids that are never drawn, as a program's static argument; refuses those that leave no id."""
    if not is_several(absent_ids) or not all(map(_is_range, ranges := tuple(absent_ids))):
        refuse("absent_ids", absent_ids, "ranges (first, end) of ids, such as ((32, 40),)", who=WHO)
    present = np.ones(config.vocab_size, bool)
    for first, end in ranges:
        present[first:end] = False
    if not present.any():
        raise Refused(
            f"{WHO} absent_ids={shown(absent_ids)} leave none of the {config.vocab_size} ids to draw"
        )
    return tuple((int(first), int(end)) for first, end in ranges)


def _is_range(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(map(_is_id, value)) and bool(value[0] <= value[1])


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _array(name: str, value: Any, rule: str) -> Any:
    """Returns integers as an array; jax's own and traced ones stay."""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # lists of several lengths
        refuse(name, value, rule, who=WHO)
    if array.dtype.kind not in "iu":
        refuse(name, value, f"{rule}, which are integers", who=WHO)
    return array


def _values(array: Any) -> np.ndarray | None:
    """Returns the values of an array, None where they are not known here."""
    if is_traced(array) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)
