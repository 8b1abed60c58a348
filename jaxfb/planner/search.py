"""`jaxfb plan --search`: the fastest layout that fits, by formula, then by the compiler."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from jaxfb.config import Config
from jaxfb.config.show import save_yaml
from jaxfb.display import number_of
from jaxfb.models.config import TransformerConfig
from jaxfb.planner import gpu
from jaxfb.planner.candidates import NOTHING, Fixed, candidates, label
from jaxfb.planner.compiled import TooLarge, check_compiler, compiles_here
from jaxfb.planner.counts import num_shards, schedule_name
from jaxfb.planner.formula.estimate import Estimate, estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.known import Known
from jaxfb.planner.memory_left import variants
from jaxfb.planner.text import duration_of, headline
from jaxfb.planner.topology import Topology
from jaxfb.planner.verdict import Verdict, compiled_verdict, estimated
from jaxfb.refusal import Refused

LEFT = 0.1
"""Share of a chip's memory that layouts made to fill it leave free by formula."""
LESS = 0.05
"""Share of a faster layout's memory that a slower one of its kind must save to be kept."""
ALIKE = 0.01
"""Times that differ by less are the same to the formula, and the smaller of two such layouts is compiled first."""


@dataclass(frozen=True)
class Found:
    """A layout and what is known of it; given: whether it is that of the config that the search began with."""

    config: Config
    verdict: Verdict
    given: bool = False

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Returns the candidates that fit first, then by whether the compiler answered, then by time; those that do not
        fit by memory.
        """
        verdict = self.verdict
        return (
            not verdict.fits,
            verdict.compiled is None,
            verdict.step_seconds if verdict.fits else verdict.needed,
        )


def search(
    config: Config,
    topology: Topology,
    *,
    layouts: int = 24,
    compiled: int = 3,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Found]], None] = lambda found: None,
    known: Known | None = None,
) -> list[Found]:
    """Returns layouts of `config` on all devices of `topology` that fit, best first, compiled ones before others.

    The config's own layout is among them, where it can be on the topology, and is compiled first.

    Args:
      layouts: how many are kept of those that fit by formula, the fastest first.
      compiled: how many that fit are compiled; 0 leaves the compiler out.
      say: receives progress, a line at a time.
      keep: receives the layouts found so far, in the order of the result, each time that there are more.
      known: verdicts of an earlier search, which are not worked out again, and where new ones are added.
    Raises:
      ValueError: the topology has no chip to fit on, no layout is legal, the TPU compiler is not installed, or it
        refuses every layout.
    """
    if topology.chip is None:
        raise Refused(
            f"[plan] --search ranks by a chip's speed and memory, {topology.text} has neither; use v5e:4x4"
        )
    if layouts < 1:
        raise Refused(f"[plan] --layouts {layouts} must be at least 1; use --layouts 1")
    if compiled:
        check_compiler(topology)
    known = known or Known()
    given = _given(config, topology, known, say)
    sizes, opened = model_sizes(config), given[0].config if given else _on_one_part(config)
    fastest = picked(by_formula(opened, sizes, topology, NOTHING), sizes, topology, layouts, say)
    others = [one for one in fastest if one not in [_as_candidate(own) for own in given]]
    found = _ranked(given + _taken(others, topology, known, say))
    keep(found)
    if not compiled or not compiles_here(found[0].config, topology, say):
        return found
    return _compiled(found, compiled, known, say, keep)


def _as_candidate(given: Found) -> Config:
    """Returns a given layout with the words in which `candidates` has the same one."""
    config, parallel = given.config, given.config.parallel
    gather = parallel.fsdp_gather if num_shards(config) > 1 else "layer"
    batch = replace(
        config.batch, rows_per_microbatch=given.verdict.rows_per_microbatch, num_microbatches=None
    )
    schedule = schedule_name(config) if config.mesh.pipe > 1 else None
    return replace(config, schedule=schedule, batch=batch, parallel=replace(parallel, fsdp_gather=gather))


def _on_one_part(config: Config) -> Config:
    """Returns the config with sequences that are not cut where its context axis is left open."""
    return replace(config, mesh=replace(config.mesh, context=max(1, config.mesh.context)))


def write(found: list[Found], directory: Path) -> list[Path]:
    """Replaces search.json (every layout, best first) and plan.yaml (the best, where one fits) in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"layout": label(one.config), "given": one.given, **one.verdict.to_dict()} for one in found]
    results, best = directory / "search.json", directory / "plan.yaml"
    temporary = results.with_name("search.json.tmp")
    temporary.write_text(json.dumps(rows, indent=1) + "\n")
    temporary.replace(results)  # whoever reads, or stops the search, always has a whole file
    if not found[0].verdict.fits:
        best.unlink(missing_ok=True)
        return [results]
    save_yaml(found[0].config, best)
    return [results, best]


