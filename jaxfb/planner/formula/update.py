"""Estimates by formula what an update takes beside parameters, state and gradients, which does not grow with the rows.

For Muon devices exchange matrices, so that each has some layers whole (`jaxfb.parallel.layers.whole`). Each step of the
iteration multiplies X by its transpose, their product A by itself, and a polynomial of A by X, where X is a matrix with
the shorter side first. All of it is computed twice, once to judge the update and once to make it
(`jaxfb/update/apply.py`).
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
from jaxfb.optim.muon import muon_matrices
from jaxfb.planner.chips import Chip
from jaxfb.planner.counts import num_shards, share_of_layers, state_bytes, stored_bytes, trained_numbers
from jaxfb.planner.formula.time import ring_seconds
from jaxfb.planner.topology import Topology
from jaxfb.trainable import pruned

_TIMES = 2
"""How often an update is computed."""
_STEPS = 5
"""Of the iteration, unless the config gives `ns_steps`."""
_ARRAYS = 4.2
"""Arrays in float32 that a device has of its whole matrices at a time: 4.9 and 4.4 of 8B on 16 and 64 v5p."""
_EXPOSED = 0.25
"""Share of the exchanges that nothing hides: 0.1 to 0.35 of 8B on v5p."""


class _Matrices(NamedTuple):
    """So many whole matrices on a device, all alike.

    layer: how many a layer has. axes: along which they were exchanged.
    """

    number: float
    layer: float
    rows: int
    columns: int
    axes: tuple[str, ...]

    @property
    def numbers(self) -> float:
        return self.number * self.rows * self.columns


def muon_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts what the update takes beside parameters, state and gradients, which is no part of the loop; with the state
    in the host's memory that of a layer.
    """
    found = _matrices(config, sizes)
    if (
        config.optimizer.memory == "host"
    ):  # where XLA gathers the matrices of a layer in the dtype of its products
        return 2 * sum(one.layer * one.rows * one.columns for one in found)
    return 4 * _ARRAYS * sum(one.numbers for one in found)


def copied_for_update(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts the copies of a tied embedding and its moments that XLA for TPUs makes for the update where a device has
    all of them: in the layout of the gradient, which is that of a head.

    1B with four of its layers in float32 on one v5p has three copies of 1.05 GB.
    """
    uncut = num_shards(config) * config.mesh.tensor * config.mesh.pipe == 1
    if not (uncut and sizes.tied_embeddings and topology.platform == "tpu"):
        return 0.0
    _, table = trained_numbers(config, sizes)
    return (stored_bytes(config) + state_bytes(config, sizes)) * table


def muon_flops(config: Config, sizes: TransformerConfig) -> float:
    """Returns the operations of a device in Muon's iteration."""
    steps: Any = config.optimizer.options.get("ns_steps", _STEPS)
    return _TIMES * steps * sum(one.number * _flops(one) for one in _matrices(config, sizes))


def muon_seconds(config: Config, sizes: TransformerConfig, chip: Chip) -> tuple[float, float]:
    """Returns (the time of the iteration's products, that of exchanges, there and back, which nothing hides)."""
    sent = sum(
        2 * _TIMES * 4 * one.numbers * ring_seconds(config, chip, axis)
        for one in _matrices(config, sizes)
        for axis in one.axes
    )
    return muon_flops(config, sizes) / chip.flops, _EXPOSED * sent


def _flops(one: _Matrices) -> float:
    """Returns the operations of a step of one matrix's iteration."""
    short, long = sorted((one.rows, one.columns))
    return 4 * short**2 * long + 2 * short**3


def _matrices(config: Config, sizes: TransformerConfig) -> list[_Matrices]:
    """Returns the matrices that a device has whole; none without Muon."""
    if config.optimizer.name != "muon":
        return []
    here, mesh = share_of_layers(config, sizes), config.mesh
    found = []
    for layers, alike, (rows, columns), of_layers, of_experts in _shapes(sizes, trained_patterns(config)):
        layers = layers * here if of_layers else layers
        axes = ("fsdp", "context", "tensor") if of_experts else ("fsdp", "expert", "context", "tensor")
        devices = math.prod(getattr(mesh, axis) for axis in axes)
        devices *= mesh.data if devices * mesh.data <= layers else 1
        alike = alike / mesh.expert if of_experts else alike
        share = layers / devices if config.optimizer.memory == "host" else math.ceil(layers / devices)
        cutting = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        found.append(_Matrices(share * alike, alike, rows, columns, cutting))
    return found


@lru_cache(maxsize=16)
def _shapes(
    sizes: TransformerConfig, patterns: tuple[str, ...] | None
) -> list[tuple[int, int, tuple[int, int], bool, bool]]:
    """Returns (layers, matrices of a layer, their shape, whether they are of the stack, whether of experts)."""
    params = pruned(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(muon_matrices(params)), strict=True
    )
    return [
        (
            leaf.shape[0] if is_stacked(path) else 1,
            math.prod(leaf.shape[is_stacked(path) : -2]),
            leaf.shape[-2:],
            is_stacked(path),
            has_word(path, "experts"),
        )
        for (path, leaf), is_matrix in leaves
        if is_matrix
    ]
