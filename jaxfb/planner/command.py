"""`jaxfb plan`: the page or the JSON of a verdict, with progress on the standard error."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxfb.config import Config
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.config.sections import AutoMesh
from jaxfb.planner.job import model_sizes
from jaxfb.planner.post_training import check_searchable
from jaxfb.planner.text import page
from jaxfb.planner.too_large import would_fit
from jaxfb.planner.topology import Topology
from jaxfb.planner.verdict import plan as plan_of
from jaxfb.process.exit_codes import DONE, FAILED
from jaxfb.process.signals import terminated_like_ctrl_c


def plan(
    name: str, config: Config | PostTrainingConfig, topology: Topology, compiles: bool, as_json: bool
) -> int:
    """Prints the verdict of one config on one topology, and changes with which what does not fit would.

    Returns the exit code, `FAILED` where it does not fit.
    """
    config = laid_out(config, topology)
    with terminated_like_ctrl_c():  # which ends the process that compiles, and removes its files
        verdict = plan_of(config, topology, compiles=compiles, say=say)
    print(json.dumps(verdict.to_dict(), indent=1) if as_json else page(name, verdict))
    if verdict.fits is not False:
        return DONE
    if not as_json:
        print(f"\n{would_fit(config, verdict)}")
    return FAILED


def search(name: str, config: Config, topology: Topology, compiles: bool, layouts: int, out: str) -> int:
    """Prints the best layouts, then the verdict of the best, and writes them to `out`.

    Returns the exit code, `FAILED` where no layout fits.
    Files are written as layouts are found, and what is known is read again, so stopping loses nothing.
    """
    check_searchable(config)
    config = laid_out(config, topology)
    from jaxfb.planner.known import Known
    from jaxfb.planner.search import compared, draw, table, write
    from jaxfb.planner.search import search as search_for

    directory, latest = Path(out), []

    def keep(found) -> None:
        latest[:] = found
        write(found, directory)

    known = Known(directory / "known.jsonl")
    try:
        count = 3 if compiles else 0
        with terminated_like_ctrl_c():
            found = search_for(
                config, topology, layouts=layouts, compiled=count, say=say, keep=keep, known=known
            )
    except KeyboardInterrupt:
        if latest:
            print("\n".join(filter(None, (table(latest), compared(latest)))))
            what = f"the results so far are in {directory}, and the same command continues from them"
        else:
            what = "no layout is known yet, and nothing is written"
        say(f"[plan] stopped; {what}")
        raise
    print("\n".join(filter(None, (table(found), compared(found)))))
    fits = found[0].verdict.fits is not False
    print("\n" + page(f"{name}, {'best' if fits else 'smallest'} layout", found[0].verdict))
    _print_prices(found[0].config, topology)
    for path in write(found, directory) + draw(found, directory):
        print(f"wrote {path}")
    if not fits:
        print(would_fit(found[0].config, found[0].verdict))
        return FAILED
    print(f"train with this layout: jaxfb train {shlex.quote(str(directory / 'plan.yaml'))}")
    return DONE


def laid_out(config: Config | PostTrainingConfig, topology: Topology) -> Any:
    """Returns the config with a layout where it leaves its mesh open, which is printed."""
    if not (isinstance(config, Config) and isinstance(config.mesh, AutoMesh)):
        return config
    from jaxfb.planner.auto import choose

    chosen = choose(config, topology)
    say("\n".join(chosen.lines))
    return chosen.config


def _print_prices(best: Config, topology: Topology) -> None:
    """Prints what each use of memory costs on the best mesh, from least memory on."""
    from jaxfb.planner.memory_left import least, prices

    sizes = model_sizes(best)
    if lines := prices(least(best), sizes, topology):
        plain = least(best).parallel
        print(f"\nby formula, from remat={plain.remat} and fsdp_gather={plain.fsdp_gather} on this mesh:")
        print("\n".join(f"  {line}" for line in lines) + "\n")


def say(text: str) -> None:
    """Prints a line of progress to stderr, apart from the result on stdout."""
    print(text, file=sys.stderr, flush=True)
