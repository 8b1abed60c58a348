"""The registry of schedule kinds: how each is built, and what is known of it without building a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxfb.refusal import function
from jaxfb.registry import Registry
from jaxfb.schedules.table import Schedule

Build = Callable[..., Schedule]
B = TypeVar("B", bound=Callable[..., Schedule])


@dataclass(frozen=True)
class Kind:
    """Describes a way to build a schedule for any sizes.

    build:           (num_stages, num_microbatches, num_chunks) -> Schedule; with `pieces` a fourth size, num_pieces.
    chunks:          the numbers of chunks that suit the kind, given the number that is asked for; the first is the
      default.
    fill:            stages P -> microbatches of one chunk for which a device idles in all.
    in_flight:       (P, num_chunks) -> microbatches whose activations device 0 keeps at the peak.
    splits_backward: weight gradients are separate actions.
    by_device:       each device computes its own actions alone, so a stage may have no collective in it.
    pieces:          it can cut each microbatch's sequences into pieces.
    baseline:        no user would choose it; the planner's search leaves it out.
    """

    build: Build
    chunks: Callable[[int], tuple[int, ...]] = lambda asked: (1,)
    fill: Callable[[int], float] = lambda stages: stages - 1
    in_flight: Callable[[int, int], float] = lambda stages, chunks: stages + (stages - 1) / chunks
    splits_backward: bool = False
    by_device: bool = False
    pieces: bool = False
    baseline: bool = False

    @property
    def default_chunks(self) -> int:
        """Returns the number of chunks where none is given."""
        return self.chunks(1)[0]


KINDS: Registry[Kind] = Registry("schedule")


def schedule_kind(name: str, **known) -> Callable[[B], B]:
    """Returns a decorator that registers a builder under a name; `known` are the other fields of its `Kind`.

    A builder that is named by "package.module:function" instead is a `Kind` with the default fields.
    """

    def add(build: B) -> B:
        KINDS.register(name)(Kind(build, **known))
        return build

    return add


def kind_of(name: str) -> Kind:
    """Returns the kind of a name; ValueError with the nearest name if there is none."""
    found = KINDS[name]
    if isinstance(found, Kind):
        return found
    return Kind(
        function("name", found, "(num_stages, num_microbatches, num_chunks) -> Schedule", who="[schedule]")
    )


def default_name(num_chunks: int, num_pieces: int = 1) -> str:
    """Returns the default schedule: 1f1b, interleaved for several chunks, seq1f1b for pieces of sequences."""
    if num_pieces > 1:
        return "seq1f1b"
    return "1f1b" if num_chunks == 1 else "interleaved"
