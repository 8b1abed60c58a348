"""Megatron-LM's loss functions, spoken in Sums: the forms and their exact meaning, without the traps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

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

    def loss_fn(params, microbatch, rng) -> LossOutput:
        answer = loss_func(params, microbatch, rng)
        if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[-1], dict):
            raise ValueError(
                "a Megatron loss function must return (loss, dict) or (loss_sum, num_tokens, dict), got "
                f"{type(answer).__name__}{f' of {len(answer)}' if isinstance(answer, tuple) else ''}"
            )
        metrics = {name: _metric(value) for name, value in answer[-1].items()}
        return LossOutput({"loss": _term(answer[:-1], per_token)}, metrics)

    return loss_fn


def _term(answer: tuple, per_token: bool) -> Sum:
    if len(answer) == 1:
        return Sum(answer[0], 1.0)
    loss_sum, num_tokens = answer
    return Sum(loss_sum, num_tokens) if per_token else Sum(loss_sum / jnp.maximum(num_tokens, 1), 1.0)


def _metric(value: Any) -> Sum:
    value = (
        jnp.asarray(value)
        if not isinstance(value, (tuple, list))
        else jnp.stack([jnp.asarray(v) for v in value])
    )
    return Sum(value[0], value[1]) if value.shape == (2,) else Sum(value, 1.0)
