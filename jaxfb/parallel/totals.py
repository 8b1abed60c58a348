"""Numbers about whole arrays, made shard by shard: a checksum of their bits, whether they are finite.

No device talks to another: each measures the shards that it has, one of several replicas counts, and the host adds up.
So the numbers are the same on every mesh, and a program has no collectives that could get in each other's way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.host_memory import brought, is_on_host
from jaxfb.parallel.sharding import axes_of
from jaxfb.platforms.runtime_errors import as_runtime_errors

Places = Sequence[Any]
Measure = Callable[[Sequence[jax.Array], Places], Sequence[jax.Array]]
SEEDS = ((0x9E3779B9, 0x7F4A7C15), (0x2545F491, 0xD1B54A33))
"""For each sum, what the numbers of rows and those of columns are made from."""

_AT_ONCE = 2**19  # elements of a sum on the host: what it is made of stays in the processor's caches
# parts that are added to each other before a sum; 16 are too many for wide registers
FOLDS, QUICK_FOLDS = 4, 8
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def checksums(leaves: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns 16 hexadecimal digits for each array, by its name: a sum over all elements of bits and place.

    Equal for equal bits, however they are sharded; one changed bit changes it. Every process of a job must call it.
    Each half word of 16 bits counts times an odd number of its row and one of its column (the last dim), modulo 2**32.
    So one flipped bit always shows; two cancel in both sums with a probability of at most 2**-34.

    Args:
      leaves: jax or numpy arrays, keys included. Of a dtype with less than a byte for an element it is None.
    """
    on_devices = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    known = {name: leaf for name, leaf in on_devices.items() if _has_bits(leaf.dtype)}
    on_host = {name: np.asarray(leaf) for name, leaf in leaves.items() if name not in on_devices}
    sums = dict(zip(known, totals(list(known.values()), _sums), strict=True))
    sums |= {name: _sums_on_host(array) for name, array in on_host.items() if _has_bits(array.dtype)}
    return {name: _digits(sums[name]) if name in sums else None for name in leaves}


@as_runtime_errors()
def sums_by_device(leaves: Mapping[str, jax.Array]) -> dict[str, dict[int, tuple[int, ...]]]:
    """Returns a sum of the part of each array that each device keeps, by name and id of the device.

    Equal parts have equal sums, wherever in the array they are; one changed bit changes the sum. It takes a fraction of
    the time of `checksums`, and is less sure of several changes: two flips of the highest bit cancel. Every process of
    a job must call it.

    Args:
      leaves: arrays on one mesh, all with a `NamedSharding`.
    """
    if not leaves:
        return {}
    if len(leaves) > 1 and (far := {name for name, leaf in leaves.items() if is_on_host(leaf.sharding)}):
        near = sums_by_device({name: leaf for name, leaf in leaves.items() if name not in far})
        return near | {
            name: one for each in sorted(far) for name, one in sums_by_device({each: leaves[each]}).items()
        }
    leaves = {name: brought(leaf) for name, leaf in leaves.items()}
    mesh = _mesh_of(next(iter(leaves.values())))
    rows = _gathered(_on_mesh(mesh, leaves.values(), _weighted, by_device=True))
    devices = [device.id for device in mesh.devices.flat]
    return {
        name: {device: tuple(map(int, row[number])) for device, row in zip(devices, rows, strict=True)}
        for number, name in enumerate(leaves)
    }


