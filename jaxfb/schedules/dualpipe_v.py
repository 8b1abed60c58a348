"""DualPipeV (forward_backward step): forwards of one chunk alternate with backwards of the other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxfb.schedules.action import Action
from jaxfb.schedules.earliest import earliest
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import check_two_chunks, v_placement
from jaxfb.schedules.table import Schedule


@schedule_kind(
    "dualpipe_v",
    chunks=lambda asked: (2,),
    fill=lambda stages: (stages - 1) / 3,
    in_flight=lambda stages, chunks: stages + 1 / 2,
    splits_backward=True,
    by_device=True,
)
def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs one action of two chunks a tick on each device: 6M + P - 1 ticks, for M of at least 2P.

    As short as zb_v, with 2P + 1 half-stages live on every device, one more than zb_v. W follows its B at once but for
    both ends of the schedule, so what B leaves for W is freed earlier. DualPipeV is the half of DeepSeek's DualPipe
    (arXiv:2412.19437, section 3.2.1) that keeps one copy of the parameters. ValueError unless num_chunks is 2.
    """
    check_two_chunks("dualpipe_v", num_chunks, instead="zero_bubble")
    placement = v_placement(num_stages)
    # the order is defined from 2P microbatches on; without the last of them it stays a possible one
    count = max(num_microbatches, 2 * num_stages)
    orders = [_Order().of(num_stages, count, device) for device in range(num_stages)]
    wanted = [[a for a in order if a.microbatch < num_microbatches] for order in orders]
    ticks = tuple(earliest(wanted, placement))
    return Schedule("dualpipe_v", num_stages, num_microbatches, 2, ticks, placement, by_device=True)


@dataclass
class _Order:
    """Counts microbatches of each kind and chunk, and keeps the weight gradients that are put off."""

    begun: Counter = field(default_factory=Counter)
    put_off: deque[Action] = field(default_factory=deque)

    def of(self, num_stages: int, num_microbatches: int, device: int) -> list[Action]:
        """Returns a device's actions in the published order of eight steps."""
        below = num_stages - 1 - device
        return [
            *self._each(2 * below, "F0"),
            *self._each(device + 1, "F0 F1"),
            *self._each(below, "b1 w F1"),
            *self._each(num_microbatches - 2 * num_stages + device + 1, "F0 B1 F1 B0"),
            *self._each(below, "B1 F1 B0"),
            *self._last_backwards(device),
            *self._each(below, "w b0"),
            *self._each(device + 1, "w"),
        ]

    def _each(self, times: int, steps: str) -> Iterator[Action]:
        for _ in range(times):
            for step in steps.split():
                yield from self._step(step)

    def _last_backwards(self, device: int) -> Iterator[Action]:
        """Yields B of both chunks in turn; from the middle on their weight gradients are put off."""
        for i in range(2 * (device + 1)):
            yield from self._step(("B" if i <= device else "b") + str(1 - i % 2))

    def _step(self, step: str) -> Iterator[Action]:
        """Yields F, B with its W, b (B whose W is put off), or w (the oldest W that was put off)."""
        if step == "w":
            yield self.put_off.popleft()
            return
        kind, chunk = step[0].upper(), int(step[1])
        action = Action(kind, self.begun[step.upper()], chunk)
        self.begun[step.upper()] += 1
        yield action
        if kind == "B":
            weights = action._replace(kind="W")
            if step[0] == "b":
                self.put_off.append(weights)
            else:
                yield weights
