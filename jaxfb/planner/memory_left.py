"""Lists what a layout can do with memory that is left: less recomputation, and weights that stay gathered.

Of a stage's layers a quarter, a half, three quarters or all; by formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import stack_of
from jaxfb.planner.counts import num_shards
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.topology import Topology
from jaxfb.recomputation import remat_parts
from jaxfb.schedules.by_device import runs_on

_LESS = {
    "layer": "selective",
    "halves": "selective",
    "full": "selective",
    "offload": "selective",
    "selective": "none",
}
"""The next word that computes less again and keeps more."""


def variants(config: Config, sizes: TransformerConfig) -> Iterator[Config]:
    """Returns the config with every use of memory that is left, itself first.

    config: of one word for `remat`, and "layer" or "step" for `fsdp_gather`.
    """
    for remat in _remats(config, sizes):
        for gather in _gathers(config, sizes):
            yield _with(config, remat, gather)


def prices(config: Config, sizes: TransformerConfig, topology: Topology) -> list[str]:
    """Returns a line for each single step up from the config's layout: what it takes of memory and saves of time."""
    lines = []
    base = estimate(config, sizes, topology)
    for one in _steps_up(config, sizes):
        found = estimate(one, sizes, topology)
        more, less = (found.total - base.total) / 1e9, base.seconds - found.seconds
        change = ", ".join(
            f"{key}={value}"
            for key, value in (("remat", one.parallel.remat), ("fsdp_gather", one.parallel.fsdp_gather))
            if value != getattr(config.parallel, key)
        )
        lines.append(f"{change}: {more:+.1f} GB, {-less:+.2f} s")
    return lines


def least(config: Config) -> Config:
    """Returns the config with its layers recomputed and gathered one at a time."""
    *_, (word, _) = remat_parts(config.parallel.remat)
    return _with(config, "layer" if word in ("none", "selective") else word, "layer")


def layers_of_a_stage(config: Config, sizes: TransformerConfig) -> int:
    """Returns the layers of a stage, or the periods of a pattern."""
    return stack_of(sizes).num_periods // (config.mesh.pipe * config.chunks)


def _steps_up(config: Config, sizes: TransformerConfig) -> Iterator[Config]:
    remat, gather = config.parallel.remat, config.parallel.fsdp_gather
    if "+" not in remat:
        yield from (_with(config, one, gather) for one in _remats(config, sizes)[1:])
    if gather == "layer":
        yield from (_with(config, remat, one) for one in _gathers(config, sizes)[1:])


def _remats(config: Config, sizes: TransformerConfig) -> list[str]:
    word, number = config.parallel.remat, layers_of_a_stage(config, sizes)
    less = _LESS.get(word)
    if less is None or config.parallel.pieces > 1:
        return [word]
    return [word, *(f"{less}*{part}+{word}" for part in _parts(number) if part < number), less]


def _gathers(config: Config, sizes: TransformerConfig) -> list[str | int]:
    number = layers_of_a_stage(config, sizes)
    plain = config.parallel.fsdp_gather
    by_device = config.schedule is not None and not runs_on(config.schedule, vars(config.mesh), number)
    if plain != "layer" or num_shards(config) == 1 or by_device or config.parallel.pieces > 1:
        return [plain]
    if config.optimizer.sharding == "gradients":
        return ["layer", "step"]
    return ["layer", *_parts(number), "step"]


def _parts(number: int) -> list[int]:
    return sorted({number * quarter // 4 for quarter in (1, 2, 3, 4)} - {0})


def _with(config: Config, remat: str, gather: str | int) -> Config:
    return replace(config, parallel=replace(config.parallel, remat=remat, fsdp_gather=gather))
