"""Answers a run that ran out of memory: what the step needs by the plan's formula, and changes with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax

from jaxfb.config import Config
from jaxfb.planner.chips import GPUS, TPUS, Chip
from jaxfb.planner.text import memory_table
from jaxfb.planner.topology import Topology
from jaxfb.planner.verdict import Verdict, estimated

SHOWN = 3
SPARE = 0.1  # of the memory, that a proposal leaves free: the formula is no compiler


def advice(config: Config, devices: list[Any], available: float | None) -> str:
    """Returns the plan's table of memory for a config on these devices, and up to three changes that fit.

    Args:
      available: bytes of one device; None where that is not known, and then the changes that need least are named.
    """
    topology = topology_of(devices)
    now = estimated(config, topology)
    found = [(change, verdict.needed) for change, verdict in _changes(config, topology)]
    least = (1 - SPARE) * available if available else now.needed
    fit = [(change, needed) for change, needed in found if needed < least] or []
    lines = [*memory_table(now)]
    lines += [f"  of a device{'':<13}{available / 1e9:>9.2f} GB"] if available else []
    if fit:
        lines += [
            "what would fit, by the same formula:" if available else "what needs less, by the same formula:"
        ]
        lines += [f"  {' '.join(change)}: {needed / 1e9:.2f} GB" for change, needed in fit[:SHOWN]]
    else:
        lines += ["no cut of the rows and no recomputation fits: use more devices, or a smaller model"]
    return "\n".join(lines)


def topology_of(devices: list[Any]) -> Topology:
    """Returns the topology of devices at hand; without a chip where their kind is not known."""
    first = devices[0]
    chip = _chip(first.platform, first.device_kind)
    platform = first.platform if chip else "cpu"
    return Topology(f"{first.device_kind} x {len(devices)}", platform, (len(devices),), chip)


def _chip(platform: str, kind: str) -> Chip | None:
    if platform == "tpu":
        return next((replace(chip, devices=1) for chip in TPUS.values() if chip.kind == kind), None)
    names = sorted(GPUS, key=len, reverse=True) if platform in ("gpu", "cuda") else ()
    return next((GPUS[name] for name in names if name in kind.lower()), None)


def _changes(config: Config, topology: Topology) -> Iterator[tuple[list[str], Verdict]]:
    """Yields changes of a config, the cheapest in time first, with their verdicts."""
    devices, rows = topology.num_devices, estimated(config, topology).rows_per_microbatch
    fewer = [size for size in (rows // 2, rows // 4, 1) if 0 < size < rows and rows % size == 0]
    keys = [[f"batch.rows_per_microbatch={size}"] for size in dict.fromkeys(fewer)]
    if devices > 1 and config.mesh.fsdp == 1 and config.mesh.data in (-1, devices):
        keys += [["mesh.data=1", f"mesh.fsdp={devices}"]]
    keys += [[*cut, "parallel.remat=full"] for cut in ([], *keys) if config.parallel.remat != "full"]
    for change in keys:
        with suppress(ValueError):  # rows that do not divide, or an axis that the model does not
            yield change, estimated(_with(config, change), topology)


def _with(config: Config, change: list[str]) -> Config:
    for text in change:
        path, _, value = text.partition("=")
        section, key = path.split(".")
        given: dict[str, Any] = {key: int(value) if value.isdecimal() else value}
        if key == "rows_per_microbatch":
            given["num_microbatches"] = None
        config = replace(config, **{section: replace(getattr(config, section), **given)})
    return config


def is_lack_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had too little memory."""
    of_device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return of_device or isinstance(error, MemoryError)