def draw(found: list[Found], directory: Path) -> list[Path]:
    """Replaces memory.png where matplotlib is installed."""
    if not find_spec("matplotlib"):
        return []
    from jaxfb.planner.picture import memory_bars

    memory_bars([(label(one.config), one.verdict) for one in found], directory / "memory.png")
    return [directory / "memory.png"]


def table(found: list[Found], most: int = 12) -> str:
    """Returns the best candidates, a line each, and the given layout where it is not among them."""
    lines = [f"{'GB':>8} {'of':>7} {'s/step':>9} {'tokens/s':>10} {'MFU':>6} {'by':>9}  layout"]
    for one in found[:most] + [one for one in found[most:] if one.given]:
        verdict = one.verdict
        by = "formula" if verdict.compiled is None else "compiler"
        size = "too large" if isinstance(verdict.compiled, TooLarge) else f"{verdict.needed / 1e9:.2f}"
        lines.append(
            f"{size:>8} {(verdict.available or 0) / 1e9:>7.1f} {_in_column(verdict.step_seconds):>9} "
            f"{verdict.tokens_per_second:>10,.0f} {verdict.mfu:>6.1%} {by:>9}  {label(one.config)}"
            + (" (given)" if one.given else "")
        )
    return "\n".join(lines)


def _in_column(seconds: float) -> str:
    """Returns seconds with three digits behind the point, or the first three that are not zero."""
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.3g}"


def compared(found: list[Found]) -> str:
    """Returns a sentence on the best layout beside the given one, or that none fits; empty where the given one cannot
    be on the topology.

    Both times are the compiler's, or the formula's while none but the given layout is compiled.
    """
    given = next((one for one in found if one.given), None)
    if not any(one.verdict.fits for one in found):
        return "none of these layouts fits; the smallest is first"
    if given is None:
        return ""
    if not given.verdict.fits:
        return "the given layout does not fit"
    alone = given.verdict.compiled is not None and all(
        one.given or one.verdict.compiled is None for one in found
    )
    plain = [replace(one, verdict=replace(one.verdict, compiled=None)) for one in found] if alone else found
    by = ", by formula" if alone or given.verdict.compiled is None else ""
    best, given = _ranked(plain)[0], next(one for one in plain if one.given)
    if best is given:
        return f"the given layout is the best of these{by}"
    (seconds, before), (size, size_before) = (
        [getattr(one.verdict, name) for one in (best, given)] for name in ("step_seconds", "needed")
    )
    return (
        f"the best layout beside the given one{by}: a step takes {seconds / before:.2f} times as long, "
        f"{seconds:.3g} s in place of {before:.3g} s, and {size / 1e9:.1f} GB in place of {size_before / 1e9:.1f} GB"
    )


def _by_kind(ranked: list[Found]) -> list[Found]:
    """Returns the best of each kind first, then the second of each: where the formula is off, it is off for a kind."""
    kinds: dict[tuple, list[Found]] = {}
    for found in ranked:
        kinds.setdefault(_kind(found.config), []).append(found)
    turns = itertools.zip_longest(*map(_smallest_first, kinds.values()))
    ordered = [found for turn in turns for found in turn if found is not None]
    return sorted(ordered, key=lambda found: not found.verdict.fits)


