"""Decides where a schedule by device may run: no collective inside a stage."""

from __future__ import annotations

from collections.abc import Mapping

from jaxfb.refusal import Refused
from jaxfb.schedules.kinds import kind_of

INSIDE_A_STAGE = ("tensor", "context", "expert")
"""The axes over which a stage's layers exchange data."""


def obstacle(sizes: Mapping[str, int], fsdp_gather: str | int) -> str | None:
    """Returns what of a mesh puts a collective into a stage, such as "tensor=2"; None if nothing does.

    Devices of different stages then run different branches, in which they must not wait for each other: TPUs and GPUs
    start collectives in one order for the whole program.
    """
    for axis in INSIDE_A_STAGE:
        if sizes.get(axis, 1) > 1:
            return f"{axis}={sizes[axis]}"
    if sizes.get("fsdp", 1) > 1 and fsdp_gather != "step":
        given = f'"{fsdp_gather}"' if isinstance(fsdp_gather, str) else fsdp_gather
        return f"fsdp={sizes['fsdp']} with fsdp_gather={given}"
    return None


def runs_on(name: str, sizes: Mapping[str, int], fsdp_gather: str | int) -> bool:
    """Returns whether a schedule of that name can run on a mesh of these sizes."""
    return not kind_of(name).by_device or obstacle(sizes, fsdp_gather) is None


def check_by_device(name: str, sizes: Mapping[str, int], fsdp_gather: str | int) -> None:
    """Raises ValueError if a schedule that computes by device meets a mesh with collectives inside a stage."""
    found = obstacle(sizes, fsdp_gather)
    if found is None:
        return
    choices = [{"schedule": "zero_bubble"}]
    if obstacle(sizes, "step") is None:
        choices.append({"fsdp_gather": "step"})
    use = " or ".join(f'{key}="{value}"' for choice in choices for key, value in choice.items())
    raise Refused(
        f"schedule {name!r} lets each device compute its own part of a tick and allows no collective inside a stage; "
        f"this mesh has {found}; use {use}",
        choices,
    )
