"""Estimates what attention costs beyond the scores that queries need: by its kernels, and by scores in memory."""

from __future__ import annotations

from jaxfb.config import Config
from jaxfb.models.attention_kernels import splash
from jaxfb.models.attention_kernels.splash_gradients import PRODUCTS
from jaxfb.models.config import TransformerConfig, seen_share, twice_seen
from jaxfb.models.pattern import stack_of
from jaxfb.planner.attends import attends_over, runs_flash, scores_at_once
from jaxfb.planner.counts import attention_flops, has_backward, mean_over_layers
from jaxfb.planner.formula import bias
from jaxfb.planner.formula.pieces import waiting_turns
from jaxfb.planner.topology import Topology

_FORWARD_PRODUCTS, _COUNTED_PRODUCTS = 2, 6
"""Of splash's forward; and those of an update that the model's own operations contain, without scores again."""
_SCORE_BYTES = {"none": 30}
"""Read and written a query, key and head, where attention makes scores: of two models at two lengths; 35 where
the forward runs again."""


def flops_of_kernels(config: Config, sizes: TransformerConfig, topology: Topology, again: float) -> float:
    """Counts what a token takes more of splash's kernels: scores once more in the backward, of which there are five
    products in place of four, and blocks on the diagonal of which half is masked; of pieces of a sequence, the wait for
    late ones. Where all scores are made at once, those that are masked; on GPUs those that `bias.py` counts.
    """
    passes = 3 * (1 + again) if has_backward(config, sizes) else 1
    if scores_at_once(config, sizes, topology):
        counted = seen_share(sizes, config.data.sequence_length)
        return attention_flops(config, sizes) * (2 / counted - 1) * passes
    if topology.platform == "gpu":
        return bias.flops(config, sizes, topology) * passes
    if topology.platform != "tpu" or not runs_flash(config, sizes, topology):
        return 0.0
    length, attention = config.data.sequence_length, 3 * attention_flops(config, sizes)
    # the context axis cuts a row into twice its size
    whole = attends_over(config, sizes, topology) is None
    together = length if whole else length // (2 * config.mesh.context)
    turns = _blocks_over_seen(sizes, length, splash.block_size(together)) * waiting_turns(config)
    if not has_backward(config, sizes):
        return attention / 3 * (turns - 1)
    products = (_FORWARD_PRODUCTS + PRODUCTS) / _COUNTED_PRODUCTS
    return attention * ((products + again) * turns - 1 - again)


def _blocks_over_seen(sizes: TransformerConfig, length: int, block: int) -> float:
    """Returns how many keys are in the blocks that a kernel multiplies with a query, over those that the query sees:
    half of the block on the diagonal is masked, and with a window half of the one at its other end.
    """
    kinds = list(stack_of(sizes).counted())
    multiplied = sum(number * _keys_in_blocks(one.window, length, block) for one, number in kinds)
    return 2 * multiplied / sum(number * twice_seen(one.window, length) for one, number in kinds)


def _keys_in_blocks(window: int | None, length: int, block: int) -> float:
    """Returns the keys in all blocks of which a query sees some, in the mean over a row's queries."""
    before = -(-((window or length) - 1) // block)
    blocks = range(length // block)
    return block * sum(1 + min(place, before) for place in blocks) / len(blocks)


def score_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is read and written for one token's attention where no flash kernel runs."""
    if runs_flash(config, sizes, topology):
        return 0.0
    passes = mean_over_layers(config, sizes, lambda remat: _SCORE_BYTES.get(remat, 35))
    length = config.data.sequence_length
    return passes * sizes.num_heads * length * seen_share(sizes, length) * sizes.num_layers
