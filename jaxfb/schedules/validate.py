"""Is a table a schedule? Each action once, in order, no slot overwritten."""

from collections.abc import Iterator

from jaxfb.refusal import Refused
from jaxfb.schedules.action import KINDS, Action
from jaxfb.schedules.placement import homes_of
from jaxfb.schedules.render import render
from jaxfb.schedules.replay import replay


def validate(schedule) -> None:
    """Raises ValueError: the rule, the values, and the table with the bad cell marked `[F3.1]!`."""
    homes_of(schedule.placement)
    _check_cells(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    executed = replay(schedule.program, schedule.placement)
    assert sorted(executed) == sorted(schedule.ticks), "the program does not execute the table"


def _refuse(schedule, tick: int, device: int, kind: str, message: str) -> None:
    raise Refused(f"[schedule] {message}\n{render(schedule, mark=(tick, device, kind))}")


def _check_cells(schedule) -> None:
    """Checks cells: known kinds, numbers in range, one action of a kind in a cell, no action twice."""
    seen: dict[tuple[int, Action], int] = {}
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_stages:
            raise Refused(
                f"[schedule] every tick has a cell for each device; tick {tick} has {len(row)} cells "
                f"for num_stages={schedule.num_stages}; use () for an idle device"
            )
        for device, cell in enumerate(row):
            for action in cell:
                problem = _problem(schedule, tick, device, action, seen)
                if problem:
                    _refuse(schedule, tick, device, action.kind, problem)
                seen[device, action] = tick


def _problem(schedule, tick: int, device: int, action: Action, seen: dict) -> str | None:
    kind, microbatch, chunk = action
    items = "microbatches" if schedule.num_pieces == 1 else "pieces"
    if kind not in tuple(KINDS):
        return (
            f"a kind is F, B or W; {action} on device {device} in tick {tick} is none of them; use F, B or W"
        )
    if not (0 <= microbatch < schedule.num_items and 0 <= chunk < schedule.num_chunks):
        return (
            f"{action} on device {device} is out of range: {items} are 0 .. "
            f"{schedule.num_items - 1}, chunks 0 .. {schedule.num_chunks - 1}"
        )
    if (device, action) in seen:
        ticks = f"in ticks {seen[device, action]} and {tick}"
        return f"{action} runs twice on device {device}, {ticks}; leave one out"
    if any(a.kind == kind and a != action for a in schedule.table[tick][device]):
        return (
            f"a device runs at most one {kind} a tick; device {device} has several in tick {tick}; "
            f"move all but one to other ticks"
        )
    return None


def _check_complete(schedule) -> None:
    """Checks that every microbatch and stage has an F; B all or none; W all or none, and none without B."""
    if schedule.splits_backward and not schedule.has_backward:
        raise Refused("[schedule] W is the weight gradient of a B; the table has W but no B; add B or drop W")
    for kind in KINDS:
        if kind != "F" and not any(kind == k for k, _, _ in schedule.ticks):
            continue
        for stage in range(schedule.num_stages * schedule.num_chunks):
            for m in range(schedule.num_items):
                if (kind, m, stage) not in schedule.ticks:
                    device, chunk = schedule.device_chunk_of(stage)
                    message = (
                        f"{kind}{m}.{chunk} is missing on device {device}; each {kind} must run exactly once"
                    )
                    _refuse(schedule, schedule.num_ticks - 1, device, kind, message)


def _check_order(schedule) -> None:
    """Checks happens-before, with one tick of transport between stages, also between two on the same device."""
    last = schedule.num_stages * schedule.num_chunks - 1
    for (kind, m, stage), tick in schedule.ticks.items():
        for need, delay in _needs(kind, m, stage, last, schedule.num_pieces):
            ready = schedule.ticks[need]
            if tick >= ready + delay:
                continue
            device, chunk = schedule.device_chunk_of(stage)
            other, other_chunk = schedule.device_chunk_of(need[2])
            message = (
                f"{kind}{m}.{chunk} on device {device} in tick {tick} needs {need[0]}{need[1]}.{other_chunk} of "
                f"device {other}, which runs in tick {ready}"
                + (" and takes one tick to arrive" if delay and need[2] != stage else "")
                + f"; move it to tick {ready + delay} or later"
            )
            _refuse(schedule, tick, device, kind, message)


def _needs(
    kind: str, m: int, stage: int, last: int, num_pieces: int
) -> Iterator[tuple[tuple[str, int, int], int]]:
    """Yields what an action reads, and how many ticks after it it may run at the earliest.

    A piece reads of others on its own stage: keys and values of earlier pieces going forward, their gradients from
    later pieces coming back.
    """
    if kind != "F":
        yield ("F" if kind == "B" else "B", m, stage), 0
    if kind == "F" and stage > 0:
        yield ("F", m, stage - 1), 1
    if kind == "F" and m % num_pieces > 0:
        yield ("F", m - 1, stage), 1
    if kind == "B" and stage < last:
        yield ("B", m, stage + 1), 1
    if kind == "B" and m % num_pieces < num_pieces - 1:
        yield ("B", m + 1, stage), 1
