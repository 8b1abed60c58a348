"""A schedule as rows of integers: what the executor scans over. `schedule.program`.

THE FORMAT. `program.rows` maps a name to a nested list of integers. A name marked [t] has one integer a tick, the
same for all devices; a name marked [t][d] has one integer a tick and device. A phase is the slice
rows[name][phase.start:phase.stop]; its body runs just the kinds in `phase.kinds`. An entry that is not valid
has microbatch 0 and chunk 0. There are five buffers (`slots.py` defines what is in them): residual, activation,
gradient, cotangent, cache. `program.num_<buffer>_slots` are needed of each; of activation and gradient one more, the
spare slot with that number, at which entries that are not valid point. Those of residual and cotangent point at
a slot that nothing occupies in that tick. The last buffer is for sequences in pieces (`program.num_pieces` > 1): every
`microbatch` then is the number of a piece, microbatch * num_pieces + piece, and what is not valid writes to no cache.

One tick, on device d, in this order (`replay.py` is the same in Python):

 1. store what arrived. Everything F sent in tick t-1 travels by ring permute. For each channel in
    `program.forward_channels`: "next" came from device d-1, "prev" from d+1, "stay" from d itself
      activation_from_next, activation_from_prev, activation_from_stay  [t][d]  activation slot to store it in
    and likewise what B sent in tick t-1, for each channel in `program.backward_channels`
      gradient_from_next, gradient_from_prev, gradient_from_stay        [t][d]  gradient slot to store it in
    (gradients are needed only by step 4, so their permute may be issued here and hidden by F).
    Nothing arrives in tick 0. `program.arrivals(phase)` names the channels that deliver something in a phase;
    what is sent in its last tick is carried into the next phase.
 2. F, if the phase has F:
      f_valid, f_microbatch, f_chunk  [t][d]
      f_embed     [t][d]  1: stage 0, the input is embed(microbatch), not a slot
      f_input     [t][d]  activation slot to read (spare if f_embed)
      f_residual  [t][d]  residual slot to write (none if the schedule has no backward)
      f_cache     [t][d]  cache slot with keys and values of earlier pieces, to which this one's are written
      f_last      [t][d]  1: last stage, the output goes to the loss of step 3 and travels nowhere
                          (every F sends on every channel; the receiver's row sends what it does not expect to
                          its spare slot)
      embed_valid, embed_microbatch  [t]  the microbatch whose stage 0 runs in this tick, on device
                          program.embed_device: for an embedding that all devices compute together
 3. loss, if loss_valid (a uniform branch: the same on every device, so collectives inside are fine):
      loss_valid, loss_microbatch  [t]  the microbatch whose last stage ran in step 2, on program.loss_device
      loss_gradient  [t][d]  gradient slot to store d loss / d output in (spare but on loss_device)
 4. B, if the phase has B; it may be of the microbatch of step 3:
      b_valid, b_microbatch, b_chunk  [t][d]
      b_residual   [t][d]  residual slot to read
      b_gradient   [t][d]  gradient slot to read, on the last stage too (step 3 put it there)
      b_cache      [t][d]  cache slot with keys and values, and their gradients from later pieces: this one's are
                          read, those of earlier pieces are added to (the last piece finds none and writes them)
      b_embed      [t][d]  1: stage 0, the input gradient is that of embed(microbatch) and travels nowhere
      b_cotangent  [t][d]  cotangent slot to write for W (none if there is no W: B is all of it then)
      embed_gradient_valid, embed_gradient_microbatch  [t]  the microbatch whose stage 0 ran B in this tick
 5. W, if the phase has W:
      w_valid, w_microbatch, w_chunk  [t][d]
      w_residual, w_cotangent         [t][d]  slots to read

With `program.by_device` a device runs F, B and W where they are valid for it and skips them elsewhere; else it runs all
kinds of the phase, and what is not valid goes to slots that nobody reads.

Weight gradients of a chunk are always accumulated in the order of microbatches, under every built-in
schedule of whole sequences. A forward-only program (`schedule.forward_only().program`) has no B and W rows that are
valid and no residual slots.
"""

