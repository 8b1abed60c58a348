"""`jaxfb check`: the model of a config, its widths made small, next to one device.

What is kept is what can go wrong: the kind of layers and how many, tied weights, grouped heads, experts, dropout,
packing, the mesh, the schedule and the engine's options. Widths are not, so that a large model is checked in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfb.config import Config
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.model import ModelConfig
from jaxfb.config.sections import AutoMesh, MeshConfig
from jaxfb.forward_backward.equivalence import Difference, Equivalence, check_equivalence
from jaxfb.forward_backward.options import OF_A_PIPELINE
from jaxfb.mesh import data_parallel, make_mesh
from jaxfb.models.adapted import B, adapted, draws
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parts import HEADS
from jaxfb.schedules import default_name
from jaxfb.shared_options import PrecisionOptions
from jaxfb.trainable import name_of
from jaxfb.training.from_config.options import engine_options
from jaxfb.training.from_config.sizes import built_in
from jaxfb.types import PyTree

LENGTH, ROWS, VOCAB, HEAD = 16, 16, 64, 8
_LEFT_OUT = (
    "schedule",
    "num_chunks",
    "compiler_options",
    *(one.name for one in dataclasses.fields(PrecisionOptions)),
)
"""Options that are given apart, or that change the rounding of what is compared."""


def check_config(config: Config, report: Callable[[Difference], None] | None = None) -> Equivalence:
    """Checks the mesh and schedule of the config; all kinds of either if it leaves the mesh to the devices.

    report: called with each case as it is found.

    Raises:
      ValueError: the config's mesh does not fit the devices.
    """
    own = built_in(config.model, "jaxfb check", "call jaxfb.check_equivalence on it in a program")
    sizes = adapted(narrow(own), config.lora)
    model, params = transformer(sizes), _adapters_at_work(init_params(sizes, jax.random.key(0)))
    rng = jax.random.key(1) if draws(sizes) else None
    if config.mesh in (MeshConfig(), AutoMesh()):
        batch = synthetic_batch(ROWS)
        return check_equivalence(
            model, params, batch, rng=rng, report=report, **_options(config, *OF_A_PIPELINE)
        )
    mesh = make_mesh(**vars(config.mesh))
    placement = config.parallel.head_placement
    rows_per_microbatch = mesh.shape["pipe"] if placement is not None and HEADS[placement].cuts_rows else 1
    rows = max(ROWS, 4 * data_parallel(mesh) * rows_per_microbatch)
    pieces = config.parallel.pieces
    schedule = (config.schedule or default_name(config.chunks, pieces), config.chunks)
    options = _options(config)
    batch = synthetic_batch(rows, pieces * -(-LENGTH // pieces))
    return check_equivalence(
        model, params, batch, [mesh], [schedule],
        rng=rng, rows_per_microbatch=rows_per_microbatch, report=report, **options,
    )  # fmt: skip


def _adapters_at_work(params: PyTree) -> PyTree:
    """Returns the parameters with half of each adapter, which is zero at the start, at random."""

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        if not name_of(path).endswith(B):
            return leaf
        return 0.1 * jax.random.normal(jax.random.key(len(name_of(path))), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def narrow(model: ModelConfig) -> TransformerConfig:
    """Returns the same model with small widths; features that it does not have stay off."""
    kv_heads, groups = min(model.num_kv_heads, 2), min(model.router_groups, 2)
    heads = kv_heads * min(model.num_heads // model.num_kv_heads, 2)
    experts, sized = min(model.num_experts, 4), model.sized(VOCAB)
    variant = dataclasses.replace(model.variant, rotary_share=1.0 if model.variant.rotary_share == 1 else 0.5)
    turned = HEAD // 2 if model.latent else variant.rotary_size(HEAD)
    return dataclasses.replace(
        sized,
        vocab_size=VOCAB,
        hidden_size=HEAD * heads,
        num_heads=heads,
        num_kv_heads=heads if model.latent else kv_heads,
        head_size=HEAD,
        mlp_size=32,
        expert_mlp_size=16,
        shared_expert_size=min(model.shared_expert_size, 16),
        num_experts=experts,
        experts_per_token=min(model.experts_per_token, experts // groups or model.experts_per_token),
        router_groups=groups,
        router_top_groups=1,
        variant=variant,
        latent=_narrow_latent(model.latent),
        attention="xla",
        **_narrow_reach(sized, turned // 2),
    )


def _narrow_reach(sizes: TransformerConfig, pairs: int) -> dict[str, Any]:
    """Returns windows, and the length of short documents, as parts of a row of `synthetic_batch`, or they would change
    nothing; and a scaling's factors for so many pairs.
    """

    def reach(one: TransformerConfig | LayerKind) -> dict[str, Any]:
        scaling, window = one.rope_scaling, one.window
        if scaling is not None and scaling.kind == "longrope":
            short, long = scaling.short_factors[:pairs], scaling.long_factors[:pairs]
            scaling = dataclasses.replace(
                scaling, original_length=LENGTH // 2, short_factors=short, long_factors=long
            )
        return {"window": window and min(window, LENGTH // 2), "rope_scaling": scaling}

    kinds = {
        name: tuple(dataclasses.replace(kind, **reach(kind)) for kind in getattr(sizes, name))
        for name in ("pattern", "leading")
    }
    return {**reach(sizes), **kinds}


def _narrow_latent(latent: Latent | None) -> Latent | None:
    if latent is None:
        return None
    rank = None if latent.query_rank is None else 6
    return Latent(6, HEAD // 2, HEAD // 2, rank, latent.interleaved)


def synthetic_batch(rows: int, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Returns random tokens, packed into rows as several documents with padding at the end: each row counts
    differently.
    """
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 4, (rows, length)), axis=1)[:, ::-1]
    segments = np.where(segments > 0, segments.max(axis=1, keepdims=True) - segments + 1, 0)
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    index = np.arange(length)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    tokens, targets = rng.integers(0, VOCAB, (2, rows, length))
    return {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "loss_mask": (segments > 0).astype(np.float32),
        "segments": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
    }


def _options(config: Config, *without: str) -> dict[str, Any]:
    """Returns the options with which the config runs the engine, but for some of them."""
    options = {**engine_options(config), "trainable": trained_patterns(config)}
    return {name: value for name, value in options.items() if name not in (*_LEFT_OUT, *without)}
