"""The transformer's layers on a piece of each sequence, with the keys and values of earlier pieces at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from jaxfb.models.adapted import draws
from jaxfb.models.block import Block, rebuilder
from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import Stack
from jaxfb.models.piece_attention import Keys, piece_attention
from jaxfb.parallel.scores import PLAIN
from jaxfb.types import Piece, PyTree


def runs_on_pieces(stack: Stack) -> bool:
    """Returns whether these layers can run a piece of a sequence as they run the whole.

    Not those with dropout, drawn for whole rows, with experts, whose losses are of whole sequences, with rotary
    positions that depend on a document's length, nor layers before the first period, which run in the embedding.
    """

    def can(config: TransformerConfig) -> bool:
        return not (draws(config) or config.num_experts or config.mtp_depth)

    return not (stack.leading or stack.turns_by_length) and all(map(can, stack.period))


def layer_piece_of(stack: Stack) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Returns `Pipelined.layer_piece` of a period of layers."""
    blocks = [rebuilder(Block, one) for one in stack.period]

    def layer_piece(params, hidden, microbatch, rng, piece: Piece):
        positions, kept = _positions(microbatch, piece), []
        pasts = [None] * len(blocks) if piece.past is None else stack.split(piece.past)
        for config, block_of, own, past in zip(stack.period, blocks, stack.split(params), pasts, strict=True):
            attend = partial(_attend, config=config, piece=piece, past=past)
            hidden, keys = block_of(own)(hidden, positions, attend)
            kept.append(keys)
        return hidden, stack.joined(kept)

    return layer_piece


def _attend(query, key, value, scores=PLAIN, *, config: TransformerConfig, piece: Piece, past: Keys | None):
    """Attends to a piece and those before it, and hands back its keys and values."""
    if past is None:  # nobody reads the numbers of a call for shapes
        return query, Keys(key, value)
    out = piece_attention(
        query,
        key,
        value,
        scores,
        past=past,
        number=piece.number,
        segments=piece.whole.get("segments"),
        window=config.window,
        backend=config.attention,
    )
    return out, Keys(key, value)


def _positions(microbatch: Mapping, piece: Piece) -> jax.Array:
    rows, tokens = microbatch["tokens"].shape
    places = piece.number * tokens + jnp.arange(tokens)
    return microbatch.get("positions", jnp.broadcast_to(places, (rows, tokens)))
