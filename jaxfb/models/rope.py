"""Rotary positions: the angle by which each pair of a head's numbers turns per token, and how it is stretched.

A model trained on short sequences reads longer ones when its slow frequencies are lowered; each published way to do
so is a `RopeScaling`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.mesh import kind_here, platform_here
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.parallel.context import own_part, whole_rows
from jaxfb.parallel.tensor import num_shards
from jaxfb.platforms.compat import custom_vjp
from jaxfb.platforms.kinds import V5E

LANES = 128


def frequencies(
    head_size: int, theta: float, scaling: RopeScaling | None = None, *, is_long: bool = False
) -> np.ndarray:
    """Returns the angle per token of each pair, float64[head_size / 2]: theta ** (-2i / head_size), scaled.

    is_long: for documents that are longer than the scaling's `original_length`; of "longrope" alone they differ.
    """
    plain = theta ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return plain
    if scaling.kind == "longrope":
        return plain / np.asarray(scaling.long_factors if is_long else scaling.short_factors)
    if scaling.kind == "linear":
        return plain / scaling.factor
    kept = (
        _kept_by_llama3(plain, scaling)
        if scaling.kind == "llama3"
        else _kept_by_yarn(head_size, theta, scaling)
    )
    return plain * kept + plain / scaling.factor * (1 - kept)


def amplitude(scaling: RopeScaling | None) -> float:
    """Returns what rotated queries and keys are each multiplied by: 1 but for yarn and longrope."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = math.log(scaling.factor)
    if scaling.kind == "yarn":
        return 0.1 * grown + 1
    return math.sqrt(1 + grown / math.log(max(scaling.original_length or 0, 2)))


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
    # negative where the original length is below 2 pi beta_slow: all frequencies then stay, as in transformers
    ramp = (np.arange(head_size // 2) - first) / ((last - first) or 0.001)
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
    angles = positions_RT[:, :, None, None].astype(wide) * _angle(
        x_RTHK.shape[-1], positions_RT, theta, scaling, wide
    )
    cos, sin = (
        jnp.asarray(amplitude(scaling), wide) * turned for turned in (jnp.cos(angles), jnp.sin(angles))
    )
    return _turned(x_RTHK, jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def _angle(
    size: int, positions_RT: jax.Array, theta: float, scaling: RopeScaling | None, dtype: jnp.dtype
) -> jax.Array:
    """Returns the angle per token of each pair, [K / 2], or [R, T, 1, K / 2] where long documents have others."""
    angle = jnp.asarray(frequencies(size, theta, scaling), dtype)
    if scaling is None or scaling.long_factors == scaling.short_factors:
        return angle
    of_long = jnp.asarray(frequencies(size, theta, scaling, is_long=True), dtype)
    is_long = document_lengths(positions_RT) > (scaling.original_length or 0)
    return jnp.where(is_long[:, :, None, None], of_long, angle)


def document_lengths(positions_RT: jax.Array) -> jax.Array:
    """Returns the length of each token's document, which ends where the next position is not one more: i32[R, T]."""
    whole = whole_rows(positions_RT)
    places = jnp.arange(whole.shape[1])
    is_end = jnp.append(whole[:, 1:] != whole[:, :-1] + 1, jnp.ones_like(whole[:, :1], bool), axis=1)
    end = jax.lax.cummin(jnp.where(is_end, places, whole.shape[1]), axis=1, reverse=True)
    return own_part(jnp.take_along_axis(whole, end, axis=1) + 1, 1)


def positions_in_documents(segments_RT: jax.Array) -> jax.Array:
    """Returns the place of each token in its document, i32[R, T]; padding within a document counts, other is 0."""
    whole = whole_rows(segments_RT)
    places = jnp.broadcast_to(jnp.arange(whole.shape[1]), whole.shape)
    last = jax.lax.cummax(jnp.where(whole > 0, places, 0), axis=1)
    following = jax.lax.cummin(jnp.where(whole > 0, places, whole.shape[1] - 1), axis=1, reverse=True)
    before, behind = (jnp.take_along_axis(whole, at, axis=1) for at in (last, following))
    document = jnp.where(before == behind, before, 0)
    is_start = jnp.append(jnp.ones_like(document[:, :1], bool), document[:, 1:] != document[:, :-1], axis=1)
    start = jax.lax.cummax(jnp.where(is_start, places, 0), axis=1)
    return own_part(jnp.where(document > 0, places - start, 0), 1)


@custom_vjp()
def _turned(x_RTHK: jax.Array, cos_RT1K: jax.Array, sin_RT1K: jax.Array) -> jax.Array:
    """Computes x * cos + (x with its halves swapped) * sin in the dtype of cos, without float32 arrays in HBM."""
    wide = cos_RT1K.dtype
    if turns_by_product(x_RTHK):
        x_RTHK, swapped = _swapped_by_product(x_RTHK, wide)
    else:
        first, second = jnp.split(x_RTHK, 2, axis=-1)
        swapped = jnp.concatenate([second, first], axis=-1)
    return (x_RTHK.astype(wide) * cos_RT1K + swapped.astype(wide) * sin_RT1K).astype(x_RTHK.dtype)


def turns_by_product(x: jax.Array) -> bool:
    """Returns whether halves are swapped by a product: on TPUs, for 16-bit heads that fill the lanes.

    By libtpu 0.0.48 a step of 8B on v6e:8x8 took 4.89 s in place of 4.91 s, with `remat=selective` 4.12 s in place of
    4.16 s, on v5p:4x4x4 9.30 s in place of 9.31 s. Not with a tensor axis, whose few heads of a device are in the
    chip's own memory anyway (405B would take 0.4 GB more), and not on v5e (6.74 s in place of 6.72 s).
    """
    fills = x.dtype.itemsize == 2 and x.shape[-1] % LANES == 0
    return platform_here() == "tpu" and kind_here() != V5E and fills and num_shards() == 1


def _swapped_by_product(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns x [..., K], and it with its halves swapped in a wider dtype, by a product with a permutation.

    Exact, since every sum has one term. Slices of half a head would fill half of a TPU's lanes and be written to HBM;
    a product computes the rotation as its result leaves the matrix unit. The barrier keeps the projection before it
    from handing on a wider copy.
    """
    x = jax.lax.optimization_barrier(x)
    size = x.shape[-1]
    permutation = jnp.asarray(np.roll(np.eye(size), size // 2, axis=1), x.dtype)
    return x, jnp.einsum("...k,kj->...j", x, permutation, preferred_element_type=dtype)


def _turned_forward(x_RTHK, cos_RT1K, sin_RT1K):
    return _turned(x_RTHK, cos_RT1K, sin_RT1K), (cos_RT1K, sin_RT1K)


def _turned_backward(residuals, cotangent):
    """Turns back: the transpose of a rotation is that by the opposite angle."""
    cos_RT1K, sin_RT1K = residuals
    return _turned(cotangent, cos_RT1K, -sin_RT1K), None, None


_turned.defvjp(_turned_forward, _turned_backward)
