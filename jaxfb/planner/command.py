"""`jaxfb plan`: the page or the JSON of a verdict, with progress on the standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxfb.config import Config
from jaxfb.planner.text import page
from jaxfb.planner.topology import Topology
from jaxfb.planner.verdict import plan as plan_of


def plan(name: str, config: Config, topology: Topology, compiles: bool, as_json: bool) -> None:
    """Prints the verdict of one config on one topology."""
    verdict = plan_of(config, topology, compiles=compiles, say=say)
    print(json.dumps(verdict.to_dict(), indent=1) if as_json else page(name, verdict))


def search(name: str, config: Config, topology: Topology, compiles: bool, traced: int, out: str) -> None:
    """Prints the best layouts, then the verdict of the best, and writes them to `out`."""
    from jaxfb.planner.search import search as search_for
    from jaxfb.planner.search import table, write

    found = search_for(config, topology, traced=traced, compiled=3 if compiles else 0, say=say)
    print(table(found))
    print("\n" + page(f"{name}, best layout", found[0].verdict))
    for path in write(found, Path(out)):
        print(f"wrote {path}")


def say(text: str) -> None:
    """Progress, beside what is printed."""
    print(text, file=sys.stderr, flush=True)
