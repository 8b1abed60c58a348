"""`jaxfb plan --search`: the fastest layout that fits, by guess, then by estimate, then by the compiler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxfb.config import Config
from jaxfb.config.show import save_yaml
from jaxfb.planner import gpu
from jaxfb.planner.candidates import candidates, label
from jaxfb.planner.compiled import TooLarge, compiles_here
from jaxfb.planner.estimate import estimate
from jaxfb.planner.guess import guess
from jaxfb.planner.job import model_sizes
from jaxfb.planner.text import answer
from jaxfb.planner.topology import Topology
from jaxfb.planner.verdict import Verdict, compiled_verdict, of_estimate

SLACK = 1.3  # a guess may be so far above the memory and is still traced
MOST_TRACED = 3  # times as many as are asked for, where the estimate finds that few fit


@dataclass(frozen=True)
class Found:
    """A layout and what is known of it."""

    config: Config
    verdict: Verdict

    @property
    def rank(self) -> tuple[bool, float]:
        """Those that fit first, by time."""
        return not self.verdict.fits, self.verdict.step_seconds


def search(
    config: Config,
    topology: Topology,
    *,
    traced: int = 24,
    compiled: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> list[Found]:
    """Layouts of `config` on all devices of `topology`, best first, the compiled ones before the estimated.

    Args:
      traced: how many that fit are traced, best guesses first, a second or two each.
      compiled: how many that fit are compiled; 0 leaves the compiler out.
      say: hears of progress.
    Raises:
      ValueError: the topology has no chip to fit on, or no layout is legal.
    """
    if topology.chip is None:
        raise ValueError(
            f"[plan] --search ranks by a chip's speed and memory, {topology.text} has neither; use v5e:4x4"
        )
    estimated = _estimated(config, topology, traced, say)
    if not compiled or not compiles_here(topology, say):
        return estimated
    answered: list[Found] = []
    for found in _by_kind(estimated)[: 2 * compiled]:
        say(f"compiling {len(answered) + 1}: {label(found.config)}")
        verdict = compiled_verdict(found.config, found.verdict, say)
        say(f"  {answer(verdict)}, {verdict.step_seconds:.2f} s a step")
        answered.append(Found(found.config, verdict))
        if sum(one.verdict.fits for one in answered) == compiled:
            break
    asked = [one.config for one in answered]
    rest = [one for one in estimated if one.config not in asked]
    return sorted(answered, key=lambda one: one.rank) + rest


def write(found: list[Found], directory: Path) -> list[Path]:
    """plan.yaml (the best layout that fits), search.json and, where matplotlib is installed, memory.png."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "search.json"]
    rows = [{"layout": label(one.config), **one.verdict.to_dict()} for one in found]
    written[0].write_text(json.dumps(rows, indent=1) + "\n")
    if found[0].verdict.fits:
        written.append(directory / "plan.yaml")
        save_yaml(found[0].config, written[-1])
    if find_spec("matplotlib"):
        from jaxfb.planner.picture import memory_bars

        written.append(directory / "memory.png")
        memory_bars([(label(one.config), one.verdict) for one in found], written[-1])
    return written


def table(found: list[Found], most: int = 12) -> str:
    """The best candidates, a line each."""
    lines = [f"{'GB':>8} {'of':>7} {'s/step':>9} {'tokens/s':>10} {'MFU':>6} {'by':>9}  layout"]
    for one in found[:most]:
        verdict = one.verdict
        by = "estimate" if verdict.compiled is None else "compiler"
        size = "too large" if isinstance(verdict.compiled, TooLarge) else f"{verdict.needed / 1e9:.2f}"
        lines.append(
            f"{size:>8} {verdict.available / 1e9:>7.1f} {verdict.step_seconds:>9.3f} "
            f"{verdict.tokens_per_second:>10,.0f} {verdict.mfu:>6.1%} {by:>9}  {label(one.config)}"
        )
    return "\n".join(lines)


def _by_kind(estimated: list[Found]) -> list[Found]:
    """The best of each kind first, then the second of each: where an estimate is off, it is off for its kind."""
    seen: Counter[tuple] = Counter()
    turns = []
    for place, found in enumerate(estimated):
        kind = (found.config.mesh.pipe, found.config.mesh.tensor, found.config.parallel.remat)
        turns.append((not found.verdict.fits, seen[kind], place))
        seen[kind] += 1
    return [estimated[place] for *_, place in sorted(turns)]


def _on_hosts(config: Config, topology: Topology) -> bool:
    try:
        gpu.check_hosts(config, topology)
    except ValueError:
        return False
    return True


def _estimated(config: Config, topology: Topology, traced: int, say: Callable[[str], None]) -> list[Found]:
    sizes = model_sizes(config)
    legal = (one for one in candidates(config, sizes, topology.num_devices) if _on_hosts(one, topology))
    guesses = [(guess(one, sizes, topology), one) for one in legal]
    if not guesses:
        devices = topology.num_devices
        raise ValueError(
            f"[plan] no mesh of {devices} devices divides {config.batch.rows} rows and {sizes.num_layers} layers; "
            f"use batch.rows={devices * -(-config.batch.rows // devices)}"
        )
    limit = SLACK * topology.chip.memory
    near = sorted((g for g in guesses if g[0].bytes < limit), key=lambda pair: pair[0].seconds)
    tightest = sorted(guesses, key=lambda pair: pair[0].bytes)
    say(f"{len(guesses)} layouts, {len(near)} may fit; tracing until {min(traced, len(near))} do")
    found: list[Found] = []
    for _, one in (near or tightest)[: MOST_TRACED * traced]:
        job, counted = estimate(one, topology)
        found.append(Found(one, of_estimate(job, counted, topology)))
        fitting = sum(bool(one.verdict.fits) for one in found)
        if len(found) % 8 == 0 or fitting == traced:
            say(f"  traced {len(found)}: {fitting} fit")
        if fitting == traced:
            break
    return sorted(found, key=lambda one: one.rank)
