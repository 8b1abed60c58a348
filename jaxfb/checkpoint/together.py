"""Lets the processes of a job tell each other JSON values, and read a checkpoint as one: all of them have it, or none.

Every process calls each function, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxfb.checkpoint.obstacles import Unreadable
from jaxfb.platforms.runtime_errors import as_runtime_errors
from jaxfb.refusal import StorageError

Value = TypeVar("Value")
# what no damaged file causes: another process is gone, memory is lacking, or the file may not be read
NOT_OF_A_FILE = (jax.errors.JaxRuntimeError, MemoryError, Unreadable)


@as_runtime_errors()
def gathered(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.array([text.size], np.int32)))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def read_by_all(read: Callable[[], Value], step: int, describe: Callable[[Exception], str]) -> Value:
    """Returns what `read` returns here, once it has returned on every process; it must not wait for the others.

    Were it to fail on one process alone, that one would go on to another checkpoint while the others wait for it.

    Args:
      step: that is read, for messages. describe: error -> what is wrong with the step, such as "is damaged: ...".
    Raises:
      StorageError: it failed on another process alone; Unreadable where that one may not read it.
      Exception: it failed on this one.
    """
    found: Any = None
    failed: Exception | None = None
    try:
        found = read()
    except Exception as error:
        if isinstance(error, NOT_OF_A_FILE) and not isinstance(error, Unreadable):
            raise
        failed = error
    reasons = gathered(_told(failed, describe))
    if failed is not None:
        raise failed
    for process, reason in enumerate(reasons):
        if isinstance(reason, dict):
            raise Unreadable(f"{reason['obstacle']} (found by process {process})")
        if reason is not None:
            raise StorageError(f"step {step} {reason} (found by process {process})")
    return found


def _told(failed: Exception | None, describe: Callable[[Exception], str]) -> Any:
    """Returns what the others receive: None, what is damaged, or {"obstacle": why it may not be read}."""
    if isinstance(failed, Unreadable):
        return {"obstacle": str(failed)}
    return None if failed is None else describe(failed)