def finite(leaves: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Returns for each float array, by its name, whether it holds neither nan nor inf.

    A single number may be infinite: some optimizers begin with an infinite best value. Every process must call it.
    """
    floats = {name: leaf for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    counts = totals(list(floats.values()), _is_bad)
    return {name: not count.any() for name, count in zip(floats, counts, strict=True)}


@as_runtime_errors()
def totals(leaves: Sequence[jax.Array], measure: Measure) -> np.ndarray:
    """Adds up `measure` over the shards of each array, modulo 2**32: u32[num_leaves, k].

    measure: (blocks, places) -> u32[k] of each block; blocks are shards of one shape and dtype that begin at the same
      place, places (a u32[size] for each dim) the indices of their elements in the whole arrays.
    """
    far = [number for number, leaf in enumerate(leaves) if is_on_host(leaf.sharding)]
    # one after the other: all of them may be more than the devices have memory for
    found = {number: totals([brought(leaves[number])], measure)[0] for number in far}
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if number in found:
            continue
        sharding = leaf.sharding
        groups.setdefault(sharding.mesh if isinstance(sharding, NamedSharding) else None, []).append(number)
    parts = {}
    for mesh, numbers in groups.items():
        some = [leaves[number] for number in numbers]
        parts[mesh] = _on_mesh(mesh, some, measure) if mesh is not None else _alone(some, measure)
    for mesh, numbers in groups.items():
        rows = parts[mesh] if mesh is None else _added_up(parts[mesh])
        found.update(zip(numbers, map(np.asarray, rows), strict=True))
    return np.array([found[number] for number in range(len(leaves))], np.uint32)


def _on_mesh(
    mesh: Mesh, leaves: Collection[jax.Array], measure: Measure, by_device: bool = False
) -> jax.Array:
    return _program(mesh, tuple(map(_spec_of, leaves)), measure, by_device)(*leaves)


def _added_up(rows: jax.Array) -> np.ndarray:
    """Returns the sum over all devices, of other processes too: u32[leaves, k]."""
    parts = [np.asarray(part.data) for part in rows.addressable_shards]
    total = np.concatenate(parts).sum(0, dtype=np.uint32)
    if jax.process_count() > 1:
        total = multihost_utils.process_allgather(total).sum(0, dtype=np.uint32)
    return total


def _mesh_of(leaf: jax.Array) -> Mesh:
    mesh = getattr(leaf.sharding, "mesh", None)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"an array is on no mesh: {leaf.sharding}")
    return mesh


def _spec_of(leaf: jax.Array) -> P:
    # a restored random key has the spec of its data, one dim longer than the key
    return P(*leaf.sharding.spec[: leaf.ndim]) if isinstance(leaf.sharding, NamedSharding) else P()


def _gathered(rows: jax.Array) -> np.ndarray:
    """Returns the whole of an array that is cut over all devices, on every process."""
    if rows.is_fully_addressable:
        return np.asarray(rows)
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))


def _alone(leaves: list[jax.Array], measure: Measure) -> list[jax.Array]:
    """Measures arrays that are on one device, or placed in a way that only the host can put together."""
    blocks = [leaf if len(leaf.sharding.device_set) == 1 else jnp.asarray(leaf) for leaf in leaves]
    return [_whole(block, measure) for block in blocks]


@lru_cache(maxsize=32)
def _program(mesh: Mesh, specs: tuple[P, ...], measure: Measure, by_device: bool) -> Callable:
    """Returns u32[devices, leaves, k]; by_device: of each device's blocks alone, copies of others included."""

    def measured(blocks: Sequence[jax.Array], numbers: Sequence[int]) -> jax.Array:
        """Returns u32[numbers, k]; what blocks of one shape are multiplied by is made once."""
        alike: dict[Any, list[int]] = {}
        for number in numbers:
            spec = P() if by_device else specs[number]
            alike.setdefault((blocks[number].shape, blocks[number].dtype, spec), []).append(number)
        rows: dict[int, jax.Array] = {}
        for (shape, _, spec), some in alike.items():
            places = _places(shape, _starts(mesh, shape, spec))
            rows.update(zip(some, measure([blocks[number] for number in some], places), strict=True))
        return jnp.stack([rows[number] for number in numbers])

    def local(*blocks):
        if by_device:
            return measured(blocks, range(len(blocks)))[None]
        rows: dict[int, Any] = {}
        for used, numbers in _by_axes(specs).items():
            first = jnp.bool_(True)  # of the replicas the first counts
            for axis in mesh.axis_names:
                first &= (jax.lax.axis_index(axis) == 0) | (axis in used)
            some = jax.jit(partial(measured, numbers=numbers))  # traced once, not for its shape too
            nothing = jax.eval_shape(some, blocks)
            found = jax.lax.cond(first, some, lambda _, n=nothing: jnp.zeros(n.shape, n.dtype), blocks)
            rows.update(zip(numbers, found, strict=True))
        return jnp.stack([rows[number] for number in range(len(blocks))])[None]

    every = P(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False))


@partial(jax.jit, static_argnums=1)
def _whole(block: jax.Array, measure: Measure) -> jax.Array:
    return measure([block], _places(block.shape, [0] * block.ndim))[0]


def _by_axes(specs: Sequence[P]) -> dict[frozenset[str], list[int]]:
    """Returns the numbers of the arrays by the axes that cut them."""
    groups: dict[frozenset[str], list[int]] = {}
    for number, spec in enumerate(specs):
        axes = frozenset(axis for entry in spec for axis in axes_of(entry))
        groups.setdefault(axes, []).append(number)
    return groups


