"""Tells errors of the runtime, such as a process that is gone or memory that is lacking, from those of a wrong call.

JAX raises them as JaxRuntimeError, except where a compiled function is called again with arguments of the same kind:
that call goes past Python and raises a plain ValueError with the same message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|INTERNAL|UNAVAILABLE): "
)

_OF_THE_NETWORK = re.compile(r"(?i)\b(gloo|nccl)\b.*(time|connection|socket|peer|remote|network)")


def is_of_runtime(error: BaseException | None) -> bool:
    """Returns whether a device, its memory or another process has failed, by the kind of an error and its message."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    return type(error) is ValueError and _STATUS.match(str(error)) is not None


def is_of_network(error: BaseException | None) -> bool:
    """Returns whether processes could not reach each other in a computation, by the words of gloo and NCCL."""
    return is_of_runtime(error) and _OF_THE_NETWORK.search(str(error)) is not None


@contextmanager
def as_runtime_errors() -> Iterator[None]:
    """Makes a JaxRuntimeError of what a compiled function raises as a ValueError; also a decorator."""
    try:
        yield
    except ValueError as error:
        if not is_of_runtime(error):
            raise
        raise jax.errors.JaxRuntimeError(str(error)) from error
