"""Rotary positions: the angle by which each pair of a head's numbers turns per token, and how it is stretched.

A model trained on short sequences reads longer ones when its slow frequencies are lowered; each published way to do
so is a `RopeScaling`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.models.rope_scaling import RopeScaling


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns the angle per token of each pair, float64[head_size / 2]: theta ** (-2i / head_size), scaled."""
    plain = theta ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    kept = (
        _kept_by_llama3(plain, scaling)
        if scaling.kind == "llama3"
        else _kept_by_yarn(head_size, theta, scaling)
    )
    return plain * kept + plain / scaling.factor * (1 - kept)


def amplitude(scaling: RopeScaling | None) -> float:
    """Returns what rotated queries and keys are each multiplied by: 1 but for yarn."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return (
        0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor
    )


def _kept_by_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns the share of each frequency that stays: 1 for fast ones, 0 for slow ones."""
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _kept_by_yarn(head_size: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    length = scaling.original_length or 0

    def pair_of(turns: float) -> float:
        """Returns which pair makes so many turns within the original length."""
        return head_size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = (np.arange(head_size // 2) - first) / max(last - first, 0.001)
    return 1 - np.clip(ramp, 0, 1)


def rotate(
    x_RTHK: jax.Array,
    positions_RT: jax.Array,
    theta: float,
    scaling: RopeScaling | None = None,
    *,
    size: int | None = None,
) -> jax.Array:
    """Rotates the two halves of each head by its position (arXiv:2104.09864), as Llama's weights expect.

    Computed in float32, or float64 for float64. [R, T, H, K] -> the same.

    Args:
      size: of each head only the first so many numbers turn; None: all.
    """
    if size is not None and size < x_RTHK.shape[-1]:
        turned = rotate(x_RTHK[..., :size], positions_RT, theta, scaling)
        return jnp.concatenate([turned, x_RTHK[..., size:]], axis=-1)
    wide = jnp.promote_types(x_RTHK.dtype, jnp.float32)
    angle = jnp.asarray(frequencies(x_RTHK.shape[-1], theta, scaling), wide)
    angles = positions_RT[:, :, None, None].astype(wide) * angle
    cos, sin = (
        jnp.asarray(amplitude(scaling), wide) * turned for turned in (jnp.cos(angles), jnp.sin(angles))
    )
    first, second = jnp.split(x_RTHK.astype(wide), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x_RTHK.dtype)
