"""The executor in plain Python: walks a program's rows with labels for arrays.

It is the last check of a schedule, that every read finds what it expects and nothing live was overwritten,
and the shortest description of what the executor does with a tick.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxfb.schedules.program import CHANNELS, Program
from jaxfb.schedules.slots import BUFFERS

Label = tuple
"""("input" | "residual" | "gradient" | "cotangent", microbatch, stage), or None for garbage.

In a cache ("keys" | "gradients", piece, stage): the keys and values of the pieces up to this one, or the gradients from
this one and those after it.
"""


class _Cell(NamedTuple):
    """Holds what one device has in one tick.

    rows:    the device's entry of every row of the program.
    buffers: its slots, which outlive the tick. stages: the stage of each of its chunks.
    """

    rows: dict[str, int]
    buffers: dict[str, list]
    stages: tuple[int, ...]
    tick: int
    device: int

    def action(self, kind: str) -> tuple[int, int] | None:
        """Returns (microbatch, stage) of the kind that the device runs; None where it runs none."""
        name = kind.lower()
        if not self.rows[f"{name}_valid"]:
            return None
        return self.rows[f"{name}_microbatch"], self.stages[self.rows[f"{name}_chunk"]]

    def expect(self, kind: str, buffer: str, slot: int, wanted: Label) -> None:
        """Raises ValueError unless a slot that an action reads has what it needs."""
        _expect(self.buffers[buffer][slot], wanted, kind, self.tick, self.device)


def replay(program: Program, placement) -> list[tuple[str, int, int]]:
    """Returns (kind, microbatch, stage) as executed; ValueError at the first read that finds the wrong value."""
    devices = range(program.num_devices)
    buffers = [{b: [None] * program.allocated(b) for b in BUFFERS} for _ in devices]
    sent: Mapping[str, Sequence] = {"activation": [None] * len(devices), "gradient": [None] * len(devices)}
    executed: list[tuple[str, int, int]] = []
    kinds = [phase.kinds for phase in program.phases for _ in range(phase.num_ticks)]
    for tick in range(program.num_ticks):
        cells = [_Cell(_rows(program, tick, d), buffers[d], placement[d], tick, d) for d in devices]
        for cell in cells:
            _store_arrivals(cell, sent, program)
        if program.num_pieces > 1:
            for cell in cells:
                _check_cache(cell, program.num_pieces)
        sent = _run_tick(cells, kinds[tick], program)
        executed += [(kind, *done) for kind in kinds[tick] for cell in cells if (done := cell.action(kind))]
    return executed


def _rows(program: Program, tick: int, device: int) -> dict[str, int]:
    """Returns the entry of every row in one tick; that of a row for all devices is the same on each."""
    entries = {name: row[tick] for name, row in program.rows.items()}
    return {name: entry if isinstance(entry, int) else entry[device] for name, entry in entries.items()}


def _run_tick(cells: Sequence[_Cell], kinds: str, program: Program) -> dict[str, Sequence]:
    """Runs F, the loss, B and W, and returns what each device sends."""
    none = [None] * len(cells)
    outputs = [_forward(cell, program.by_device) for cell in cells] if "F" in kinds else none
    if cells[0].rows["loss_valid"]:
        _loss(cells, outputs, program.loss_device)
    gradients = [_backward(cell, program.by_device) for cell in cells] if "B" in kinds else none
    if "W" in kinds:
        for cell in cells:
            _weight(cell)
    return {"activation": outputs, "gradient": gradients}


def _store_arrivals(cell: _Cell, sent: Mapping[str, Sequence], program: Program) -> None:
    for buffer, channels in (
        ("activation", program.forward_channels),
        ("gradient", program.backward_channels),
    ):
        for channel in channels:
            source = (cell.device + {"next": -1, "prev": 1, "stay": 0}[channel]) % program.num_devices
            cell.buffers[buffer][cell.rows[f"{buffer}_from_{channel}"]] = sent[buffer][source]
    for channel in CHANNELS:
        unused = channel not in program.forward_channels
        if unused and cell.rows[f"activation_from_{channel}"] != program.spare("activation"):
            raise ValueError(
                f"channel {channel!r} is used but not in forward_channels={program.forward_channels}"
            )


def _forward(cell: _Cell, by_device: bool) -> Label | None:
    """Returns what a device sends to the next stage."""
    rows, action = cell.rows, cell.action("F")
    if action is None:
        if not by_device:
            _keep(cell.buffers["residual"], rows["f_residual"], None)
        return None
    microbatch, stage = action
    if not rows["f_embed"]:
        cell.expect("F", "activation", rows["f_input"], ("input", microbatch, stage))
    _keep(cell.buffers["residual"], rows["f_residual"], ("residual", microbatch, stage))
    return ("input", microbatch, stage + 1)


def _loss(cells: Sequence[_Cell], outputs: Sequence[Label | None], loss_device: int) -> None:
    rows, output = cells[loss_device].rows, outputs[loss_device]
    if output is None or not rows["f_last"] or output[1] != rows["loss_microbatch"]:
        raise ValueError(
            f"loss of microbatch {rows['loss_microbatch']} in a tick in which it leaves no stage"
        )
    _, microbatch, above = output
    for cell in cells:
        cell.buffers["gradient"][cell.rows["loss_gradient"]] = ("gradient", microbatch, above - 1)


def _backward(cell: _Cell, by_device: bool) -> Label | None:
    """Returns what a device sends to the stage before."""
    rows, action = cell.rows, cell.action("B")
    if action is None:
        if not by_device:
            _keep(cell.buffers["cotangent"], rows["b_cotangent"], None)
        return None
    microbatch, stage = action
    cell.expect("B", "residual", rows["b_residual"], ("residual", microbatch, stage))
    cell.expect("B", "gradient", rows["b_gradient"], ("gradient", microbatch, stage))
    _keep(cell.buffers["cotangent"], rows["b_cotangent"], ("cotangent", microbatch, stage))
    return ("gradient", microbatch, stage - 1)


def _weight(cell: _Cell) -> None:
    if action := cell.action("W"):
        cell.expect("W", "residual", cell.rows["w_residual"], ("residual", *action))
        cell.expect("W", "cotangent", cell.rows["w_cotangent"], ("cotangent", *action))


def _check_cache(cell: _Cell, num_pieces: int) -> None:
    """Reads and writes the caches of a tick; F comes before B."""
    for kind, label, first, before in (("F", "keys", 0, -1), ("B", "gradients", num_pieces - 1, 1)):
        action = cell.action(kind)
        if action is None:
            continue
        item, stage = action
        slot = cell.rows[f"{kind.lower()}_cache"]
        if item % num_pieces != first:
            cell.expect(kind, "cache", slot, (label, item + before, stage))
        elif kind == "B":
            cell.expect(kind, "cache", slot, ("keys", item, stage))
        cell.buffers["cache"][slot] = (label, item, stage)


def _keep(slots: list, slot: int, label: Label | None) -> None:
    """Keeps a label in its slot; without slots there is no backward, or no W, that would read it."""
    if slots:
        slots[slot] = label


def _expect(found: Label, wanted: Label, kind: str, tick: int, device: int) -> None:
    if found != wanted:
        raise ValueError(
            f"{kind} in tick {tick} on device {device} needs {wanted} but its slot holds {found}"
        )
