"""Reads from a config the dtypes of parameters and of the computation, and how the loss is scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.config.custom import CustomConfig
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.optim import DynamicLossScale, StaticLossScale

AnyConfig = Config | PostTrainingConfig | CustomConfig


def param_dtype(config: AnyConfig) -> Any:
    """Returns the dtype of the master parameters: float32, or float64 where the whole run is."""
    return jnp.float64 if config.precision.compute_dtype == "float64" else jnp.float32


def compute_dtype(config: AnyConfig) -> str | None:
    """Returns the dtype that parameters are cast to for the computation; None where they all have it."""
    dtype = config.precision.compute_dtype
    stored_alike = config.precision.frozen_dtype is None and dtype in ("float32", "float64")
    return None if stored_alike else dtype


def least_bytes(config: AnyConfig) -> int:
    """Returns the bytes that a parameter takes at least: frozen ones may be stored in fewer."""
    return jnp.dtype(config.precision.frozen_dtype or param_dtype(config)).itemsize


def enable_float64(config: AnyConfig) -> None:
    """Enables float64 arrays in JAX where the config asks for them, for the rest of the process."""
    if config.precision.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def with_float64(config: AnyConfig) -> AbstractContextManager[Any]:
    """Returns a context in which JAX has the float64 arrays that the config asks for: as for a plan, not a run."""
    return jax.enable_x64(True) if config.precision.compute_dtype == "float64" else nullcontext()


def loss_scale(config: AnyConfig) -> DynamicLossScale | StaticLossScale | None:
    """Returns the loss scaling: by default dynamic for float16, none otherwise."""
    asked = config.precision.loss_scale
    if isinstance(asked, float | int):
        return StaticLossScale(asked)
    dynamic = asked == "dynamic" or (asked == "auto" and config.precision.compute_dtype == "float16")
    return DynamicLossScale() if dynamic else None