def _smallest_first(ranked: list[Found]) -> list[Found]:
    """Returns layouts of a kind in their order, but first the smallest of those that are as fast as the fastest."""
    most = (1 + ALIKE) * ranked[0].verdict.step_seconds
    alike = [one for one in ranked if one.verdict.step_seconds <= most]
    best = min(alike, key=lambda one: one.verdict.needed)
    return [best, *(one for one in ranked if one is not best)]


def _kind(config: Config) -> tuple[int, int, str]:
    """Returns what layouts have in common for which the formula is off in the same way: (pipe, tensor, remat)."""
    remat = config.parallel.remat
    return config.mesh.pipe, config.mesh.tensor, "parts" if "+" in remat else remat


def _smaller_and_smaller(fastest: list[tuple[Estimate, Config]]) -> list[Config]:
    """Returns the layouts that take less memory than all faster ones of their kind: the others gain nothing.

    Otherwise a layout would fill the list with each way to share out its devices over data and fsdp.
    """
    smallest: dict[tuple, float] = {}
    kept = []
    for counted, one in fastest:
        kind = _kind(one)
        if counted.total <= (1 - LESS) * smallest.get(kind, math.inf):
            smallest[kind] = counted.total
            kept.append(one)
    return kept


def _can_be(config: Config, topology: Topology, fixed: Fixed) -> bool:
    """Returns whether hosts of this kind can have the layout; simulated devices have no memory but the host's."""
    if topology.chip is None and config.parallel.remat == "offload" and fixed.remat is None:
        return False
    try:
        gpu.check_hosts(config, topology)
    except ValueError:
        return False
    return True


def _given(config: Config, topology: Topology, known: Known, say) -> list[Found]:
    """Returns the layout of the config itself, its mesh without open sizes; none where it is not legal there."""
    try:
        gpu.check_hosts(config, topology)
        verdict = estimated(config, topology)
    except ValueError as error:
        say(f"the given layout is left out: {error}")
        return []
    own = replace(config, mesh=replace(config.mesh, **verdict.mesh))
    return [Found(own, known.get(own, topology) or verdict, given=True)]


def _taken(layouts: list[Config], topology: Topology, known: Known, say) -> list[Found]:
    """Returns the layouts that `jaxfb train` takes; an option of the config may be refused in some of them.

    Raises:
      Refused: it takes none.
    """
    found, refusals = [], []
    for one in layouts:
        try:
            found.append(Found(one, known.get(one, topology) or estimated(one, topology)))
        except Refused as error:
            refusals.append(error)
            say(f"left out: {label(one)}: {error}")
    if refusals and not found:
        raise refusals[0]
    return found


def picked(
    counted: list[tuple[Estimate, Config]],
    sizes: TransformerConfig,
    topology: Topology,
    count: int,
    say: Callable[[str], None] = lambda text: None,
    fixed: Fixed = NOTHING,
) -> list[Config]:
    """Returns the fastest layouts of those that fit by formula, and of each kind those that are slower and smaller;
    where none fits, of those that fit with the optimizer's state in the host's memory; where these do not either, the
    smallest.
    """
    memory = topology.chip.memory if topology.chip else math.inf
    fitting = [pair for pair in counted if pair[0].total <= memory]
    say(f"{len(counted)} layouts, {len(fitting)} fit by formula")
    if not fitting:
        legal = [replace(one, optimizer=replace(one.optimizer, memory="host")) for _, one in counted]
        counted = [(estimate(one, sizes, topology), one) for one in legal]
        fitting = [pair for pair in counted if pair[0].total <= memory]
        say(f"{len(fitting)} fit with the optimizer's state in the host's memory")
    if not fitting:
        return [one for _, one in sorted(counted, key=lambda pair: pair[0].total)[:count]]
    fitting.sort(key=_time_then_memory)
    filled = _filled([one for _, one in fitting[: 4 * count]], sizes, topology, fixed)
    return _smaller_and_smaller(sorted(fitting + filled, key=_time_then_memory))[:count]


