"""Fills in the layout of a config that leaves its mesh to the planner: the saved run's, or a chosen one.

Process 0 decides, and the others take what it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax

from jaxfb.config import Config, config_from_dict, config_to_dict
from jaxfb.config.sections import AutoMesh
from jaxfb.registry import attribute_of
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.run_dir import RunDirectory

_CHOOSE = "jaxfb.planner.auto", "choose_here"
"""By name, since the planner is made of what the trainer runs."""
OF_LAYOUT = {
    "mesh": None,
    "schedule": None,
    "chunks": None,
    "batch": ("rows_per_microbatch", "num_microbatches"),
    "parallel": ("remat", "fsdp_gather"),
    "optimizer": ("memory",),
}
"""The sections and keys that make a layout; None: all of it."""


def with_mesh(config: Any, hosts: Hosts, run: RunDirectory | None = None) -> Any:
    """Returns the config with a layout where its mesh is `auto`, and prints which; any other as it is.

    run: that is continued, whose layout is kept on as many devices.

    Raises:
      ValueError: no layout fits, or the devices are not known.
    """
    if not isinstance(getattr(config, "mesh", None), AutoMesh):
        return config
    decided = hosts.first(lambda: _decided(config, run))
    for line in decided["lines"]:
        hosts.say(line)
    return with_layout(config, decided["values"])


def with_layout(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with these sections' keys in place of its own."""
    plain = config_to_dict(config)
    for section, new in values.items():
        old = plain[section]
        plain[section] = {**old, **new} if isinstance(old, dict) and isinstance(new, Mapping) else new
    return config_from_dict(plain)


def layout_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of a config's plain values those that make its layout."""
    return {
        section: values[section] if keys is None else {key: values[section][key] for key in keys}
        for section, keys in OF_LAYOUT.items()
    }


def _decided(config: Config, run: RunDirectory | None) -> dict[str, Any]:
    saved, there = _saved(run), jax.device_count()
    lines = []
    if saved is not None:
        mesh = (
            " x ".join(f"{axis} {size}" for axis, size in saved["mesh"].items() if size != 1) or "one device"
        )
        needed = prod(saved["mesh"].values())
        if needed == there:
            return {"values": saved, "lines": [f"mesh: auto, as the run began: {mesh}"]}
        lines = [f"mesh: auto: the run began on {needed} devices as {mesh}, here are {there}"]
    chosen = attribute_of(*_CHOOSE)(config)
    return {"values": chosen.values, "lines": lines + chosen.lines}


def _saved(run: RunDirectory | None) -> dict[str, Any] | None:
    """Returns the layout of a run that can be continued."""
    if run is None or (run.newest_update() is None and not run.has_identity):
        return None
    values = run.saved_config()
    return None if values is None or values["mesh"] == AutoMesh.WORD else layout_of(values)
