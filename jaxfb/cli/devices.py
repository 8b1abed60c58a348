"""Answers a command whose devices cannot be opened, such as JAX_PLATFORMS=cuda where there is no GPU."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from jaxfb.process.exit_codes import FAILED, REFUSED

# What stays so however often the command is started; a device that another process has may be free later.
_NO_PLUGIN = "none of its plugins is for them"
_LASTING = (_NO_PLUGIN, "not in the list of known backends", "No visible", "cannot open shared object file")


def without_devices(error: Exception) -> int | None:
    """Prints a sentence and returns the exit code where jax could not open its devices; None for any other error."""
    if not _is_of_the_devices(error):
        return None
    asked, why = os.environ.get("JAX_PLATFORMS", ""), _reason(error)
    given = f" that JAX_PLATFORMS={asked} asks for" if asked else ""
    remedy = "unset JAX_PLATFORMS to take what this machine has" if asked else "see what else uses them"
    print(
        f"jaxfb: [devices] jax cannot open the devices{given}: {why}; {remedy}, or set JAX_PLATFORMS=cpu",
        file=sys.stderr,
    )
    return REFUSED if any(words in why for words in _LASTING) else FAILED


def _reason(error: Exception) -> str:
    """Returns jax's own reason on one line, without the advice behind it."""
    if isinstance(error, AssertionError):
        return _NO_PLUGIN
    first = str(error).partition(" (set JAX_PLATFORMS")[0].partition("\n")[0]
    return first.partition("backend ")[2].removesuffix(".")[:300] or first[:300]


def _is_of_the_devices(error: Exception) -> bool:
    """Returns whether jax raised it when it opened its devices; for a missing plugin it asserts without a word."""
    if not isinstance(error, AssertionError | RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).name == "xla_bridge.py"