from dataclasses import dataclass

from jaxfb.schedules.action import KINDS
from jaxfb.schedules.phases import Phase
from jaxfb.schedules.placement import MIRROR, channel_of
from jaxfb.schedules.slots import BUFFERS, WITH_SPARE, WRITTEN_BY, Slots

CHANNELS = ("next", "prev", "stay")

TICK_ROWS = tuple(
    f"{event}_{field}" for event in ("embed", "loss", "embed_gradient") for field in ("valid", "microbatch")
)
ZERO_ROWS = (
    *(f"{kind}_{field}" for kind in "fbw" for field in ("valid", "microbatch", "chunk")),
    *("f_embed", "f_last", "b_embed"),
)
SLOT_ROWS = {
    **{f"activation_from_{channel}": "activation" for channel in CHANNELS},
    **{f"gradient_from_{channel}": "gradient" for channel in CHANNELS},
    "f_input": "activation",
    "f_residual": "residual",
    "loss_gradient": "gradient",
    "b_residual": "residual",
    "b_gradient": "gradient",
    "b_cotangent": "cotangent",
    "w_residual": "residual",
    "w_cotangent": "cotangent",
    "f_cache": "cache",
    "b_cache": "cache",
}
"""Row name to the buffer it points into."""
OWN_SLOTS = {
    kind: {row: buffer for row, buffer in SLOT_ROWS.items() if row.startswith(f"{kind.lower()}_")}
    for kind in KINDS
}
"""The same by kind, for the rows of the device that runs an action."""


