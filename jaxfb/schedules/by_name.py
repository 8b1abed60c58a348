"""Schedules by name."""

from jaxfb.refusal import Refused, instance, with_nearest_keyword
from jaxfb.schedules.builders import (  # noqa: F401
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    seq1f1b,
    seq_abreast,
    v_half,
    v_min,
    v_shape,
    zb_v,
    zero_bubble,
)
from jaxfb.schedules.kinds import KINDS, Kind, kind_of
from jaxfb.schedules.sizes import checked_pieces, checked_sizes
from jaxfb.schedules.table import Schedule

_SIZES = ("num_stages", "num_microbatches", "num_chunks", "num_pieces")

# Importing a file registers its kind. A new built-in kind is one file, and its name in the import above.


@with_nearest_keyword()
def make(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1, num_pieces: int = 1
) -> Schedule:
    """Builds a schedule by name.

    Args:
      name: one of `NAMES`, or "package.module:function" for a function of the three sizes.
      num_stages: P, devices on the pipe axis.
      num_microbatches: M, any number from 1; it need not be a multiple of P.
      num_chunks: V, stages a device holds; the model is cut into P * V. Exactly 2 for v_shape, zb_v,
        v_half, v_min and dualpipe_v.
      num_pieces: pieces that each sequence is cut into; 1 but for seq1f1b and seq_abreast.
    Raises:
      ValueError: an unknown name, a size below 1, or num_chunks or num_pieces that the kind cannot use.
    """
    try:
        kind = kind_of(name)
    except Refused as refused:
        choices = [{"name": near} for choice in refused.choices for near in choice.values()]
        raise Refused(str(refused), choices) from None
    sizes = checked_sizes(num_stages, num_microbatches, num_chunks)
    sizes += pieces_of(name, kind, sizes, num_pieces)
    schedule = instance(
        "name", kind.build(*sizes), Schedule, f"that of a function that returns a Schedule, {name!r}"
    )
    _check_sizes(name, schedule, dict(zip(_SIZES, (*sizes[:3], num_pieces), strict=True)))
    return schedule


def _check_sizes(name: str, schedule: Schedule, asked: dict[str, int]) -> None:
    """Refuses a schedule of other sizes, which would leave microbatches out; a kind that was asked for one chunk may
    have several."""
    found = {size: getattr(schedule, size) for size in asked}
    if asked["num_chunks"] == 1:
        asked = asked | {"num_chunks": found["num_chunks"]}
    other = [size for size in asked if asked[size] != found[size]]
    if other:
        raise Refused(
            f"[schedule] the function of {name!r} must return a schedule of "
            f"{' and '.join(f'{size}={asked[size]}' for size in other)}, which it was given, got one of "
            f"{' and '.join(f'{size}={found[size]}' for size in other)}"
        )


def pieces_of(name: str, kind: Kind, sizes: tuple[int, int, int], num_pieces: int) -> tuple[int, ...]:
    """Returns the size of `build` behind the three that every kind has, if this kind has one.

    Raises:
      ValueError: there are several pieces and the kind has whole sequences, or its table would be too large.
    """
    pieces = checked_pieces(*sizes, num_pieces)
    if not kind.pieces and pieces > 1:
        raise Refused(
            f"[schedule] {name} runs whole sequences, but num_pieces={pieces} cuts them; use schedule=seq1f1b or "
            "num_pieces=1",
            [{"name": "seq1f1b"}, {"num_pieces": 1}],
        )
    return (pieces,) if kind.pieces else ()


def check_name(name: str) -> None:
    """Raises ValueError with the nearest known name if there is no such schedule."""
    KINDS.check(name)


NAMES = tuple(KINDS)
