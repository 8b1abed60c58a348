"""Estimates by formula memory and attention of sequences that go through a pipeline in pieces (`parallel.pieces`)."""

from __future__ import annotations

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig
from jaxfb.planner.counts import (
    computed_bytes,
    layers_here,
    short_schedule,
    tokens_of_microbatch,
    tokens_of_piece,
)
from jaxfb.planner.formula.widths import kept_hidden_width
from jaxfb.planner.program_cost.piece_turns import mean_turns
from jaxfb.planner.topology import Topology

_CACHED, _READ = 4, 4 + 4
"""Bytes of a key's or value's gradient beside the number itself: in a cache, in float32; and while a layer's backward
runs, which reads one of each out of the caches and makes the gradient that is added to the other."""


def pieces_in_flight(config: Config) -> float:
    """Returns microbatches whose activations the first stage keeps, by the schedule's count of their pieces: abreast
    all pieces of a group, one after the other those of 1f1b and the rest of the first microbatch.
    """
    return short_schedule(config).program.allocated("residual") / (config.chunks * config.parallel.pieces)


def waiting_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what waits in a pipeline: hidden states and their gradients between stages, those on their way included,
    and of sequences in pieces keys and values of the microbatches in flight with their gradients.

    8B at 128k tokens, 16 pieces abreast on 8 stages: 25.8 GB of four caches, and 62 gradients of 67 MB, which come back
    in the opposite order.
    """
    if config.mesh.pipe == 1:
        return 0.0
    program, each = short_schedule(config).program, computed_bytes(config)
    passed = (
        program.allocated("activation") + program.allocated("gradient") + len(program.forward_channels) + 1
    )
    hidden = passed * each * tokens_of_piece(config) * kept_hidden_width(config, sizes, topology)
    if config.parallel.pieces == 1:
        return hidden
    caches = program.allocated("cache") * layers_here(config, sizes) / config.chunks
    return caches * (each + _CACHED) * _keys_of_layer(config, sizes) + hidden


def read_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts what a layer's backward takes out of the caches, and the gradients that it adds to them."""
    if config.parallel.pieces == 1:
        return 0.0
    return (computed_bytes(config) + _READ) * _keys_of_layer(config, sizes)


def waiting_turns(config: Config) -> float:
    """Returns how many times as long attention takes as if every tick had a mean piece: a late piece reads many earlier
    ones, and in a tick all devices wait for the latest piece.

    8B at 128k tokens, 16 pieces on 8 stages: 1.44 one after the other, 1.09 abreast.
    """
    pieces = config.parallel.pieces
    return 1.0 if pieces == 1 else (mean_turns(short_schedule(config)) + 1 / 2) / (pieces / 2)


def _keys_of_layer(config: Config, sizes: TransformerConfig) -> float:
    """Returns the numbers of a layer's keys and values of all pieces of a microbatch."""
    return 2 * tokens_of_microbatch(config) * sizes.num_kv_heads * sizes.head_size / config.mesh.tensor
