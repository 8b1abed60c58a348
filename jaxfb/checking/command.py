"""Runs `jaxfb check --random`: progress goes to stderr, the summary to stdout. No JAX in here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxfb import refusal
from jaxfb.checking.drawing.draw import AXES, NUM_DEVICES
from jaxfb.checking.drawing.shrink import MOST_TRIES
from jaxfb.checking.found import Found
from jaxfb.checking.search import search
from jaxfb.checking.worker import Setup
from jaxfb.training.job.simulated import simulate_devices


def random_check(
    number: int,
    seed: int = 0,
    first: int = 0,
    jobs: int = 1,
    limit: float = 600.0,
    tries: int = MOST_TRIES,
    model: str | None = None,
    axes: Sequence[str] | None = None,
) -> Found:
    """Runs so many random cases in separate processes, prints the results and returns them.

    Args:
      number, seed, first: cases first ... first + number - 1 of this seed; each is the same whenever it is drawn.
      jobs: processes at a time.
      limit: seconds that one case may take.
      tries: how many smaller cases to try for a finding; 0 leaves it as it is.
      model: "module:function" that gives (model, params, batch); None draws models as well.
      axes: those that the mesh of that model may have; None for pipe (of a `Pipelined`), data, fsdp and tensor.

    Raises:
      ValueError: an argument is illegal, or the model cannot be used.
    """
    for name, value, least in (
        ("--random", number, 1),
        ("--first", first, 0),
        ("--jobs", jobs, 1),
        ("--tries", tries, 0),
    ):
        refusal.integer(name, value, who="[check]", least=least)
    refusal.number("--limit", limit, who="[check]", above=0)
    if axes is not None and model is None:
        raise refusal.Refused(
            "[check] --axes limits the meshes of a user's model; name the model by --model, or leave --axes out"
        )
    for axis in axes or ():
        refusal.choice("each of --axes", axis, tuple(AXES), who="[check]")
    simulate_devices({"any": NUM_DEVICES})
    where = os.environ["JAX_PLATFORMS"]
    print(f"{number} random cases of seed {seed}, each next to one device, on {where}", file=sys.stderr)
    setup = Setup(seed, model, axes, limit)
    found = search(number, setup, first, jobs, tries, lambda one: print(one, file=sys.stderr, flush=True))
    print(found)
    return found
