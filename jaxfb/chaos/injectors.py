"""Makes a run go wrong on purpose: a flipped bit, another train state.

No run uses them but those of the tests and of `jaxfb chaos`, whose faults are in `faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfb.callbacks import Callback

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def with_flipped_bit(array: jax.Array, device: int, element: int, bit: int) -> jax.Array:
    """Returns a copy of a sharded array in which one bit differs, on one device alone.

    Args:
      device: the id of the device; other devices that keep the same part are unchanged.
      element: counted row by row within the part of that device. bit: of that element, from the lowest.
    """

    def part(shard: Any) -> jax.Array:
        values = np.array(shard.data)
        if shard.device.id == device:
            bits = values.reshape(-1).view(UNSIGNED[values.dtype.itemsize])
            bits[element % bits.size] ^= bits.dtype.type(1) << bits.dtype.type(bit)
        return jax.device_put(values, shard.data.sharding)

    parts = [part(shard) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


class AfterUpdate(Callback):
    """Changes the train state behind the back of the training loop, right after an update was computed.

    change: (state) -> state, called `times` times from the first time that update `update` (from 1) is computed.
    """

    def __init__(self, update: int, change: Callable[[Any], Any], times: int = 1):
        self._update, self._change, self._left = update, change, times

    def on_train_start(self, run: Any) -> None:
        work, compute = run.work, run.work.update

        def update(number: int, batch: Any) -> Any:
            result = compute(number, batch)
            if number + 1 >= self._update and self._left:
                self._left -= 1
                work.train_state = self._change(work.train_state)
            return result

        work.update = update
