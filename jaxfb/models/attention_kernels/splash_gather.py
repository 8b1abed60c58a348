"""Attention over a context axis by splash's kernels on gathered keys: `jaxfb.parallel.context.gathered` without scores.

A device's queries are two pieces of the sequence, an early and a late one (`jaxfb.parallel.context.zigzag`), and it
gathers the keys and values of all devices, which stay in the order in which they come. One call of a kernel attends to
all of them, so that nothing is merged afterwards. Which blocks of keys each block of queries sees is in a table for
each device, of which it takes its own as the program runs; blocks that are seen in part have a mask.

Heads are gathered a group at a time, so that the keys of one travel while another's are used, forward and backward.

Shapes: R = rows, T = tokens on this device, S = tokens of the whole sequence, H = heads, G = kv heads, K = head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.models.attention_kernels import splash
from jaxfb.models.attention_kernels.splash_backward import attended, in_parts
from jaxfb.models.attention_kernels.splash_gradients import Settings
from jaxfb.models.attention_kernels.splash_order import seen_blocks, visits_of_devices
from jaxfb.models.attention_kernels.splash_sums import Keys
from jaxfb.parallel.collectives import gather_summing_wide
from jaxfb.parallel.context import AXIS, size_here, zigzag
from jaxfb.parallel.scores import PLAIN, Scores

MOST_GROUPS = 4
"""With 8 groups 8B takes as long at 32k and 128k tokens, and as much memory or 0.2 GB less. But each gather and scatter
is compiled by itself: 96 of them in place of 48."""
LARGEST_TABLE = 2**16
"""Pairs of blocks for which the tables, four bytes a pair, fit a TPU's memory for scalars."""


def refusal(query: Any, key: Any) -> str | None:
    """Returns why the kernels cannot take a device's [R, T, H, K] and [R, T, G, K], or None."""
    return splash.refusal_of_halves(query, key) or refused_length(query.shape[1], size_here())


