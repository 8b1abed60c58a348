"""Refuses a run on CPU devices that the memory of this machine cannot hold: by the formula before anything is
allocated, and by the compiler's count before the first update runs.

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
from jaxfb.planner.counts import computed_bytes
from jaxfb.planner.job import model_sizes
from jaxfb.planner.too_large import SPARE, Planned, changes
from jaxfb.planner.topology import Topology, topology_of
from jaxfb.planner.verdict import Verdict, estimated
from jaxfb.platforms.machine_memory import free_memory, free_swap, host_memory
from jaxfb.refusal import Refused

LEAST = 0.6
"""Times the formula's temporaries that a step in float32 needs on CPUs at the least: quickstart with each remat, mesh8
and moe took 0.64 to 1.0 times as much when they were compiled. Numbers of two bytes have four there."""
ELSEWHERE = "another machine: `jaxfb plan` computes what fits where"
FEWER_ROWS = "use fewer rows in a microbatch"


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


def check_of_programs(config: Any) -> Callable[[jax.stages.Compiled], None] | None:
    """Returns what refuses a compiled update whose temporary buffers are larger than what is free; None where the
    devices are not CPUs.

    The state is there by then, so that nothing is estimated but what other processes do meanwhile.
    """
    if jax.devices()[0].platform != "cpu":
        return None
    return lambda program: _check_program(config, program.memory_analysis())


def _check_program(config: Any, counted: Any) -> None:
    """Raises Refused where the update needs more than is free; counted: the compiler's, of one device."""
    free, count = free_memory(), jax.local_device_count()
    if counted is None or free is None:
        return
    each = counted.temp_size_in_bytes + counted.output_size_in_bytes - counted.alias_size_in_bytes
    if count * each <= free + free_swap():
        return
    fitting = _fitting_beside(config, counted.temp_size_in_bytes, free)
    there = "" if (memory := host_memory()) is None else f" of this machine's {memory / 1e9:,.1f} GB"
    raise Refused(
        f"[memory] the compiled update needs {count * each / 1e9:,.1f} GB beside its state, but "
        f"{free / 1e9:,.1f}{there or ' GB'} are free; {fitting}"
    )


def _fitting_beside(config: Any, temporaries: float, free: float) -> str:
    """Returns what to do where a device needs these temporaries and so much is free beside the state."""
    if isinstance(config, Planned):
        topology = topology_of(jax.devices())
        with suppress(ValueError):  # a model of the user's own is not planned
            now = estimated(config, topology)
            state = jax.local_device_count() * _of_device(now, 0)
            times = temporaries / now.estimate.temporaries
            return _fitting(config, topology, state + (1 - SPARE) * free, times)
    return FEWER_ROWS


def least_times(config: Planned) -> float:
    """Returns how many times the formula's temporaries a step of the config needs on CPUs at the least."""
    return LEAST * max(1.0, 4 / computed_bytes(config))


def _needed(config: Planned, topology: Topology, times: float | None = None) -> float | None:
    """Returns the bytes that the devices of this process need; None for what the command itself refuses."""
    with suppress(ValueError):
        least = least_times(config) if times is None else times
        return jax.local_device_count() * _of_device(estimated(config, topology), least)
    return None


def _of_device(verdict: Verdict, times: float) -> float:
    counted = verdict.estimate
    return counted.arguments + times * counted.temporaries + sum(verdict.kept.values())


def _fitting(config: Planned, topology: Topology, memory: float, times: float | None = None) -> str:
    """Returns what to do: the change with which the config fits, or the largest starter config that does.

    times: the formula's temporaries that are needed; None for the least.
    """
    counted = least_times(config) if times is None else times
    for change, verdict in changes(config, topology):
        if jax.local_device_count() * _of_device(verdict, counted) < memory:
            return f"use {' '.join(change)}"
    smaller = _smaller_starters(config) if isinstance(config, Config) else ()
    for name, one in smaller:
        needed = _needed(one, topology, times)
        if needed is not None and needed < memory:
            return f"use a smaller model, such as the starter config {name}, or {ELSEWHERE}"
    return f"use a smaller model, or {ELSEWHERE}"


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
