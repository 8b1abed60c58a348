"""`python -m jaxfb.chaos.worker FAULT COMMAND CONFIG ...`: the command line, with a fault made inside; "-": none."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module


def main(arguments: list[str]) -> int:
    """Runs one training command; returns its exit code."""
    name, *rest = arguments
    if name != "-":
        from jaxfb import trainer
        from jaxfb.chaos.faults import FAULTS

        trainer.train = partial(trainer.train, callbacks=[FAULTS[name]()])
    return import_module("jaxfb.cli").main(
        rest
    )  # by name, since the command line offers this package as a command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
