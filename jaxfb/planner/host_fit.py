"""Refuses, before anything is allocated, a run on CPU devices that the memory of this machine cannot hold.

A lack of memory on a GPU or TPU is an error, which `too_large.py` answers. On a CPU the system swaps or ends the
process without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax

from jaxfb.config import Config, DPOConfig, SFTConfig, load_config, starter_names
from jaxfb.models.config import num_params
from jaxfb.planner.job import model_sizes
from jaxfb.planner.too_large import SPARE, Planned, changes
from jaxfb.planner.topology import Topology, topology_of
from jaxfb.planner.verdict import Verdict, estimated
from jaxfb.refusal import Refused
from jaxfb.training.machine import free_memory, host_memory

TEMPORARIES = 1.2
"""Times the formula's temporaries that a step needs on CPUs at the least: it has two bytes for most numbers, and there
most have four. Configs that were compiled for CPUs needed 1.24 to 2.0 times as much."""


def check_host(config: Any, say: Callable[[str], None] = print) -> None:
    """Refuses a config whose step needs more than the memory of this machine, and warns where less is free.

    Of accelerators, of a user's own model and of policies, whose task would have to be made first, nothing is refused.

    Raises:
      ValueError: names what is needed, what there is, and what would fit.
    """
    memory, devices = host_memory(), jax.devices()
    is_counted = isinstance(config, Config | SFTConfig | DPOConfig)
    if memory is None or devices[0].platform != "cpu" or not is_counted:
        return
    needed = _needed(config, topology_of(devices))
    if needed is None:
        return
    least = f"the run needs {needed / 1e9:,.1f} GB at the least, by the formula of `jaxfb plan`"
    if needed > memory:
        fitting = _fitting(config, topology_of(devices), (1 - SPARE) * memory)
        raise Refused(f"[memory] {least}, but this machine has {memory / 1e9:,.1f} GB; {fitting}")
    if (free := free_memory()) is not None and needed > free:
        say(f"[memory] {least}, and {free / 1e9:,.1f} of this machine's {memory / 1e9:,.1f} GB are free")


def _needed(config: Planned, topology: Topology) -> float | None:
    """Returns the bytes that the devices of this process need; None for what the command itself refuses."""
    with suppress(ValueError):
        return jax.local_device_count() * _of_device(estimated(config, topology))
    return None


def _of_device(verdict: Verdict) -> float:
    counted = verdict.estimate
    return counted.arguments + TEMPORARIES * counted.temporaries + sum(verdict.kept.values())


def _fitting(config: Planned, topology: Topology, memory: float) -> str:
    """Returns what to do: the change with which the config fits, or the largest starter config that does."""
    for change, verdict in changes(config, topology):
        if jax.local_device_count() * _of_device(verdict) < memory:
            return f"use {' '.join(change)}"
    smaller = _smaller_starters(config) if isinstance(config, Config) else ()
    for name, one in smaller:
        needed = _needed(one, topology)
        if needed is not None and needed < memory:
            return f"use a smaller model, such as the starter config {name}"
    return "use a smaller model"


def _smaller_starters(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the starter configs of the same command that have fewer parameters, the largest first."""
    all_of_them = ((name, load_config(name)) for name in starter_names())
    counted = [
        (num_params(model_sizes(one)), name, one) for name, one in all_of_them if isinstance(one, Config)
    ]
    mine = num_params(model_sizes(config))
    for count, name, one in sorted(counted, key=lambda found: (-found[0], found[1])):
        if count < mine:
            yield name, one
