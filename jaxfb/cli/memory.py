"""Answers a command that ran out of memory with what would fit."""

from __future__ import annotations

import sys
from typing import Any


def lacks_memory(error: Exception, config: Any) -> bool:
    """Returns whether memory ran out; prints then what the step needs and what would fit."""
    if not isinstance(error, MemoryError) and "jax" not in sys.modules:
        return False
    from jaxfb.planner.too_large import is_lack_of_memory, remedy

    if not is_lack_of_memory(error):
        return False
    first = str(error).partition("\n")[0][:300] or "no memory left on the host"
    print(f"jaxfb: [memory] the run does not fit: {first}\n{remedy(config, error)}", file=sys.stderr)
    return True
