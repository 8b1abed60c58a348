"""Compiles functions with XLA's options, and without those that take memory where a program is too large with them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

from jaxfb.platforms.compat import is_tracing
from jaxfb.platforms.compiler import Options, names_taking_memory, without_memory

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSALS = (
    r"required for HLO temporaries \(([\d.]+)([BKMGT])\) exceeds available HBM \(([\d.]+)([BKMGT])\)",
    r"Used ([\d.]+)([BKMGT]) of ([\d.]+)([BKMGT]) hbm",
)


def per_options(function: Callable, **how: Any) -> Callable[[Options], Program]:
    """Returns a function from options to a `Program` of `jax.jit(function, **how)` with them, made once for each.

    Inside another jit, which has options of its own and for which JAX refuses them, they are left out.
    """

    @cache
    def compiled(options: Options) -> Program:
        return Program(function, options, how)

    return lambda options: compiled(() if is_tracing() else options)


class Program:
    """A jitted function, compiled without options that take memory once it was too large with them."""

    def __init__(self, function: Callable, options: Options, how: dict[str, Any]):
        self._made, self._options = partial(jax.jit, function, **how), options
        self._jitted = self._with(options)

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function. What is donated is still there when it is called again: no program ran before."""
        return self._in_memory(lambda jitted: jitted(*arguments))

    def compile(self, *arguments: Any) -> jax.stages.Compiled:
        """Compiles the program for these arguments; the call with them finds it compiled."""
        return self._in_memory(lambda jitted: jitted.lower(*arguments).compile())

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Lowers the program for these arguments; what it compiles to may be too large."""
        return self._jitted.lower(*arguments)

    def trace(self, *arguments: Any) -> jax.stages.Traced:
        """Traces the function for these arguments; what it compiles to may be too large."""
        return self._jitted.trace(*arguments)

    def _in_memory(self, do: Callable[[Any], Any]) -> Any:
        try:
            return do(self._jitted)
        except jax.errors.JaxRuntimeError as error:
            size, fewer = size_of_refusal(str(error)), without_memory(self._options)
            if size is None or fewer == self._options:
                raise
        _warn(*size, names_taking_memory(self._options))
        self._options, self._jitted = fewer, self._with(fewer)
        return do(self._jitted)

    def _with(self, options: Options) -> Any:
        return self._made(compiler_options=dict(options) or None)


def size_of_refusal(message: str) -> tuple[float, float] | None:
    """Returns the bytes that a TPU's compiler needs, and those that there are, by the message with which it refuses a
    program that is too large; None for any other message.
    """
    found = next((one for form in _REFUSALS if (one := re.search(form, message))), None)
    if found is None:
        return None
    needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
    return needed, available


def _warn(needed: float, available: float, dropped: list[str]) -> None:
    names = ", ".join(dropped)
    warnings.warn(
        f"the program needs {needed / 1e9:.1f} GB of {available / 1e9:.1f} GB and is compiled again, with products "
        "computed twice to save memory; `jaxfb plan --search` finds faster layouts, and compiler_options with null "
        f"(None in Python) for {names} saves the first attempt",
        stacklevel=4,
    )
