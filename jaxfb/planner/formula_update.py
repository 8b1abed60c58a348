"""Estimates by formula how long Muon's update takes, whose products and gathers do not grow with the rows.

Every step of its iteration multiplies X by its transpose, their product A by itself, and a polynomial of A by X, where
X is a matrix with the shorter side first. XLA cuts these products over the devices that share out the matrix by rows:

- of a matrix with fewer rows than columns X is gathered and A too, in bfloat16.
- of another X is cut along the side that is summed over: A is added up over the devices, in float32, and each device
  multiplies all of it by itself.

All of it is computed twice, once to judge the update and once to make it (`jaxfb/update/apply.py`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from jaxfb.config import Config
from jaxfb.config.adapters import trained_patterns
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.optim.leaves import has_word, is_stacked
from jaxfb.optim.optimizers import muon_matrices
from jaxfb.planner.chips import Chip
from jaxfb.planner.counts import share_of_layers
from jaxfb.planner.formula_time import ring_seconds
from jaxfb.trainable import pruned

_TIMES = 2
"""How often an update is computed."""
_BESIDE_PRODUCTS = 4 / 3
"""Time of the iteration over that of its products, which read matrices of which a device has a few rows: 1.32 and 1.35
of 1B on 16 v5p."""
_STEPS = 5
"""Of the iteration, unless the config gives `ns_steps`."""


class _Matrices(NamedTuple):
    """So many matrices of a device, all alike. axes: of the mesh, along which the rows are cut."""

    number: float
    rows: int
    columns: int
    axes: tuple[str, ...]


def muon_flops(config: Config, sizes: TransformerConfig) -> float:
    """Returns the operations of a device in Muon's iteration."""
    return sum(_runs(config, one) * _flops(config, one) for one in _matrices(config, sizes))


def muon_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> tuple[float, float]:
    """Returns (the time of the iteration's products, that of what devices send each other, which nothing hides)."""
    sent = sum(
        _runs(config, one) * _sent(one) * ring_seconds(config, chip, *one.axes)
        for one in _matrices(config, sizes)
    )
    return _BESIDE_PRODUCTS * muon_flops(config, sizes) / chip.flops, sent


def _runs(config: Config, one: _Matrices) -> float:
    """Returns how many steps of the iteration a device takes part in, of all its matrices of a kind."""
    steps: Any = config.optimizer.options.get("ns_steps", _STEPS)
    return _TIMES * steps * one.number / config.mesh.tensor


def _flops(config: Config, one: _Matrices) -> float:
    """Returns a device's operations in a step of one matrix's iteration."""
    short, long = sorted((one.rows, one.columns))
    shards = math.prod(getattr(config.mesh, axis) for axis in one.axes)
    squared = 2 * short**3 / (shards if one.rows <= one.columns else 1)
    return 4 * short**2 * long / shards + squared


def _sent(one: _Matrices) -> float:
    """Returns the bytes that are gathered for a step of one matrix's iteration, or twice those that are added up."""
    short, long = sorted((one.rows, one.columns))
    return 2 * short * (long + short) if one.rows <= one.columns else 2 * 4 * short**2


def _matrices(config: Config, sizes: TransformerConfig) -> list[_Matrices]:
    """Returns the matrices that a device's part of the mesh updates; none without Muon."""
    if config.optimizer.name != "muon":
        return []
    here, mesh = share_of_layers(config, sizes), config.mesh
    return [
        _Matrices(
            number * (here if of_layers else 1) / (mesh.expert if of_experts else 1),
            rows,
            columns,
            ("fsdp", "context") if of_experts else ("fsdp", "expert", "context"),
        )
        for number, (rows, columns), of_layers, of_experts in _shapes(sizes, trained_patterns(config))
    ]


@lru_cache(maxsize=16)
def _shapes(
    sizes: TransformerConfig, patterns: tuple[str, ...] | None
) -> list[tuple[int, tuple[int, int], bool, bool]]:
    """Returns (how many, their shape, whether they are of the layers, whether of experts) of the model's matrices."""
    params = pruned(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(muon_matrices(params)), strict=True
    )
    return [
        (math.prod(leaf.shape[:-2]), leaf.shape[-2:], is_stacked(path), has_word(path, "experts"))
        for (path, leaf), is_matrix in leaves
        if is_matrix
    ]
