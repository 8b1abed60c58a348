"""A schedule is a table: which device does what on which microbatch in which tick.

Everything else is derived from the table: its phases, its buffer slots, the rows the executor scans over,
what it costs and how it looks. No device is needed for any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfb.refusal import Refused, boolean, instance, integer
from jaxfb.schedules.action import Action, cells_of_table
from jaxfb.schedules.costs import Costs
from jaxfb.schedules.earliest import earliest_forwards
from jaxfb.schedules.phases import Phase, one_phase_of, phases_of
from jaxfb.schedules.placement import Placement, homes_of, placement_of
from jaxfb.schedules.program import Program, program_of
from jaxfb.schedules.render import headline, parse_table, render, titled
from jaxfb.schedules.simulate import Simulation, simulate
from jaxfb.schedules.sizes import checked_pieces
from jaxfb.schedules.slots import Slots, slots_of
from jaxfb.schedules.validate import validate


@dataclass(frozen=True)
class Schedule:
    """Holds a table of actions over P devices (`num_stages`), M microbatches and V chunks a device.

    Attributes:
      name: what it is called in output.
      num_stages: P, size of the pipe axis. The model is cut into P * V stages.
      num_microbatches: M.
      num_chunks: V, stages a device holds.
      table: table[tick][device] is a tuple of Actions, at most one of each kind, run in the order F, loss, B,
        W. What one tick computes reaches another device for the next tick.
      placement: placement[device][chunk] is the stage.
      by_device: in a tick each device computes the actions of its own cell and no others, under a branch; else all
        devices compute every kind of the phase. A branch allows no collective inside a stage.
      num_pieces: n, pieces that the sequences of a microbatch are cut into. An action's `microbatch` then counts
        pieces: piece p of microbatch m has the number m * n + p. Forwards of a microbatch run from its first
        piece to its last, backwards from its last to its first.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    table: tuple[tuple[tuple[Action, ...], ...], ...]
    placement: Placement
    by_device: bool = False
    num_pieces: int = 1

    @classmethod
    def from_table(
        cls,
        table: Sequence[Sequence],
        *,
        name: str = "custom",
        placement: str | Placement = "loop",
        by_device: bool = False,
        num_pieces: int = 1,
    ) -> "Schedule":
        """Makes a schedule from a table of your own, and validates it.

        Args:
          table: table[tick][device] is a cell: a sequence of Actions or of strings "F3.1", one string
            "F3.1+B0.1", or None for idle. Microbatches and chunks are counted from what is in it.
          placement: "loop" (stage = chunk * P + device), "v" (0 .. P-1, then P-1 .. 0), or
            placement[device][chunk].
          by_device: each device computes its own cell alone.
          num_pieces: pieces of a sequence; microbatches of the table are then pieces, num_pieces of each.
        Raises:
          ValueError: with the table printed and the bad cell marked.
        """
        instance("name", name, str, "a string", who="[schedule]")
        cells = cells_of_table(table)
        actions = [action for row in cells for cell in row for action in cell]
        num_chunks = 1 + max(action.chunk for action in actions)
        placement = placement_of(placement, len(cells[0]), num_chunks)
        num_items = 1 + max(action.microbatch for action in actions)
        pieces = checked_pieces(1, 1, 1, num_pieces)
        if num_items % pieces:
            raise Refused(
                f"[schedule] the table has {num_items} pieces, which num_pieces={pieces} does not divide; number "
                f"piece p of microbatch m as m * {pieces} + p"
            )
        sizes = len(cells[0]), num_items // pieces, len(placement[0])
        by_device = boolean("by_device", by_device, who="[schedule]")
        return cls(name, *sizes, cells, placement, by_device, pieces).validate()

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        name: str = "custom",
        placement: str | Placement | None = None,
        num_pieces: int | None = None,
    ) -> "Schedule":
        """Makes a schedule from text in the form that `render` prints; otherwise as `from_table`.

        placement, num_pieces: None takes those of the title that `render` prints; without one "loop" and 1.
        """
        table, options = parse_table(text), titled(text)
        given = {"placement": placement, "num_pieces": num_pieces}
        options |= {option: value for option, value in given.items() if value is not None}
        return cls.from_table(table, name=name, **options)

    def stage_of(self, device: int, chunk: int) -> int:
        """Returns the stage, 0 .. P*V - 1, that is this chunk of this device."""
        integer("device", device, who="[schedule]", least=0, most=self.num_stages - 1)
        integer("chunk", chunk, who="[schedule]", least=0, most=self.num_chunks - 1)
        return self.placement[device][chunk]

    def device_chunk_of(self, stage: int) -> tuple[int, int]:
        """Returns (device, chunk) that hold a stage; the inverse of `stage_of`."""
        integer("stage", stage, who="[schedule]", least=0, most=self.num_stages * self.num_chunks - 1)
        return self._homes[stage]

    @cached_property
    def _homes(self) -> list[tuple[int, int]]:
        return homes_of(self.placement)

    @property
    def num_items(self) -> int:
        """Returns M * n: microbatches, or their pieces, which actions count."""
        return self.num_microbatches * self.num_pieces

    @property
    def num_ticks(self) -> int:
        """Returns the number of columns of the table."""
        return len(self.table)

    @cached_property
    def ticks(self) -> dict[tuple[str, int, int], int]:
        """Maps (kind, microbatch, stage) -> the tick it runs in, in order of ticks."""
        return {
            (action.kind, action.microbatch, self.placement[device][action.chunk]): tick
            for tick, row in enumerate(self.table)
            for device, cell in enumerate(row)
            for action in cell
        }

    @cached_property
    def has_backward(self) -> bool:
        """Returns False for a forward-only schedule."""
        return any(kind == "B" for kind, _, _ in self.ticks)

    @cached_property
    def splits_backward(self) -> bool:
        """Returns True if weight gradients are separate actions, so that B is the input gradient alone."""
        return any(kind == "W" for kind, _, _ in self.ticks)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Returns static phases (start, stop, kinds), at most six however many microbatches there are.

        One where each device runs its own cell, since kinds that nobody runs cost nothing there.
        """
        return one_phase_of(self.table) if self.by_device else phases_of(self.table)

    @cached_property
    def slots(self) -> Slots:
        """Returns buffer slots that each device needs, and which item uses which."""
        return slots_of(self)

    @cached_property
    def program(self) -> Program:
        """Returns the rows of integers that the executor scans over; see `program.py` for the format."""
        return program_of(self)

    def validate(self) -> "Schedule":
        """Returns self, or raises ValueError with the table and the bad cell marked."""
        validate(self)
        return self

    def simulate(
        self,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        *,
        head: float = 0,
        attention: float = 0,
    ) -> Simulation:
        """Returns time, bubble fraction and peak memory, for costs of one microbatch on all chunks of a device.

        `head` is what head and loss of a microbatch cost each device, in the tick in which it leaves the last
        stage. `attention` is the share of the other costs that attention to other tokens has in a whole sequence: of n
        pieces, piece p has (2 p + 2) / n^2 of it, which is what its blocks of keys take, and 1 / n of the rest.
        """
        return simulate(self, Costs(forward, backward_input, backward_weight, head, attention))

    def render(self, *, width: int = 120) -> str:
        """Returns the table as text: a line for each device and kind, in blocks of at most `width` characters."""
        return render(self, width=width)

    def summary(self, **costs: float) -> str:
        """Returns one line: ticks, bubble and memory for the given costs, which are `simulate`'s."""
        result = self.simulate(**costs)
        peaks = " ".join(map(str, result.peak_live_activations))
        return (
            f"{headline(self)}, bubble {result.bubble_fraction:.1%}, "
            f"peak live activations {peaks} (chunks, by device)"
        )

    def forward_only(self) -> "Schedule":
        """Returns the schedule of the forwards alone, for evaluation and log-probs, which keeps nothing."""
        table = [tuple(tuple(a for a in cell if a.kind == "F") for cell in row) for row in self.table]
        while not any(table[-1]):
            table.pop()
        if self.by_device:  # forwards that had a tick to themselves now share it
            table = earliest_forwards(self.table, self.placement)
        return replace(self, name=f"{self.name}, forward only", table=tuple(table), by_device=False)