def _starts(mesh: Mesh, block: tuple[int, ...], spec: P) -> list[Any]:
    """Returns where this device's block begins in each dim of an array."""
    starts = []
    for size, entry in zip(block, [*spec, *[None] * (len(block) - len(spec))], strict=True):
        number = jnp.uint32(0)
        for name in axes_of(entry):
            number = number * mesh.shape[name] + jax.lax.axis_index(name).astype(jnp.uint32)
        starts.append(number * np.uint32(size % 2**32))
    return starts


def _places(block: tuple[int, ...], starts: Sequence[Any]) -> list[jax.Array]:
    """Returns, for each dim, the indices of a block's elements in the whole array, modulo 2**32."""
    return [jnp.arange(size, dtype=jnp.uint32) + start for size, start in zip(block, starts, strict=True)]


def _is_bad(blocks: Sequence[jax.Array], places: Places) -> list[jax.Array]:
    def bad(block: jax.Array) -> jax.Array:
        return jnp.isnan(block) if block.size == 1 and not block.ndim else ~jnp.isfinite(block)

    return [jnp.any(bad(block)).astype(jnp.uint32)[None] for block in blocks]


def _sums(blocks: Sequence[jax.Array], places: Places) -> list[jax.Array]:
    """Returns `_seeded_sums` of each block, u32[2], added up in an order in which it takes a quarter of the time."""
    if not blocks[0].size:
        return [jnp.zeros(len(SEEDS), jnp.uint32)] * len(blocks)
    *leading, last = places or [np.zeros(1, np.uint32)]
    words = [_words(block) for block in blocks]
    factors = _made(tuple(_column_factors(last, words[0].shape[-1])))
    rows = _made(tuple(_row_factors(leading, seed).reshape(-1, 1) for seed, _ in SEEDS))
    return [_summed(block.reshape(len(rows[0]), -1), rows, factors) for block in words]


@jax.jit
def _summed(words: jax.Array, rows: Sequence[jax.Array], factors: Sequence[jax.Array]) -> jax.Array:
    """Returns u32[2] of words [r, c] from numbers [r, 1] of rows, and [c] of low and high halves, for each of SEEDS."""
    low, high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    products = []
    for number, of_rows in enumerate(rows):
        halves = zip(_folded(low, of_rows, FOLDS), _folded(high, of_rows, FOLDS), strict=True)
        first, second = factors[2 * number : 2 * number + 2]
        products.append([one * first + other * second for one, other in halves])
    return reduce(jax.lax.add, map(_summed_together, zip(*products, strict=True)))


def _folded(words: jax.Array, rows: jax.Array, folds: int) -> list[jax.Array]:
    """Returns arrays whose sum over all rows is that of words [r, c] times rows [r, 1]; together 1/folds as long.

    On a CPU XLA adds up in one scalar, word after word; parts added to each other are done in wide registers.
    """
    part = len(words) // folds
    products = [words[at : at + part] * rows[at : at + part] for at in range(0, folds * part, part or 1)]
    rest = [words[folds * part :] * rows[folds * part :]] if len(words) % folds else []
    return [reduce(jax.lax.add, products), *rest] if part else rest


