"""Measures the two parts of an update, each with the host waiting for the devices."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax

from jaxfb.output import ForwardBackwardOutput
from jaxfb.update.train_state import StepMetrics, TrainState


def timed_parts(
    differentiate: Callable[[], ForwardBackwardOutput],
    apply: Callable[[ForwardBackwardOutput], tuple[TrainState, StepMetrics]],
) -> tuple[TrainState, StepMetrics, dict[str, float]]:
    """Returns what `apply` returns for what `differentiate` returns, and name -> seconds of both."""
    began = time.monotonic()
    out = jax.block_until_ready(differentiate())
    between = time.monotonic()
    new, metrics = jax.block_until_ready(apply(out))
    return new, metrics, {"forward_backward": between - began, "optimizer": time.monotonic() - between}
