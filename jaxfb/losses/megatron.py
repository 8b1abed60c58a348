"""Adapts Megatron-LM's loss functions, which return 2-tuples or 3-tuples, to Sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.refusal import Refused, boolean, function, shown
from jaxfb.types import LossFn, LossOutput, Sum


def from_megatron(loss_func: Callable[..., tuple], per_token: bool = False) -> LossFn:
    """Makes a jaxfb loss function of one that returns Megatron's 2-tuple or 3-tuple.

    `loss_func(params, microbatch, rng)` returns one of
      (loss, data)                   the objective is the mean of loss over microbatches and replicas;
      (loss_sum, num_tokens, data)   per_token=False: the mean over microbatches and replicas of
                                     loss_sum / max(num_tokens, 1), Megatron's default;
                                     per_token=True: sum of loss_sum / max(sum of num_tokens, 1), its
                                     `calculate_per_token_loss`.
    In `data`, a pair is (sum, count) and anything else a value to be averaged; it becomes `metrics`, unscaled.
    Keep the default normalize="global". Unlike in Megatron, a 2-tuple under per_token=True is not multiplied
    by the number of replicas, no context-parallel factor exists, and logged values are never overwritten.

    Source: megatron-core `schedules.forward_step_calc_loss` and `finalize_model_grads`.

    Raises (when traced):
      ValueError: loss_func returned something else.
    """

    function("loss_func", loss_func, "(params, microbatch, rng)", who="from_megatron:")
    boolean("per_token", per_token, who="from_megatron:")

    def loss_fn(params, microbatch, rng) -> LossOutput:
        returned = loss_func(params, microbatch, rng)
        if (
            not isinstance(returned, tuple)
            or len(returned) not in (2, 3)
            or not isinstance(returned[-1], dict)
        ):
            raise Refused(
                "a Megatron loss function must return (loss, dict) or (loss_sum, num_tokens, dict), got "
                f"{type(returned).__name__}{f' of {len(returned)}' if isinstance(returned, tuple) else ''}"
            )
        metrics = {name: _metric(name, value) for name, value in returned[-1].items()}
        return LossOutput({"loss": _term(returned[:-1], per_token)}, metrics)

    return loss_fn


def _term(returned: tuple, per_token: bool) -> Sum:
    numbers = [_array(name, value) for name, value in zip(("loss", "num_tokens"), returned, strict=False)]
    if len(numbers) == 1:
        return Sum(numbers[0], 1.0)
    loss_sum, num_tokens = numbers
    return Sum(loss_sum, num_tokens) if per_token else Sum(loss_sum / jnp.maximum(num_tokens, 1), 1.0)


def _metric(name: str, value: Any) -> Sum:
    value = _array(f"metric {name!r}", value)
    return Sum(value[0], value[1]) if value.shape == (2,) else Sum(value, 1.0)


def _array(name: str, value: Any) -> jax.Array:
    """Returns `value`, a number or a pair of numbers, as an array."""
    try:
        parts = [jnp.asarray(part) for part in value] if isinstance(value, tuple | list) else value
        return jnp.stack(parts) if isinstance(parts, list) else jnp.asarray(parts)
    except (TypeError, ValueError, OverflowError):
        raise Refused(
            f"{name} of a Megatron loss function must be a number or a pair (sum, count), got {shown(value)}"
        ) from None