class PartSums:
    """The checksum of an array that is seen part by part, each element once; it needs little memory beside a part."""

    def __init__(self):
        self._sums = np.zeros(len(SEEDS), np.uint32)

    def add(self, part: np.ndarray, start: Sequence[int] = ()) -> None:
        """Adds a part of the array. start: where it begins in the first dims; 0 in those that are left out."""
        start = (*start, *[0] * (part.ndim - len(start)))
        rows = next((dim for dim in range(part.ndim - 1) if part.shape[dim] > 1), None)
        if rows is None or part.size <= _AT_ONCE:
            self._sums += _sums_on_host(part, start)
            return
        step = max(1, _AT_ONCE * part.shape[rows] // part.size)
        for first in range(0, part.shape[rows], step):
            cut = (*[slice(None)] * rows, slice(first, first + step))
            self.add(part[cut], (*start[:rows], start[rows] + first, *start[rows + 1 :]))

    @property
    def digits(self) -> str:
        """Returns what `checksums` gives for the whole array, once all of it was added."""
        return _digits(self._sums)


def _sums_on_host(array: np.ndarray, start: Sequence[int] = ()) -> np.ndarray:
    if not array.size:
        return np.zeros(len(SEEDS), np.uint32)
    start = start or [0] * array.ndim
    places = [
        np.arange(first, first + size, dtype=np.uint64).astype(np.uint32)
        for first, size in zip(start, array.shape, strict=True)
    ]
    bits = np.ascontiguousarray(array).reshape(-1).view(BITS[array.dtype.itemsize]).astype(np.uint32)
    return np.array(_seeded_sums(bits.reshape(*array.shape, -1), places))


def _digits(sums: np.ndarray) -> str:
    return "".join(f"{part:08x}" for part in sums)


def _seeded_sums(words: np.ndarray, places: Places) -> list[Any]:
    """Returns for each of SEEDS the sum of words [..., k] times numbers of their rows and columns, modulo 2**32.

    The two halves of a word count apart: of whole words, two flips of the highest bit would cancel.
    """
    *leading, last = places or [np.zeros(1, np.uint32)]
    factors = _column_factors(last, words.shape[-1])
    words = words.reshape(*map(len, leading), -1)
    low, high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    parts = [low * factors[at] + high * factors[at + 1] for at in range(0, len(factors), 2)]
    sums = [part.sum(-1, dtype=np.uint32) for part in parts]
    return [
        (part * _row_factors(leading, seed)).sum(dtype=np.uint32)
        for part, (seed, _) in zip(sums, SEEDS, strict=True)
    ]


def _column_factors(last: Any, number: int) -> list[Any]:
    """Returns for each of SEEDS the odd numbers of low and of high halves, for `number` words at each place."""
    columns = (last[:, None] * np.uint32(number) + np.arange(number, dtype=np.uint32)).reshape(-1)
    columns = columns * np.uint32(2)
    return [_mixed(half, seed) for _, seed in SEEDS for half in (columns, columns + np.uint32(1))]


def _row_factors(leading: Sequence[Any], seed: int) -> Any:
    """Returns an odd number for each place in the leading dims."""
    rows = np.zeros([1] * len(leading), np.uint32)
    for dim, indices in enumerate(leading):  # one mixed number a dim, so that no place needs the whole shape
        shape = [-1 if other == dim else 1 for other in range(len(leading))]
        rows = _mixed(rows + indices.reshape(shape), seed + 2 * dim)
    return rows | np.uint32(1)


def _summed_together(parts: Sequence[jax.Array]) -> jax.Array:
    """Adds up each of several arrays in one reduction, so that what they are made of is read once: u32[arrays]."""
    zeros = (np.uint32(0),) * len(parts)
    add = lambda one, other: tuple(map(jax.lax.add, one, other))  # noqa: E731
    return jnp.stack(jax.lax.reduce(tuple(parts), zeros, add, range(parts[0].ndim)))


def _weighted(blocks: Sequence[jax.Array], places: Places) -> list[jax.Array]:
    """Returns quicker sums, u32[1]: each word times an odd number of its row and one of its column in the block."""
    if not blocks[0].size:
        return [jnp.zeros(1, jnp.uint32)] * len(blocks)
    words = [_words(block) for block in blocks]
    words = [block.reshape(-1, block.shape[-1] * (block.shape[-2] if len(places) else 1)) for block in words]
    rows, columns = _made(tuple(2 * jnp.arange(size, dtype=jnp.uint32) + 1 for size in words[0].shape))
    parts = [[part * columns for part in _folded(block, rows[:, None], QUICK_FOLDS)] for block in words]
    return [reduce(jax.lax.add, map(_summed_together, [[part] for part in of_one])) for of_one in parts]


def _made(numbers: tuple) -> tuple:
    """Returns the same numbers; a compiler does not make them again for every element that they multiply."""
    return jax.lax.optimization_barrier(numbers)


def _words(block: jax.Array) -> jax.Array:
    """Returns u32[..., k], the bits of each element."""
    if jnp.issubdtype(block.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(block).reshape(*block.shape, -1).astype(jnp.uint32)
    if jnp.issubdtype(block.dtype, jnp.complexfloating):
        parts = [_words(part) for part in (block.real, block.imag)]
        return jnp.concatenate(parts, -1)
    if block.dtype == jnp.bool_:
        return block.astype(jnp.uint32)[..., None]
    bits = jax.lax.bitcast_convert_type(block, BITS[block.dtype.itemsize]).astype(jnp.uint32)
    return bits.reshape(*block.shape, -1)


def _mixed(index: Any, seed: int) -> Any:
    """Returns an odd number for each place, in u32 arithmetic of jax or numpy."""
    mixed = index * np.uint32(0x85EBCA6B) + np.uint32(seed)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0x27D4EB2F)
    return (mixed ^ (mixed >> np.uint32(16))) | np.uint32(1)


def _has_bits(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    whole = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8
    whole = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else whole
    return whole >= 8 and np.dtype(dtype).itemsize in (*BITS, 16)