def refused_length(length: int, size: int) -> str | None:
    """Returns why the tables cannot be made for so many tokens on each of so many devices, or None."""
    pairs = size * (length // splash.block_size(length // 2)) ** 2
    if pairs <= LARGEST_TABLE:
        return None
    return f"takes at most {LARGEST_TABLE} pairs of blocks, {length} tokens on each of {size} devices are {pairs}"


def splash_gathered(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Scores = PLAIN,
    *,
    segments: jax.Array | None,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes causal attention inside each segment over the whole sequence, of which every device has its zigzag part.

    Args:
      query: float[R, T, H, K].  key, value: float[R, T, G, K].
      scores, window: as those of `packed_attention`.
      segments: i32[R, T], or None.
      interpret: run the kernels step by step as plain JAX, on any platform: for tests.
    Returns:
      float[R, T, H, K].
    """
    groups = next(number for number in range(MOST_GROUPS, 0, -1) if key.shape[2] % number == 0)
    length, heads, size = query.shape[1:]
    settings = Settings(splash.block_size(length // 2), window, scores.softcap, interpret)
    order = _order(length, heads // key.shape[2], size, settings)
    passes = _kernel(heads // groups, length, settings), order
    ids = (None, None) if segments is None else (segments, lax.all_gather(segments, AXIS, axis=1, tiled=True))
    q, k, v = (jnp.split(jnp.swapaxes(x, 1, 2), groups, 1) for x in (splash.scaled(query), key, value))
    sinks = [None] * groups if scores.sinks is None else jnp.split(scores.sinks, groups)
    found = [_attend(passes, *group, ids, settings) for group in zip(q, k, v, sinks, strict=True)]
    return jnp.swapaxes(jnp.concatenate(found, 1), 1, 2)


def _attend(passes: tuple, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, ids: tuple, settings) -> Any:
    """Returns [R, H, T, K] of a group of heads whose keys are gathered."""
    (kernel, order), (own, of_all) = passes, ids
    key, value = (gather_summing_wide(x, AXIS, 2) for x in (k, v))
    return attended(kernel, order, q, Keys(key, value, of_all), own, sinks, settings)


def _kernel(num_heads: int, length: int, settings: Settings) -> Any:
    """Returns this device's forward kernel of one row."""
    plain = _plain(num_heads, settings.block, settings.softcap, settings.interpret)
    of_all = _tables_of_all(length, size_here(), settings.window)
    own = _of_this_device({name: getattr(of_all, name) for name in _OF_A_DEVICE})
    return type(plain)(of_all._replace(**own), None, None, **plain.kwargs)


def _order(length: int, shared: int, size: int, settings: Settings) -> Any:
    """Returns this device's visits of the backward."""
    distances = _distances(length, size_here(), settings.block)
    return _of_this_device(in_parts(distances, shared, size, settings, visits_of_devices), keeps_dim=False)


def _of_this_device(tables: Any, keeps_dim: bool = True) -> Any:
    """Returns this device's part of tables [C, ...]."""
    device = lax.axis_index(AXIS)
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(jnp.asarray(x), device, keepdims=keeps_dim), tables
    )


@lru_cache(maxsize=64)
def _plain(num_heads: int, block: int, softcap: float | None, interpret: bool) -> Any:
    """Returns the kernel of one block, for what it does beside its masks."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    mask = splash_attention.FullMask((block, block))
    return splash.made(mask, num_heads, softcap, interpret)


_OF_A_DEVICE = ("data_next", "block_mask", "mask_next")


@lru_cache(maxsize=16)
def _tables_of_all(length: int, size: int, window: int | None) -> Any:
    """Returns the forward's tables [C, blocks of queries, W] of all devices: which keys' block is next."""
    block = splash.block_size(length // 2)
    masks, kinds = _masks(block, window)
    return _Table.of(_distances(length, size, block), block, window, kinds).info(masks)


@lru_cache(maxsize=16)
def _distances(length: int, size: int, block: int) -> np.ndarray:
    """Returns how many blocks the queries of each device are behind the keys of all, i32[C, of queries, of keys]."""
    places = zigzag(length * size, size)[::block] // block
    return places.reshape(size, -1, 1) - places


def _masks(block: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns what queries see of blocks of which they see a part, bool[N, queries, keys], and their distances [N].

    A distance is the number of blocks from the keys' to the queries' in the sequence.
    """
    last = 0 if window is None else seen_blocks(block, window) - 1
    after = np.arange(block)[:, None] - np.arange(block)
    masks = {
        d: (after + d * block >= 0) & (window is None or after + d * block < window) for d in range(last + 1)
    }
    partial = {d: mask for d, mask in masks.items() if not mask.all()}
    return np.stack([*partial.values()]), np.array([*partial])


class _Table(NamedTuple):
    """Names for each device and block of queries the blocks of keys that it sees in turn.

    others: i16[C, N, W], their numbers; behind the last that is seen, that one. seen: i8[C, N, W], 0 nothing more, 1 in
    part, 2 whole. mask: i8[C, N, W], the number of the mask of what is seen in part.
    """

    others: np.ndarray
    seen: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, distances: np.ndarray, block: int, window: int | None, kinds: np.ndarray) -> _Table:
        """Makes those of distances i32[C, N, M] between blocks; kinds: the distances that `_masks` has a mask of."""
        number = distances.shape[2] if window is None else min(distances.shape[2], seen_blocks(block, window))
        visible = (distances >= 0) & (window is None or distances < seen_blocks(block, window))
        count = visible.sum(2, keepdims=True)
        step = np.minimum(np.arange(number), np.maximum(count - 1, 0))
        others = np.take_along_axis(np.argsort(~visible, 2, stable=True), step, 2)
        found = np.take_along_axis(distances, others, 2)[..., None] == kinds
        seen = np.where(np.arange(number) < count, np.where(found.any(3), 1, 2), 0)
        return cls(others.astype(np.int16), seen.astype(np.int8), found.argmax(3).astype(np.int8))

    def info(self, masks: np.ndarray) -> Any:
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

        return MaskInfo(self.others, self.mask, self.seen, masks, q_sequence=None)
