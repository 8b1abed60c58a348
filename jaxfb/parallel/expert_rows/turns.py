"""Runs one form of a function where nothing is differentiated, and another one, which is equal, where something is.

Experts exchange rows in turns in a forward alone. In a backward there are products that no exchange needs, those of the
gradient of the experts' matrices and of rows that are computed again, and each turn would end its loops over tiles of
rows with tiles that are part empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxfb.platforms.compat import custom_vjp


def where_not_differentiated(plain: Callable, differentiated: Callable, *args: Any) -> Any:
    """Returns plain(*args); where a gradient is asked for, what is equal, differentiated(*args).

    args: trees of arrays. What the functions hold themselves, such as biases and adapters, may have a gradient too.
    """
    plain, of_plain = jax.closure_convert(plain, *args)
    differentiated, held = jax.closure_convert(differentiated, *args)
    return _either(plain, differentiated, of_plain, held, args)


@custom_vjp(0, 1)
def _either(plain, differentiated, of_plain, held, args):
    return plain(*args, *of_plain)


def _forward(plain, differentiated, of_plain, held, args):
    return jax.vjp(lambda held, args: differentiated(*args, *held), held, args)


def _backward(plain, differentiated, vjp, cotangent):
    return None, *vjp(cotangent)


_either.defvjp(_forward, _backward)
