"""Cuts the vocabulary of a head among neighbouring devices: each scores the tokens of all of them with its share.

In parts (`table.py`) every device is sent the whole head twice, and its whole gradient goes back: 4.2 GB for 8B and a
microbatch of any size. Here the devices form a grid. Each gathers a share of the vocabulary from its row; the devices
at the same place in all rows, which are neighbours, have all of it between them. They gather their hidden states
instead, and each scores the tokens of all. What they find is put together token by token, and the gradients of the
hidden states are summed over them. With 4,096 tokens on a device and 4 neighbours that is 1.2 GB.

All functions here run inside `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.mesh import kind_here, platform_here
from jaxfb.parallel.grid import Grid, adjacent_grids
from jaxfb.parallel.table import Table, pays
from jaxfb.platforms.kinds import V5E

_MOST_TOKENS = 1 / 3
"""How many tokens a device scores at most, for each id of the vocabulary.

The gradient of their hidden states then takes a third of the memory of the whole head's.
"""


@dataclass(frozen=True)
class Shares:
    """A share of a head's vocabulary on each device: vocab / grid.across of it."""

    grid: Grid

    def of(self, table: Table) -> jax.Array:
        """Gathers this device's share, [width, W] in the table's dtype, in the order of `ids`.

        W is vocab / across, or a little more where that does not fill a TPU's tiles.
        """
        return table.as_head(table.slice(self.grid, table.vocabulary, self._padded(table)))

    def ids(self, table: Table) -> jax.Array:
        """Returns the tokens of this device's share, i32[W]; those that pad it are one beyond the vocabulary."""
        vocab, padded = table.whole_shape[table.vocabulary], self._padded(table)
        if table.cut[0] != table.vocabulary:
            share = padded // self.grid.across
            ids = self.grid.row() * share + jnp.arange(share, dtype=jnp.int32)
            return jnp.minimum(ids, vocab)
        number = table.shard.shape[table.vocabulary]
        places = jnp.arange(self.grid.within, dtype=jnp.int32)[:, None] * self.grid.across + self.grid.row()
        own = jnp.arange(padded, dtype=jnp.int32)
        return jnp.where(own < number, places * number + own, vocab).reshape(-1)

    def absent(self, table: Table) -> tuple[tuple[int, int], ...]:
        """Returns the range of ids that pad shares, if any do."""
        vocab = table.whole_shape[table.vocabulary]
        return ((vocab, vocab + 1),) if self._padded(table) > table.shard.shape[table.vocabulary] else ()

    def relative(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (this device's scale relative to the largest of the neighbours, that one), both float[]."""
        largest = jnp.max(jnp.abs(self.together(jnp.reshape(scale, 1))))
        return scale / jnp.where(largest > 0, largest, 1), largest

    def scattered(self, table: Table, grad: jax.Array) -> Table:
        """Returns the gradient of the table's shard from that of the share, [width, W]."""
        return table.slice_scattered(self.grid, table.as_head(grad), table.vocabulary)

    def together(self, x: jax.Array) -> jax.Array:
        """Returns what all neighbours have, [across * n, ...], from this device's [n, ...]."""
        return self.grid.gather_across(x)

    def own(self, x: jax.Array) -> jax.Array:
        """Returns this device's [n, ...] of what `together` returned."""
        number = x.shape[0] // self.grid.across
        return lax.dynamic_slice_in_dim(x, self.grid.row() * number, number)

    def summed(self, x: jax.Array) -> jax.Array:
        """Returns this device's [n, ...] of the sum of [across * n, ...] over the neighbours."""
        return self.grid.scatter_across(x)

    def _padded(self, table: Table) -> int:
        """Returns the size of the vocabulary of a shard that is cut into shares of whole tiles."""
        number = table.shard.shape[table.vocabulary]
        tile = 128 if platform_here() == "tpu" else 1
        if table.cut[0] != table.vocabulary:
            return -(-number // (self.grid.across * tile)) * self.grid.across * tile
        tile //= math.gcd(tile, self.grid.within)
        return -(-number // tile) * tile


def shares_of(table: Table, num_tokens: int) -> Shares | None:
    """Returns the shares by which so many tokens of a device are scored; None: the head is better in parts."""
    vocab, width = table.whole_shape[table.vocabulary], table.whole_shape[1 - table.vocabulary]
    found = adjacent_grids(table.cut[1]) if pays(num_tokens, width, table.dtype) else []
    across = fewest_sent(kind_here(), [grid.across for grid in found], vocab, num_tokens)
    return next((Shares(grid) for grid in found if grid.across == across), None)


def fewest_sent(kind: str | None, numbers: Iterable[int], vocab: int, num_tokens: int) -> int | None:
    """Returns with which of these numbers of neighbours fewest bytes are sent; None: with none of them few enough.

    On v5e always None. There a step takes as much memory as its head does, and nothing is gained: by shares 8B on
    v5e:4x4 takes 12.3 GB in place of 12.0 GB, and 106.7 s in place of 106.5 s (libtpu 0.0.48).

    kind: of the devices. num_tokens: of a device.
    """
    if kind == V5E:
        return None
    few = [number for number in numbers if number * num_tokens <= _MOST_TOKENS * vocab]
    return min(few, key=lambda number: number * num_tokens + vocab / number, default=None)
