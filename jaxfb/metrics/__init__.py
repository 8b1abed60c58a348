"""The numbers of a run on their way out: to files and services, to the terminal, to a picture.

Numbers leave the device one step behind (`Pending`), become plain floats, and go to every
`Writer` and to the `Progress` display.
"""

from jaxfb.metrics.pending import Pending, arrays, scalars
from jaxfb.metrics.plot import draw_or_say, plot_losses, plot_policy
from jaxfb.metrics.throughput import Throughput
from jaxfb.metrics.writers import (
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    Writer,
    check_writers,
    make_writers,
    read_jsonl,
)

__all__ = [
    "JsonlWriter",
    "Pending",
    "TensorBoardWriter",
    "Throughput",
    "WandbWriter",
    "Writer",
    "arrays",
    "check_writers",
    "draw_or_say",
    "make_writers",
    "plot_losses",
    "plot_policy",
    "read_jsonl",
    "scalars",
]
