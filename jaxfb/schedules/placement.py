"""Places stages on devices, and finds how a stage's output travels.

A placement is a tuple: placement[device][chunk] is the stage, 0 .. num_stages * num_chunks - 1.
"""

from typing import Any

from jaxfb.refusal import Refused, integer, shown

Placement = tuple[tuple[int, ...], ...]

MIRROR = {"next": "prev", "prev": "next", "stay": "stay"}


def loop_placement(num_stages: int, num_chunks: int) -> Placement:
    """Places chunk after chunk round the ring: device d has stages d, P + d, 2P + d, ..."""
    return tuple(tuple(c * num_stages + d for c in range(num_chunks)) for d in range(num_stages))


def v_placement(num_stages: int) -> Placement:
    """Places stages down the devices and up again: device d has stages d and 2P - 1 - d, so device 0 has the first
    and last.
    """
    return tuple((d, 2 * num_stages - 1 - d) for d in range(num_stages))


def check_two_chunks(name: str, num_chunks: int, instead: str) -> None:
    """Raises ValueError unless num_chunks is the two of a V; `instead` is a schedule for other numbers."""
    if num_chunks != 2:
        raise Refused(
            f"[schedule] {name} places exactly two chunks on each device; got num_chunks={num_chunks}; "
            f"use num_chunks=2, or schedule={instead} for num_chunks={num_chunks}",
            [{"num_chunks": 2}, {"name": instead}],
        )


def placement_of(given: Any, num_stages: int, num_chunks: int) -> Placement:
    """Returns the placement that is asked for: "loop", "v", or placement[device][chunk]."""
    if isinstance(given, str) and given == "loop":
        return loop_placement(num_stages, num_chunks)
    if isinstance(given, str) and given == "v":
        return v_placement(num_stages)
    rows = given if isinstance(given, list | tuple) else []
    if len(rows) != num_stages or not all(isinstance(row, list | tuple) and row for row in rows):
        raise Refused(
            f'[schedule] placement must be "loop", "v", or a list of stages for each of the {num_stages} devices, got '
            f"{shown(given)}"
        )
    return tuple(
        tuple(integer("each stage of placement", stage, who="[schedule]", least=0) for stage in row)
        for row in rows
    )


def homes_of(placement: Placement) -> list[tuple[int, int]]:
    """Returns (device, chunk) by stage; raises ValueError unless each stage is placed once, a hop from the one
    before.
    """
    homes = {stage: (d, c) for d, row in enumerate(placement) for c, stage in enumerate(row)}
    count = sum(len(row) for row in placement)
    if sorted(homes) != list(range(count)) or len({len(row) for row in placement}) != 1:
        raise Refused(
            f"a placement has each of the stages 0 .. {count - 1} once, the same number on every device; "
            f"got {placement}; loop_placement(num_stages, num_chunks) is one"
        )
    ordered = [homes[stage] for stage in range(count)]
    for stage in range(count - 1):
        channel_of(ordered[stage][0], ordered[stage + 1][0], len(placement), stage)
    return ordered


def channel_of(source: int, target: int, num_devices: int, stage: int = 0) -> str:
    """Returns how an activation gets there on a ring: "stay", "next" (device + 1) or "prev" (device - 1)."""
    if source == target:
        return "stay"
    if target == (source + 1) % num_devices:
        return "next"
    if target == (source - 1) % num_devices:
        return "prev"
    raise Refused(
        f"consecutive stages must be on the same or on neighbouring devices; "
        f"stage {stage} is on device {source} and stage {stage + 1} on device {target} of {num_devices}; "
        f"use device {(source + 1) % num_devices} or {(source - 1) % num_devices} for stage {stage + 1}"
    )
