"""Chooses the layout of a config that leaves its mesh open (`mesh: auto`), by the formula that orders a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfb.config import Config, config_to_dict
from jaxfb.config.sections import MeshConfig, ParallelConfig
from jaxfb.models.config import TransformerConfig
from jaxfb.planner.candidates import REMAT, Fixed, label
from jaxfb.planner.chips import GPUS, TPUS
from jaxfb.planner.formula.estimate import Estimate, estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.search import by_formula, picked
from jaxfb.planner.topology import Topology, topology_of
from jaxfb.planner.verdict import MARGIN, estimated
from jaxfb.refusal import Refused
from jaxfb.training.machine import bytes_of_device
from jaxfb.training.open_mesh import layout_of

Counted = tuple[Estimate, Config]
OTHERS = 2
"""Meshes that are named beside the one that is taken."""
TRIED = 24
"""Layouts of which it is asked, the fastest first, whether `jaxfb train` takes them."""
_CONTEXTS = (1, 2, 4, 8, 16, 32)
_MORE = (2, 4, 8, 16, 32, 64)
"""Times as many devices are asked about where a job does not fit."""
_OF_STAGES = ("layers_per_stage", "head_placement", "pieces")


@dataclass(frozen=True)
class Chosen:
    """config: with the layout. values: the layout alone, as sections of a config. lines: what to print."""

    config: Config
    values: dict[str, Any]
    lines: list[str]


def choose_here(config: Config) -> Chosen:
    """Returns the layout for all devices of this job; a device has the memory that this process may use of its own.

    Raises:
      ValueError: the speed of the devices is not known, or as `choose`.
    """
    devices = jax.devices()
    topology = topology_of(devices)
    if topology.chip is None and devices[0].platform != "cpu":
        raise Refused(
            f"[mesh] auto knows the speed of {', '.join((*TPUS, *GPUS))}, not of {devices[0].device_kind}; "
            f"give sizes, such as mesh.fsdp={len(devices)}"
        )
    return choose(config, topology, bytes_of_device(jax.local_devices()))


def choose(config: Config, topology: Topology, available: float | None = None) -> Chosen:
    """Returns the fastest layout that fits, by formula, and what was to be had in its place.

    What the config gives of a layout stays: rows a microbatch, and remat, fsdp_gather, schedule and chunks where they
    are not their defaults. The sequence is cut only where nothing fits or divides otherwise. Simulated devices have no
    speed: there it is the layout that sends least, rows over all devices where one has the memory.

    Args:
      config: its mesh is `auto`.
      available: bytes that may be used of a device; None: all that its kind has.
    Raises:
      ValueError: no layout is legal, or none fits.
    """
    _check_stages(config)
    fixed, topology, refusals = fixed_by(config), _with_memory(topology, available), []
    for context in _contexts(config, topology):
        opened = _opened(config, context)
        try:
            return _chosen(opened, topology, fixed, available)
        except Refused as error:
            refusals.append(error)
    raise refusals[0]


def fixed_by(config: Config) -> Fixed:
    """Returns what a config gives of its layout."""
    parallel, default = config.parallel, ParallelConfig()
    return Fixed(
        remat=None if parallel.remat == default.remat else parallel.remat,
        gather=None if parallel.fsdp_gather == default.fsdp_gather else parallel.fsdp_gather,
        rows=config.batch.rows_per_microbatch,
        microbatches=config.batch.num_microbatches,
        schedule=config.schedule,
        chunks=None if config.chunks == 1 else config.chunks,
    )


def _opened(config: Config, context: int) -> Config:
    """Returns the config on one stage, where no schedule is legal."""
    return replace(config, mesh=MeshConfig(data=1, context=context), schedule=None, chunks=1)


def _check_stages(config: Config) -> None:
    """Refuses what has a meaning for given stages alone."""
    default = ParallelConfig()
    for name in _OF_STAGES:
        if (value := getattr(config.parallel, name)) != getattr(default, name):
            raise Refused(
                f"[mesh] auto chooses the stages, and parallel.{name}={value} is for given ones; leave one of the "
                "two out",
                [{f"parallel.{name}": getattr(default, name)}],
            )


def _with_memory(topology: Topology, available: float | None) -> Topology:
    if topology.chip is None or not available:
        return topology
    return replace(topology, chip=replace(topology.chip, memory=min(available, topology.chip.memory)))


def _contexts(config: Config, topology: Topology) -> Iterator[int]:
    for size in _CONTEXTS:
        divides = topology.num_devices % size == 0 and config.data.sequence_length % (2 * size) == 0
        if divides or size == 1:
            yield size


def _chosen(opened: Config, topology: Topology, fixed: Fixed, available: float | None) -> Chosen:
    sizes = model_sizes(opened)
    counted = by_formula(opened, sizes, topology, fixed)
    if topology.chip is None:
        memory, why = available or math.inf, "no speed is known of simulated devices, so what sends least"
        ranked = sorted(counted, key=lambda pair: _sending(*pair, memory))
        fitting = [one for total, one in ranked if total.total <= memory]
        layouts = fitting or [min(counted, key=lambda pair: pair[0].total)[1]]
    else:
        memory, why = topology.chip.memory, f"the fastest that fits of {len(counted)} layouts, by formula"
        ranked = sorted(counted, key=lambda pair: pair[0].seconds)
        layouts = _fastest(counted, sizes, topology, fixed)
    if estimate(layouts[0], sizes, topology).total > memory:
        raise _too_large(layouts[0], sizes, topology, fixed, memory)
    best = _taken(layouts[:TRIED], topology, memory)
    taken = estimate(best, sizes, topology)
    most = max(taken.total, (1 - MARGIN) * memory)
    others = _others(best, [pair for pair in ranked if pair[0].total <= most])
    close = taken.total > (1 - MARGIN) * memory
    lines = [
        f"mesh: auto on {topology.text}, {why}:",
        _line("  ", (taken, best), memory) + (", closer than the formula can tell" if close else ""),
        *(_line("  rather than ", pair, memory) for pair in others),
        *([f"  as given: {given}"] if (given := _given(fixed)) else []),
    ]
    return Chosen(best, layout_of(config_to_dict(best)), lines)


def _given(fixed: Fixed) -> str:
    names = {"gather": "fsdp_gather", "rows": "rows_per_microbatch", "microbatches": "num_microbatches"}
    values = {names.get(name, name): value for name, value in vars(fixed).items() if value is not None}
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _fastest(
    counted: list[Counted], sizes: TransformerConfig, topology: Topology, fixed: Fixed
) -> list[Config]:
    """Returns the fastest first: of those with memory to spare for the formula's error, then of those that fit, then of
    those with the optimizer's state on the host.
    """
    assert topology.chip is not None
    tries = []
    for spare in (MARGIN, 0.0):
        chip = replace(topology.chip, memory=(1 - spare) * topology.chip.memory)
        found = picked(counted, sizes, replace(topology, chip=chip), TRIED, fixed=fixed)
        fits = estimate(found[0], sizes, topology).total <= chip.memory
        if fits and found[0].optimizer.memory == counted[0][1].optimizer.memory:
            return found
        tries.append((not fits, found))
    return min(tries, key=lambda one: one[0])[1]


def _sending(counted: Estimate, config: Config, memory: float) -> tuple:
    """Returns the order of layouts on devices without a speed."""
    mesh, parallel = config.mesh, config.parallel
    word = parallel.remat.split("+")[0].split("*")[0]
    again = REMAT.index(word) if word in REMAT else len(REMAT)
    cuts = (mesh.pipe, mesh.tensor, mesh.context, mesh.fsdp, mesh.expert)
    return counted.total > memory, *cuts, again, parallel.fsdp_gather != "layer", label(config)


def _taken(layouts: list[Config], topology: Topology, memory: float) -> Config:
    """Returns the first layout that `jaxfb train` would not refuse and whose state, counted by its arrays, fits too."""
    refusals = []
    for one in layouts:
        try:
            verdict = estimated(one, topology)
        except ValueError as error:
            refusals.append(str(error))
            continue
        if verdict.needed <= memory:
            return one
        refusals.append(f"{label(one)} needs {verdict.needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB")
    raise Refused(
        f"[mesh] auto found no layout: {refusals[0]}; give sizes, such as mesh.fsdp={topology.num_devices}"
    )


def _others(best: Config, ranked: list[Counted]) -> list[Counted]:
    """Returns the first of each other mesh."""
    firsts: dict[Any, Counted] = {}
    for pair in ranked:
        if pair[1].mesh != best.mesh:
            firsts.setdefault(pair[1].mesh, pair)
    return list(firsts.values())[:OTHERS]


def _line(before: str, pair: Counted, memory: float) -> str:
    counted, config = pair
    of = f" of {_number(memory / 1e9)}" if math.isfinite(memory) else ""
    time = f"{counted.seconds:.2f} s a step, " if counted.seconds else ""
    return f"{before}{label(config)}: {time}{_number(counted.total / 1e9)}{of} GB a device"


def _number(gigabytes: float) -> str:
    return f"{gigabytes:.1f}" if gigabytes >= 1 else f"{gigabytes:.2g}"


def _too_large(
    smallest: Config, sizes: TransformerConfig, topology: Topology, fixed: Fixed, memory: float
) -> Refused:
    """Returns the refusal of a job that does not fit, with a number of devices on which it does.

    Simulated devices share the memory of one machine, so more of them have no more.
    """
    needed, devices = estimate(smallest, sizes, topology).total, topology.num_devices
    asked = _MORE if topology.chip else ()
    more = next((devices * times for times in asked if _fits(smallest, sizes, topology, fixed, times)), None)
    instead = f"use {more} devices" if more else "use a smaller model or shorter rows"
    return Refused(
        f"[mesh] auto finds no layout on {topology.text} that fits: the smallest, {label(smallest)}, needs "
        f"{needed / 1e9:.1f} GB of a device's {memory / 1e9:.1f} GB by formula; {instead}"
    )


def _fits(smallest: Config, sizes: TransformerConfig, topology: Topology, fixed: Fixed, times: int) -> bool:
    larger = replace(topology, shape=(topology.num_devices * times,))
    opened = _opened(smallest, smallest.mesh.context)
    memory = topology.chip.memory if topology.chip else math.inf
    try:
        return any(counted.total <= memory for counted, _ in by_formula(opened, sizes, larger, fixed))
    except Refused:
        return False