def by_formula(
    config: Config, sizes: TransformerConfig, topology: Topology, fixed: Fixed
) -> list[tuple[Estimate, Config]]:
    """Returns every legal layout with its estimate, in no order.

    config: its mesh gives the context axis alone.

    Raises:
      ValueError: no mesh divides rows and layers.
    """
    found = candidates(config, sizes, topology.num_devices, fixed)
    counted = [(estimate(one, sizes, topology), one) for one in found if _can_be(one, topology, fixed)]
    if not counted:
        raise _no_layout(config, sizes, topology.num_devices, fixed)
    return counted


def _no_layout(config: Config, sizes: TransformerConfig, devices: int, fixed: Fixed) -> Refused:
    """Returns why no layout of a config is legal on so many devices, and what would be."""
    on, rows = number_of(devices, "device"), config.batch.rows
    if devices % config.mesh.context:
        nearest = max(size for size in range(1, config.mesh.context) if devices % size == 0)
        return Refused(
            f"[plan] mesh.context={config.mesh.context} does not divide {on}; use mesh.context={nearest}"
        )
    asked = {"schedule": fixed.schedule, "chunks": fixed.chunks}
    if given := " and ".join(f"{key}={value}" for key, value in asked.items() if value is not None):
        return Refused(
            f"[plan] no pipeline on {on} runs {sizes.num_layers} layers and {rows} rows by {given}; "
            f"leave out {given}"
        )
    cut, parts = "", 1
    if fixed.microbatches is not None:
        cut, parts = f" in {number_of(fixed.microbatches, 'microbatch', 'microbatches')}", fixed.microbatches
    elif fixed.rows is not None:
        cut, parts = f" in microbatches of {number_of(fixed.rows, 'row')}", fixed.rows
    unit = devices * parts
    return Refused(
        f"[plan] no mesh of {on} divides {rows} rows{cut} and {sizes.num_layers} layers; "
        f"use batch.rows={unit * -(-rows // unit)}"
    )


def _filled(
    layouts: list[Config], sizes: TransformerConfig, topology: Topology, fixed: Fixed
) -> list[tuple[Estimate, Config]]:
    """Returns what the layouts can do with most of the memory that they leave; the formula is not exact."""
    most = (1 - LEFT) * topology.chip.memory if topology.chip else math.inf
    made = (one for base in layouts for one in variants(base, sizes) if fixed.stays(one))
    counted = [(estimate(one, sizes, topology), one) for one in made]
    return [pair for pair in counted if pair[0].total <= most]


def _compiled(formula: list[Found], count: int, known: Known, say, keep) -> list[Found]:
    """Asks the compiler for the given layout, and until so many others fit.

    A layout that it refuses for another reason than memory is left out.
    """
    found, others, refusals = list(formula), [one for one in formula if not one.given], []
    for asked in [one for one in formula if one.given] + _by_kind(others)[: 2 * count]:
        fitting = sum(bool(one.verdict.fits) for one in found if one.verdict.compiled and not one.given)
        if fitting >= count:
            break
        found.remove(asked)
        say(f"compiling: {label(asked.config)}")
        try:
            verdict = _verdict(asked, known, say)
        except (ValueError, RuntimeError) as error:  # of one layout is no reason to lose the others
            say(f"  left out: {error}")
            if isinstance(error, Refused) and str(error) in map(str, refusals):
                raise  # it is not of one layout
            refusals.append(error)
        else:
            say(f"  {headline(verdict)}, {duration_of(verdict.step_seconds)} a step")
            found.append(replace(asked, verdict=verdict))
        if found:
            keep(_ranked(found))
    if refusals and not any(one.verdict.compiled for one in found):
        raise Refused(
            f"[plan] the compiler refused every layout that it was asked about, the last since {refusals[-1]}"
        )
    return _ranked(found)


def _verdict(asked: Found, known: Known, say) -> Verdict:
    if asked.verdict.compiled is not None:  # by a search before this one
        return asked.verdict
    verdict = compiled_verdict(asked.config, asked.verdict, say)
    known.add(asked.config, verdict)
    return verdict


def _time_then_memory(counted: tuple[Estimate, Config]) -> tuple[float, float]:
    return float(f"{counted[0].seconds:.4g}"), counted[0].total


def _ranked(found: list[Found]) -> list[Found]:
    return sorted(found, key=lambda one: one.rank)
