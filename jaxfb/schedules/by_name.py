"""Schedules by name (forward_backward step)."""

from jaxfb.refusal import Refused, instance
from jaxfb.schedules import (  # noqa: F401
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    v_half,
    v_min,
    v_shape,
    zb_v,
    zero_bubble,
)
from jaxfb.schedules.kinds import KINDS, kind_of
from jaxfb.schedules.sizes import checked_sizes
from jaxfb.schedules.table import Schedule

# Importing a file registers its kind. A new built-in kind is one file, and its name in the import above.


def make(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Builds a schedule by name.

    Args:
      name: one of `NAMES`, or "package.module:function" for a function of the three sizes.
      num_stages: P, devices on the pipe axis.
      num_microbatches: M, any number from 1; it need not be a multiple of P.
      num_chunks: V, stages a device holds; the model is cut into P * V. Exactly 2 for v_shape, zb_v,
        v_half, v_min and dualpipe_v.
    Raises:
      ValueError: an unknown name, a size below 1, or num_chunks that the kind cannot use.
    """
    try:
        kind = kind_of(name)
    except Refused as refused:
        choices = [{"name": near} for choice in refused.choices for near in choice.values()]
        raise Refused(str(refused), choices) from None
    sizes = checked_sizes(num_stages, num_microbatches, num_chunks)
    return instance(
        "name", kind.build(*sizes), Schedule, f"that of a function that returns a Schedule, {name!r}"
    )


def check_name(name: str) -> None:
    """Raises ValueError with the nearest known name if there is no such schedule."""
    KINDS.check(name)


NAMES = tuple(KINDS)
