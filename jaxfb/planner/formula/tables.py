"""Estimates what a large embedding and a large head take: a part or a slice of the vocabulary at a time, or all."""

from __future__ import annotations

import math

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig
from jaxfb.parallel.collectives import torus_dims
from jaxfb.parallel.columns import most_rows
from jaxfb.parallel.grid import adjacent_shapes, shapes
from jaxfb.parallel.shares import fewest_sent
from jaxfb.parallel.table import num_parts, pays
from jaxfb.planner.counts import (
    computed_bytes,
    gathers_layers,
    reduced_bytes,
    summed_bytes,
    tokens_of_microbatch,
    tokens_of_piece,
)


def head_bytes(config: Config, sizes: TransformerConfig, kind: str | None) -> float | None:
    """Counts what the cross entropy by shares, or in parts, keeps and takes; None where the head is gathered whole.

    kind: of the devices.
    """
    width, vocabulary, tokens = sizes.hidden_size, sizes.vocab_size, tokens_of_piece(config)
    each, wide = computed_bytes(config), summed_bytes(config)
    parts = num_parts((width, vocabulary), 1, vocabulary, "float32")
    if not _is_scored_cut(config, sizes) or parts == 1:
        return None
    if (across := _neighbours(config, sizes, kind)) is not None:
        # the share and its gradient, logits
        of_share = (each + wide) * width + 8 * min(across * tokens, sizes.loss_chunk)
        of_hidden = (each + 4) * across * tokens * width
        return each * tokens * vocabulary + of_hidden + of_share / across * vocabulary
    # two parts of the head, the gradient of one, logits
    of_part = (2 * each + wide) * width + each * tokens + 8 * min(tokens, sizes.loss_chunk)
    return (each * tokens + of_part / parts) * vocabulary


def spared_bytes(config: Config, sizes: TransformerConfig, kind: str) -> float:
    """Returns the bytes of a microbatch that are not sent since no device is sent all of an embedding or a head."""
    in_parts = gathers_layers(config) and num_parts(_shape(sizes), 0, sizes.vocab_size, "float32") > 1
    if sizes.tied_embeddings or config.mesh.pipe * config.mesh.tensor > 1 or not in_parts:
        return 0.0
    return _spared_by_columns(config, sizes, kind) + _spared_by_shares(config, sizes, kind)


def _spared_by_columns(config: Config, sizes: TransformerConfig, kind: str) -> float:
    """Returns those of an embedding whose rows are looked up by columns."""
    numbers = [rows for rows, _ in shapes(_axes(config), torus_dims(kind))]
    tile = 128 if "TPU" in kind else 1
    rows = most_rows(numbers, _shape(sizes), tokens_of_microbatch(config), "float32", tile)
    each = computed_bytes(config)
    sent = each + reduced_bytes(config)  # a number of the columns, there and its gradient back
    return 0.0 if rows is None else math.prod(_shape(sizes)) * (each + sent - sent / rows)


def _spared_by_shares(config: Config, sizes: TransformerConfig, kind: str) -> float:
    """Returns those of a head that neighbours score by shares, less their hidden states and the gradients of them."""
    across = _neighbours(config, sizes, kind) if _is_scored_cut(config, sizes) else None
    if across is None:
        return 0.0
    each = computed_bytes(config)
    sent = each + reduced_bytes(config)
    hidden = (each + 4) * across * tokens_of_microbatch(config) * sizes.hidden_size
    return math.prod(_shape(sizes)) * (each + sent - sent / across) - hidden


def _neighbours(config: Config, sizes: TransformerConfig, kind: str | None) -> int | None:
    """Returns how many neighbours score each other's tokens; None where the head is better in parts."""
    numbers = [across for across, _ in adjacent_shapes(_axes(config), torus_dims(kind))]
    return fewest_sent(kind, numbers, sizes.vocab_size, tokens_of_piece(config))


def _is_scored_cut(config: Config, sizes: TransformerConfig) -> bool:
    """Returns whether the cross entropy takes a head of which no device has all, if it is large enough."""
    if config.mesh.tensor > 1 or sizes.mtp_depth or sizes.z_loss or sizes.label_smoothing:
        return False
    return pays(tokens_of_piece(config), sizes.hidden_size, config.precision.compute_dtype)


def _axes(config: Config) -> list[int]:
    mesh = config.mesh
    return [size for size in (mesh.fsdp, mesh.expert, mesh.context) if size > 1]


def _shape(sizes: TransformerConfig) -> tuple[int, int]:
    return sizes.vocab_size, sizes.hidden_size
