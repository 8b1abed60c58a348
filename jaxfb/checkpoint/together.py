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

from jaxfb.refusal import StorageError

Value = TypeVar("Value")
# what no damaged file causes: another process is gone, or memory is lacking
NOT_OF_A_FILE = (jax.errors.JaxRuntimeError, MemoryError)


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
      StorageError: it failed on another process alone.
      Exception: it failed on this one.
    """
    found: Any = None
    failed: Exception | None = None
    try:
        found = read()
    except NOT_OF_A_FILE:
        raise
    except Exception as error:
        failed = error
    reasons = gathered(None if failed is None else describe(failed))
    if failed is not None:
        raise failed
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise StorageError(f"step {step} {reason} (found by process {process})")
    return found
