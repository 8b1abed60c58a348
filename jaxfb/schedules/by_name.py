"""Schedules by name (forward_backward step)."""

import difflib

from jaxfb.schedules.gpipe import gpipe
from jaxfb.schedules.interleaved import interleaved
from jaxfb.schedules.one_f_one_b import one_f_one_b
from jaxfb.schedules.table import Schedule
from jaxfb.schedules.v_shape import v_shape
from jaxfb.schedules.zero_bubble import zero_bubble

BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "v_shape": v_shape,
}
"""Name -> function (num_stages, num_microbatches, num_chunks) -> Schedule."""

NAMES = tuple(BUILDERS)


def make(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """A built-in schedule.

    Args:
      name: one of NAMES.
      num_stages: P, devices on the pipe axis.
      num_microbatches: M, any number from 1; it need not be a multiple of P.
      num_chunks: V, stages a device holds; the model is cut into P * V. Exactly 2 for v_shape.
    Raises:
      ValueError: an unknown name, a size below 1, or num_chunks that v_shape cannot use.
    """
    check_name(name)
    for key, value in (
        ("num_stages", num_stages),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"[schedule] {key} must be an integer of at least 1; got {key}={value!r}; use {key}=1"
            )
    return BUILDERS[name](num_stages, num_microbatches, num_chunks)


def check_name(name: str) -> None:
    """ValueError with the nearest known name."""
    if name not in BUILDERS:
        nearest = difflib.get_close_matches(str(name).lower().replace("-", "_"), NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(f"[schedule] unknown schedule {name!r}; use {nearest!r} (known: {', '.join(NAMES)})")
