"""Removes the steps that a run no longer keeps; one that cannot be removed does not end the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class _Removal:
    """Orbax's removal of old steps; what cannot be removed is reported and stays.

    On a network file system that is a step of which another program has a file open. The new step is complete by then.
    """

    def __init__(self, removal: Any):
        self._removal = removal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._removal, name)

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Removes each of the steps."""
        for step in steps:
            try:
                self._removal.delete(step)
            except OSError as error:
                reason = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
                log.warning(
                    "[checkpoint] step %d, which is no longer kept, cannot be removed: %s; the run goes on",
                    step,
                    reason,
                )


def pass_over_failed_removals(writer: Any) -> None:
    """Lets a writer of Orbax go on where an old step cannot be removed; it would raise that for the new step."""
    manager: Any = getattr(writer, "_manager", None)  # private names of Orbax; without them it raises
    if hasattr(manager, "_checkpoint_deleter"):
        manager._checkpoint_deleter = _Removal(manager._checkpoint_deleter)
