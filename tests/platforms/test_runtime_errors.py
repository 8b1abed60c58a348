"""Errors of the runtime are recognised where JAX raises them as a ValueError too."""

import jax
import pytest

from jaxfb.planner.too_large import is_lack_of_memory
from jaxfb.platforms.runtime_errors import as_runtime_errors, is_of_network, is_of_runtime
from jaxfb.refusal import Refused

GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"
FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (jax.errors.JaxRuntimeError("x"), True),
        (ValueError(GLOO), True),
        (ValueError(FULL), True),
        (ValueError("rows must be positive"), False),
        (ValueError("NOT_FOUND: a file"), False),
        (Refused(GLOO), False),
        (RuntimeError(GLOO), False),
        (None, False),
    ],
)
def test_which_errors_are_the_runtimes(error, found):
    assert is_of_runtime(error) is found


def test_they_get_one_kind():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"), as_runtime_errors():
        raise ValueError(GLOO)
    with pytest.raises(ValueError, match="rows"), as_runtime_errors():
        raise ValueError("rows")


def test_memory_that_an_update_after_the_first_lacks_is_recognised():
    assert is_lack_of_memory(ValueError(FULL))


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (GLOO, True),
        (
            "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error. Last error: socketPollConnect",
            True,
        ),
        ("INTERNAL: Gloo has no such reduction", False),
        ("INTERNAL: Socket is no word of a collective", False),
        (FULL, False),
    ],
)
def test_which_errors_are_the_networks(message, found):
    assert is_of_network(jax.errors.JaxRuntimeError(message)) is found
