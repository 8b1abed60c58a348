"""Answers a run that ran out of memory: what the step needs by the plan's formula, and changes with which it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import jax

from jaxfb.config import Config, config_from_dict, config_to_dict
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.config.sections import AutoMesh
from jaxfb.mesh import SHARD_AXES
from jaxfb.planner.auto import choose
from jaxfb.planner.text import memory_table
from jaxfb.planner.topology import Topology, topology_of
from jaxfb.planner.verdict import Verdict, estimated
from jaxfb.platforms import pinned_memory
from jaxfb.platforms.machine_memory import host_memory
from jaxfb.platforms.runtime_errors import is_of_runtime
from jaxfb.process.os_errors import FULL
from jaxfb.training.machine import bytes_of_device

Planned = Config | PostTrainingConfig
SHOWN = 3
SPARE = 0.1  # of the memory, that a proposal leaves free: the formula is not a compiler


def remedy(config: Any, error: BaseException | None = None) -> str:
    """Returns what to do about a lack of memory on the devices of this process, or on the host for its GPUs.

    config: of a training command; of anything else, and of a model of the user's own, nothing is planned.
    """
    if pinned_memory.is_exhausted(error):
        return _with_less_on_host(config)
    if isinstance(config, Config | PostTrainingConfig):
        with suppress(ValueError):
            return advice(config, jax.devices(), bytes_of_device(jax.local_devices()))
    return "use fewer rows or tokens at a time, parallel.remat=full where it trains, or more devices"


def advice(config: Planned, devices: list[Any], available: float | None) -> str:
    """Returns the plan's table of memory for a config on these devices, and up to three changes that fit.

    Args:
      available: bytes of one device; None where that is not known, and then the changes that need least are named.
    """
    topology = topology_of(devices)
    if isinstance(config, Config) and isinstance(config.mesh, AutoMesh):
        config = choose(config, topology, available).config
    now = estimated(config, topology)
    lines = [*memory_table(now)]
    lines += [f"  of a device{'':<13}{available / 1e9:>9.2f} GB"] if available else []
    return "\n".join([*lines, *_proposals(config, topology, (1 - SPARE) * available if available else None)])


def would_fit(config: Planned, verdict: Verdict) -> str:
    """Returns up to three changes of a config with which what does not fit by its verdict would.

    Where a compiler counted more than the formula, so much more is added to what the formula counts of a change.
    """
    assert verdict.available is not None
    formula = replace(verdict, compiled=None).needed
    times = max(1.0, verdict.needed / formula)
    return "\n".join(_proposals(config, verdict.topology, (1 - SPARE) * verdict.available, times))


def _proposals(config: Planned, topology: Topology, most: float | None, times: float = 1.0) -> Iterator[str]:
    """Yields the lines of up to three changes that need less than so many bytes; of None, less than the config."""
    less = estimated(config, topology).needed if most is None else most / times
    found = (
        (change, verdict.needed) for change, verdict in changes(config, topology) if verdict.needed < less
    )
    if not (shown := list(islice(found, SHOWN))):
        yield "fewer rows and recomputation are not enough: use more devices, shorter rows, or a smaller model"
        return
    what = "what needs less" if most is None else "what would fit"
    by = "the same formula" if times == 1 else f"{times:.2f} times the formula, as the compiler counts here"
    yield f"{what}, by {by}:"
    yield from (f"  {' '.join(change)}: {times * needed / 1e9:.2f} GB" for change, needed in shown)


def _with_less_on_host(config: Any) -> str:
    """Returns what to do where the pinned memory of the host that a GPU may use is too small."""
    fewer = []
    if isinstance(config, Config | PostTrainingConfig):
        fewer += ["optimizer.memory=device"] * (config.optimizer.memory == "host")
        fewer += ["parallel.remat=layer"] * ("offload" in config.parallel.remat)
    ways = [f"keep less on the host with {' '.join(fewer)}"] if fewer else []
    limit, there = pinned_memory.limit(), (host_memory() or 0) // 2**30
    if there > limit:
        ways += [f"set the environment variable {pinned_memory.LIMIT} to as much as {there}"]
    advice = " or ".join(ways) or "use more hosts, or hosts with more memory"
    return f"each GPU may use {limit} GiB of the host's memory, and no more is free; {advice}"


def changes(config: Planned, topology: Topology) -> Iterator[tuple[list[str], Verdict]]:
    """Yields changes of a config that need less, the cheapest in time first, with their verdicts."""
    devices, now = topology.num_devices, estimated(config, topology)
    rows = now.rows_per_microbatch
    fewer = [size for size in (rows // 2, rows // 4, 1) if 0 < size < rows and rows % size == 0]
    keys = [_smaller(config, rows // size, now) for size in dict.fromkeys(fewer)]
    cuts = _cut_over_replicas(config, now)
    keys += cuts
    if devices > 1 and config.parallel.overlap_grad_reduce is not False:
        keys += [["parallel.overlap_grad_reduce=false"]]
    if devices > 1 and config.parallel.gather_ahead in (None, True):
        keys += [["parallel.gather_ahead=half"]]
    if config.optimizer.memory == "device" and topology.platform != "cpu":
        keys += [["optimizer.memory=host"]]
    if devices > 1 and config.parallel.gather_ahead is not False:
        keys += [["parallel.gather_ahead=false"]]
    keys += [[*cut, "parallel.remat=full"] for cut in ([], *keys) if config.parallel.remat != "full"]
    full = [] if config.parallel.remat == "full" else ["parallel.remat=full"]
    together = [*(_smaller(config, rows, now) if rows > 1 else []), *(cuts[-1] if cuts else []), *full]
    keys += [together] * bool(together)
    if config.optimizer.memory == "device" and topology.platform != "cpu":
        keys += [[*together, "optimizer.memory=host"]]
    for change in map(list, dict.fromkeys(map(tuple, keys))):
        with suppress(ValueError):  # rows that do not divide, or an axis that the model does not
            verdict = estimated(config_from_dict(config_to_dict(config), change), topology)
            if verdict.needed < now.needed:
                yield change, verdict


def _cut_over_replicas(config: Planned, now: Verdict) -> list[list[str]]:
    """Returns overrides that cut parameters over all replicas, and those that gather them a layer at a time as well."""
    replicas, found = now.mesh["data"], []
    if replicas > 1:
        found = [["mesh.data=1", f"mesh.fsdp={replicas * now.mesh['fsdp']}"]]
    cut = found or any(now.mesh.get(axis, 1) > 1 for axis in SHARD_AXES)
    if cut and config.parallel.fsdp_gather != "layer":
        found += [[*(found[0] if found else []), "parallel.fsdp_gather=layer"]]
    return found


def _smaller(config: Planned, times: int, now: Verdict) -> list[str]:
    """Returns overrides that make microbatches so many times smaller, by the keys that cut them now."""
    if isinstance(config, Config):
        return _smaller_cut("batch", config.batch, times, now)
    cuts = {f"plans.{name}": cut for name, cut in vars(config.plans).items() if cut is not None}
    return [text for name, cut in cuts.items() for text in _smaller_cut(name, cut, times, now)]


def _smaller_cut(section: str, cut: Any, times: int, now: Verdict) -> list[str]:
    if tokens := getattr(cut, "max_tokens_per_microbatch", None):
        length = now.tokens // now.rows
        return [f"{section}.max_tokens_per_microbatch={max(length, tokens // times)}"]
    found = []
    if cut.rows_per_microbatch:
        found += [f"{section}.rows_per_microbatch={max(1, cut.rows_per_microbatch // times)}"]
    if cut.num_microbatches:
        found += [f"{section}.num_microbatches={cut.num_microbatches * times}"]
    return found


def is_lack_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had too little memory."""
    is_exhausted = is_of_runtime(error) and "RESOURCE_EXHAUSTED" in str(error)
    of_device = is_exhausted and not any(os.strerror(number) in str(error) for number in FULL)  # of a disk
    return of_device or isinstance(error, MemoryError)
