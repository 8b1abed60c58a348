"""Repeats an update from the same state and compares all bits: the only way to notice a device that computes wrongly.

Where two runs differ, a third decides. A fault that does not come back is transient; where no two runs agree, a fixed
computation on every device tells a broken device from a program that is not deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxfb.guard.devices import failed_self_test
from jaxfb.parallel.host_memory import HOST
from jaxfb.parallel.totals import checksums, sums_by_device
from jaxfb.training.guard import by_path, listed
from jaxfb.training.work import Work

PyTree = Any
Sums = Mapping[str, Any]  # by path of the array


@dataclass(frozen=True)
class Verdict:
    """The result of repeating an update.

    cause:   "none", "transient" (a third run agreed with one of two), "device" or "software".
    leaves:  paths of the arrays of the train state that differed between the first two runs.
    devices: ids of the devices that failed the self test.
    """

    cause: str = "none"
    leaves: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"two runs from one state differ in {listed(list(self.leaves))}"
        names = ", ".join(map(str, self.devices))
        return {
            "none": "two runs from one state are the same bits",
            "transient": f"{what}; a third run agreed with one of them, so the fault was transient",
            "device": f"{what + '; ' if self.leaves else ''}device {names} fails a fixed computation that all others "
            "agree on: replace it",
            "software": f"{what}, and so does a third, though every device passes its test: the program is not "
            "deterministic (on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true)",
        }[self.cause]


def update_twice(work: Work, number: int, batch: Any) -> tuple[Any, Verdict]:
    """Computes an update twice from one state, three times where they differ; the last run's state stays.

    Memory: a copy of the train state, in the host's memory where the platform has pinned memory.

    Returns:
      (what `work.update` returns, the verdict).
    """
    kept, places = _kept(work.train_state), jax.tree.map(lambda leaf: leaf.sharding, work.train_state)
    _, first = _run(work, number, batch)
    _put_back(work, kept, places)
    result, second = _run(work, number, batch)
    if not (leaves := [name for name in first if first[name] != second[name]]):
        bad = failed_self_test(work.mesh)
        return result, Verdict("device" if bad else "none", (), tuple(bad))
    _put_back(work, kept, places)
    result, third = _run(work, number, batch)
    if third in (first, second):
        return result, Verdict("transient", tuple(leaves))
    bad = failed_self_test(work.mesh)
    return result, Verdict("device" if bad else "software", tuple(leaves), tuple(bad))


def _run(work: Work, number: int, batch: Any) -> tuple[Any, Sums]:
    """Computes the update; returns what it returns and the new state's sums."""
    result = work.update(number, batch)
    return result, _sums(by_path(work.train_state))


def _sums(leaves: Mapping[str, jax.Array]) -> Sums:
    """Returns sums of every copy on every device, since any of them may be the wrong one."""
    on_mesh = {name: leaf for name, leaf in leaves.items() if isinstance(leaf.sharding, NamedSharding)}
    others = {name: leaf for name, leaf in leaves.items() if name not in on_mesh}
    return {**sums_by_device(on_mesh), **checksums(others)}


def _kept(state: PyTree) -> PyTree:
    """Returns a copy that the next update does not overwrite."""

    def place(leaf):
        memories = next(iter(leaf.devices())).addressable_memories()
        has_host = any(memory.kind == HOST for memory in memories)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf.sharding.with_memory_kind(HOST) if has_host and not is_key else leaf.sharding

    # all leaves in one call, which takes a quarter less than one call for each
    return jax.block_until_ready(jax.device_put(state, jax.tree.map(place, state), may_alias=False))


def _put_back(work: Work, kept: PyTree, places: PyTree) -> None:
    """Replaces the train state by a copy of the kept one: the update donates it."""
    work.train_state = None  # type: ignore[assignment] # its memory is free for the copy
    work.train_state = jax.device_put(kept, places, may_alias=False)
