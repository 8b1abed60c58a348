"""The executor in plain Python: walks a program's rows with labels for arrays.

It is the last check of a schedule, that every read finds what it expects and nothing live was overwritten,
and the shortest description of what the executor does with a tick.
"""

from jaxfb.schedules.program import CHANNELS, Program
from jaxfb.schedules.slots import BUFFERS

Label = tuple
"""("input" | "residual" | "gradient" | "cotangent", microbatch, stage), or None for garbage.

In a cache ("keys" | "gradients", piece, stage): the keys and values of the pieces up to this one, or the gradients from
this one and those after it.
"""


def replay(program: Program, placement) -> list[tuple[str, int, int]]:
    """Returns (kind, microbatch, stage) as executed; ValueError at the first read that finds the wrong value."""
    devices = range(program.num_devices)
    buffers = [{b: [None] * program.allocated(b) for b in BUFFERS} for _ in devices]
    sent = {"activation": [None] * len(devices), "gradient": [None] * len(devices)}
    executed: list[tuple[str, int, int]] = []
    kinds = [phase.kinds for phase in program.phases for _ in range(phase.num_ticks)]
    for tick in range(program.num_ticks):
        cells = [
            {
                name: row[tick] if isinstance(row[tick], int) else row[tick][d]
                for name, row in program.rows.items()
            }
            for d in devices
        ]
        for d in devices:
            _store_arrivals(buffers[d], cells[d], d, sent, program)
        where = [(buffers[d], cells[d], placement[d], tick, d, executed) for d in devices]
        if program.num_pieces > 1:
            for one in where:
                _check_cache(*one[:-1], program)
        where = [(*one, program.by_device) for one in where]
        outputs = [_forward(*one) if "F" in kinds[tick] else None for one in where]
        if cells[0]["loss_valid"]:
            _loss(buffers, cells, outputs, program.loss_device)
        gradients = [_backward(*one) if "B" in kinds[tick] else None for one in where]
        for one in where:
            _weight(*one[:-1])
        sent = {"activation": outputs, "gradient": gradients}
    return executed


def _store_arrivals(buffers, cell, device, sent, program) -> None:
    for buffer, channels in (
        ("activation", program.forward_channels),
        ("gradient", program.backward_channels),
    ):
        for channel in channels:
            source = (device + {"next": -1, "prev": 1, "stay": 0}[channel]) % program.num_devices
            buffers[buffer][cell[f"{buffer}_from_{channel}"]] = sent[buffer][source]
    for channel in CHANNELS:
        unused = channel not in program.forward_channels
        if unused and cell[f"activation_from_{channel}"] != program.spare("activation"):
            raise ValueError(
                f"channel {channel!r} is used but not in forward_channels={program.forward_channels}"
            )


def _forward(buffers, cell, stages, tick, device, executed, by_device) -> Label | None:
    if not cell["f_valid"]:
        if not by_device:
            _keep(buffers["residual"], cell["f_residual"], None)
        return None
    m, stage = cell["f_microbatch"], stages[cell["f_chunk"]]
    if not cell["f_embed"]:
        _expect(buffers["activation"][cell["f_input"]], ("input", m, stage), "F", tick, device)
    _keep(buffers["residual"], cell["f_residual"], ("residual", m, stage))
    executed.append(("F", m, stage))
    return ("input", m, stage + 1)


def _loss(buffers, cells, outputs, device) -> None:
    cell, (_, m, above) = cells[device], outputs[device]
    if not cell["f_last"] or m != cell["loss_microbatch"]:
        raise ValueError(
            f"loss of microbatch {cell['loss_microbatch']} in a tick in which it leaves no stage"
        )
    for d, buffer in enumerate(buffers):
        buffer["gradient"][cells[d]["loss_gradient"]] = ("gradient", m, above - 1)


def _backward(buffers, cell, stages, tick, device, executed, by_device) -> Label | None:
    if not cell["b_valid"]:
        if not by_device:
            _keep(buffers["cotangent"], cell["b_cotangent"], None)
        return None
    m, stage = cell["b_microbatch"], stages[cell["b_chunk"]]
    _expect(buffers["residual"][cell["b_residual"]], ("residual", m, stage), "B", tick, device)
    _expect(buffers["gradient"][cell["b_gradient"]], ("gradient", m, stage), "B", tick, device)
    _keep(buffers["cotangent"], cell["b_cotangent"], ("cotangent", m, stage))
    executed.append(("B", m, stage))
    return ("gradient", m, stage - 1)


def _weight(buffers, cell, stages, tick, device, executed) -> None:
    if cell["w_valid"]:
        m, stage = cell["w_microbatch"], stages[cell["w_chunk"]]
        _expect(buffers["residual"][cell["w_residual"]], ("residual", m, stage), "W", tick, device)
        _expect(buffers["cotangent"][cell["w_cotangent"]], ("cotangent", m, stage), "W", tick, device)
        executed.append(("W", m, stage))


def _check_cache(buffers, cell, stages, tick, device, program) -> None:
    """Reads and writes the caches of a tick; F comes before B."""
    for kind, label, first, before in (
        ("F", "keys", 0, -1),
        ("B", "gradients", program.num_pieces - 1, 1),
    ):
        name = kind.lower()
        if not cell[f"{name}_valid"]:
            continue
        item, stage = cell[f"{name}_microbatch"], stages[cell[f"{name}_chunk"]]
        piece, slot = item % program.num_pieces, cell[f"{name}_cache"]
        found = buffers["cache"][slot]
        if piece != first:
            _expect(found, (label, item + before, stage), kind, tick, device)
        elif kind == "B":
            _expect(found, ("keys", item, stage), kind, tick, device)
        buffers["cache"][slot] = (label, item, stage)


def _keep(slots: list, slot: int, label: Label | None) -> None:
    """Keeps a label in its slot; without slots there is no backward, or no W, that would read it."""
    if slots:
        slots[slot] = label


def _expect(found: Label, wanted: Label, kind: str, tick: int, device: int) -> None:
    if found != wanted:
        raise ValueError(
            f"{kind} in tick {tick} on device {device} needs {wanted} but its slot holds {found}"
        )