@dataclass(frozen=True, eq=False)
class Program:
    """Holds the rows that an executor scans over, and the sizes of the buffers that they point into.

    The docstring of this file describes the format.
    """

    num_ticks: int
    num_devices: int
    num_residual_slots: int
    num_activation_slots: int
    num_gradient_slots: int
    num_cotangent_slots: int
    num_cache_slots: int
    forward_channels: tuple[str, ...]
    backward_channels: tuple[str, ...]
    embed_device: int
    loss_device: int
    phases: tuple[Phase, ...]
    rows: dict[str, list]
    by_device: bool = False
    num_pieces: int = 1

    def spare(self, buffer: str) -> int:
        """Returns the slot of activations or gradients that takes what nobody reads: one past the last real one."""
        return getattr(self, f"num_{buffer}_slots")

    def allocated(self, buffer: str) -> int:
        """Returns the number of slots to allocate, the spare one included."""
        return getattr(self, f"num_{buffer}_slots") + (buffer in WITH_SPARE)

    def phase_rows(self, phase: Phase) -> dict[str, list]:
        """Returns the rows of one phase, to be handed to its scan."""
        return {name: row[phase.start : phase.stop] for name, row in self.rows.items()}

    @property
    def last_tick(self) -> Phase:
        """Returns the last tick as a phase of its own."""
        kinds = "".join(kind for kind in KINDS if any(self.rows[f"{kind.lower()}_valid"][-1]))
        return Phase(self.num_ticks - 1, self.num_ticks, kinds)

    @property
    def phases_before_last_tick(self) -> tuple[Phase, ...]:
        """Returns the phases without the last tick."""
        *others, last = self.phases
        shorter = last._replace(stop=last.stop - 1)
        return (*others, shorter) if shorter.num_ticks else tuple(others)

    @property
    def ends_with_first_chunk(self) -> bool:
        """Returns whether the last tick computes weight gradients of the devices' first chunks alone.

        It does not where devices are not in lockstep, or sequences are in pieces.
        """
        kind = "w" if self.num_cotangent_slots else "b"
        in_lockstep = not self.by_device and self.num_pieces == 1
        return in_lockstep and any(self.rows[f"{kind}_valid"][-1]) and not any(self.rows[f"{kind}_chunk"][-1])

    def arrivals(self, phase: Phase) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns (forward, backward) channels on which something valid arrives in some tick of a phase."""

        def used(buffer: str, channels: tuple[str, ...]) -> tuple[str, ...]:
            spare = self.spare(buffer)
            rows = {c: self.rows[f"{buffer}_from_{c}"][phase.start : phase.stop] for c in channels}
            return tuple(c for c in channels if any(slot != spare for row in rows[c] for slot in row))

        return used("activation", self.forward_channels), used("gradient", self.backward_channels)


def program_of(schedule) -> Program:
    """Lowers a valid schedule; everything is decided here, the executor only follows."""
    slots = schedule.slots
    last = schedule.num_stages * schedule.num_chunks - 1
    hops = [
        channel_of(schedule.device_chunk_of(s)[0], schedule.device_chunk_of(s + 1)[0], schedule.num_stages)
        for s in range(last)
    ]
    rows = _blank(schedule, slots)
    for (kind, m, stage), tick in schedule.ticks.items():
        device, chunk = schedule.device_chunk_of(stage)
        for field, value in (("valid", 1), ("microbatch", m), ("chunk", chunk)):
            rows[f"{kind.lower()}_{field}"][tick][device] = value
        for name, buffer in OWN_SLOTS[kind].items():
            item = (m - m % schedule.num_pieces if buffer == "cache" else m), stage
            if item in slots.number[buffer]:  # an end has no input, and not every schedule each buffer
                rows[name][tick][device] = slots.number[buffer][item]
        _travel(rows, schedule, slots, hops, kind, m, stage, tick)
    return Program(
        num_ticks=schedule.num_ticks,
        num_devices=schedule.num_stages,
        **{f"num_{buffer}_slots": slots.most(buffer) for buffer in BUFFERS},
        forward_channels=tuple(c for c in CHANNELS if c in hops),
        backward_channels=tuple(c for c in CHANNELS if schedule.has_backward and MIRROR[c] in hops),
        embed_device=schedule.device_chunk_of(0)[0],
        loss_device=schedule.device_chunk_of(last)[0],
        phases=schedule.phases,
        rows=rows,
        by_device=schedule.by_device,
        num_pieces=schedule.num_pieces,
    )


def _blank(schedule, slots: Slots) -> dict[str, list]:
    ticks, devices = range(schedule.num_ticks), schedule.num_stages
    initial = dict.fromkeys(ZERO_ROWS, 0)
    initial |= {name: slots.most(buffer) if buffer in WITH_SPARE else 0 for name, buffer in SLOT_ROWS.items()}
    rows: dict[str, list] = {name: [0 for _ in ticks] for name in TICK_ROWS}
    rows |= {name: [[value] * devices for _ in ticks] for name, value in initial.items()}
    for buffer, kind in WRITTEN_BY.items():
        for (tick, device), slot in slots.idle.get(buffer, {}).items():
            rows[f"{kind.lower()}_{buffer}"][tick][device] = slot
    return rows


def _travel(rows, schedule, slots: Slots, hops, kind: str, m: int, stage: int, tick: int) -> None:
    """Writes what is at the ends, and what follows an F or B: the arrival a tick later, the loss."""
    device, _ = schedule.device_chunk_of(stage)
    if kind == "F" and stage == 0:
        rows["f_embed"][tick][device] = 1
        rows["embed_valid"][tick], rows["embed_microbatch"][tick] = 1, m
    if kind == "F" and stage == len(hops):
        rows["f_last"][tick][device] = 1
        rows["loss_valid"][tick], rows["loss_microbatch"][tick] = 1, m
        if schedule.has_backward:
            rows["loss_gradient"][tick][device] = slots.number["gradient"][m, stage]
    elif kind == "F":
        target, _ = schedule.device_chunk_of(stage + 1)
        rows[f"activation_from_{hops[stage]}"][tick + 1][target] = slots.number["activation"][m, stage + 1]
    if kind == "B" and stage == 0:
        rows["b_embed"][tick][device] = 1
        rows["embed_gradient_valid"][tick], rows["embed_gradient_microbatch"][tick] = 1, m
    elif kind == "B":
        target, _ = schedule.device_chunk_of(stage - 1)
        channel = MIRROR[hops[stage - 1]]
        rows[f"gradient_from_{channel}"][tick + 1][target] = slots.number["gradient"][m, stage - 1]
