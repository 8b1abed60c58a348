"""Estimates by formula the memory of a step: gradients, activations, and what a layer or the head takes at work."""

from __future__ import annotations

import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.forward_backward.layers.overwriting import overwriting_pays
from jaxfb.models.config import TransformerConfig, seen_share
from jaxfb.planner.attends import attends_over, context_method, runs_flash, scores_at_once
from jaxfb.planner.counts import (
    computed_bytes,
    copied_numbers,
    gathers_layers,
    has_backward,
    held_experts,
    held_numbers,
    layers_by_remat,
    layers_here,
    num_microbatches,
    reduced_bytes,
    reduces_beside,
    schedule_kind,
    share_ahead,
    share_gathered,
    short_schedule,
    state_bytes,
    stored,
    stored_bytes,
    summed_bytes,
    tokens_of_microbatch,
    tokens_of_piece,
    trained_numbers,
)
from jaxfb.planner.formula import bias
from jaxfb.planner.formula.pieces import pieces_in_flight, read_bytes, waiting_bytes
from jaxfb.planner.formula.tables import head_bytes
from jaxfb.planner.formula.widths import (
    dense_width,
    experts_width,
    hidden_width,
    kept_hidden_width,
    kept_width,
    padding_width,
    product_width,
    residual_width,
    row_space,
    saved_width,
    widest_of_attention,
)
from jaxfb.planner.topology import Topology
from jaxfb.platforms import compiler
from jaxfb.platforms.kinds import V5E
from jaxfb.recomputation import remat_parts

_SCORES_KEPT = 9 / 8
"""Of a query, key and head, in numbers of two bytes: probabilities of a causal row in eight blocks, and a copy."""
_SCORES_AT_ONCE = 4 + 4
"""Bytes of a query, key and head where all scores exist at once: of a probability and its gradient."""
_SCATTERED_IN_TURN = 2 / 3
"""Share of a layer's gradients that is there at a time where each is scattered as soon as it is computed, on TPUs that
gather no layer ahead: of 8B on 8, 16 and 256 v5e."""
_AT_WORK_ON_GPU = 1.55
"""Of the numbers that a dense layer's products keep, how many times as many are there in its backward: 8B and 14B with
16 rows at a time by XLA for GPUs. With the TPU's compiler, and with experts, it is two."""
_WIDE_ON_GPU = 4
"""Bytes more of each gathered number where cuDNN attends: gradients of keys and values are summed in float32. 8B at
131,072 tokens on 32 H100, fsdp 2 x context 16, takes 14.1 GB."""
_OUT_OF = 1 / 3
"""Of a layer's numbers, those of matrices out of it: of the down, and about half of attention's."""
HOLES = {"tpu": 1.12}
"""Memory over what is counted of arrays that come and go in the loop over microbatches: those of unlike sizes leave
holes. The median of twelve rows of real size, of 0.97 to 1.67. Sums, layer inputs and weights that stay gathered are
placed once, before the loop."""


def frozen_bytes(config: Config) -> int:
    given = config.precision.frozen_dtype
    return stored_bytes(config) if given is None else jnp.dtype(given).itemsize


def gradient_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts the sums of gradients; under ZeRO-2 also those of one microbatch, which are cut once all are there.

    Those are there twice, in the dtype of the computation and laid out for the scatter: 0.9 GB of 0.25B parameters by
    XLA for four H100.
    """
    each, (layers, outer) = summed_bytes(config), trained_numbers(config, sizes)
    shares = stored(trained_numbers, config, sizes)
    if config.optimizer.sharding == "gradients":
        of_microbatch = sum(shares) if gathers_layers(config) else layers + outer
        return each * sum(shares) / config.mesh.data + 2 * computed_bytes(config) * of_microbatch
    if not gathers_layers(config):
        return each * (layers + outer)
    of_layers, of_outer = shares
    return each * (of_layers + (of_outer if config.mesh.pipe == 1 else outer))


def whole_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts weights that are whole for all of an update: those that stay gathered, or are not cut but cast, and in a
    pipeline what lies beside the layers.
    """
    each, (layers, outer) = computed_bytes(config), copied_numbers(config, sizes)
    if not gathers_layers(config):
        return each * (layers + outer)
    return each * (layers * share_gathered(config, sizes) + (outer if config.mesh.pipe > 1 else 0))


def working_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what is there while a layer or the head runs: whole weights, gradients of whole weights, what a
    layer's backward and a block of logits take.

    Gathered a layer ahead, a second layer's weights and gradient; half a layer ahead, those of its first half. Where
    layers are gathered without a pipeline, that of a layer or that of the head, the larger; of a large head a part or a
    share of the vocabulary. With multi-token prediction the head is a function of its layers, whose residuals are all
    kept, and of the embedding too.
    """
    (layers, _), (trained, trained_outer) = held_numbers(config, sizes), trained_numbers(config, sizes)
    gathers, share = gathers_layers(config), share_ahead(config, sizes, topology)
    layer, gradient = (number / layers_here(config, sizes) for number in (layers, trained))
    whole, each = whole_bytes(config, sizes), computed_bytes(config)
    waiting = reduced_bytes(config) if gathers else each
    kind = topology.chip.kind if topology.chip else None
    late = 1 + share
    if gathers and not share and topology.platform == "tpu":
        late = _SCATTERED_IN_TURN
    elif kind == V5E:  # every scatter ends before more is computed: one half has its gradient at a time
        late = max(share, 1 - share)
    if share == 1 and _overwrites_gradients(config, kind):
        late = 1 + held_experts(config, sizes) / layers  # experts' gradients are not overwritten
    if reduces_beside(config, topology) and not gathers:
        # of a layer and the one behind it, with those of the other microbatches added
        waiting, late = summed_bytes(config), 2
    of_layer = waiting * gradient * late + _layer_work_bytes(config, sizes, topology)
    of_vocabulary = min(_head_gradient_bytes(config, sizes), summed_bytes(config) * trained_outer)
    of_head = of_vocabulary + _logit_bytes(config, sizes)
    of_mtp = sizes.mtp_depth * _residual_bytes(config, sizes, topology)
    if gathers and config.mesh.pipe == 1:
        table = each * sizes.vocab_size * sizes.hidden_size / config.mesh.tensor
        at_head = head_bytes(config, sizes, kind) or table + of_head
        if sizes.mtp_depth:
            at_head += sizes.mtp_depth * each * layer + of_mtp
            at_head += 0 if sizes.tied_embeddings else table
        return whole + max(each * layer * (1 + share) + of_layer, at_head)
    if config.mesh.pipe == 1:
        # a tied head's gradient waits for that of the embedding
        return whole + max(of_layer + sizes.tied_embeddings * of_vocabulary, of_head) + of_mtp
    return (
        whole
        + of_layer
        + of_head
        + of_mtp
        + (each * layer * min(1 + share, layers_here(config, sizes)) if gathers else 0)
    )


def _overwrites_gradients(config: Config, kind: str | None) -> bool:
    """Returns whether all layers' gradients that wait for their scatter take the memory of one."""
    kinds = (remat for remat, _ in remat_parts(config.parallel.remat))
    return config.mesh.pipe == 1 and all(overwriting_pays(kind, config.mesh.tensor, remat) for remat in kinds)


def streamed_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts the moments that an update has on the device at a time if its state is in the host's memory: of a layer,
    and of what is beside the layers. 8B on v5e:4x4 takes 0.64 GB for them by the compiler.
    """
    if config.optimizer.memory != "host":
        return 0.0
    layers, outer = stored(trained_numbers, config, sizes)
    return state_bytes(config, sizes) * (layers / layers_here(config, sizes) + outer)


def _head_gradient_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Returns the bytes of a sum over the head's chunks, or of its logits' gradient where these are fewer."""
    vocabulary = sizes.vocab_size / (config.mesh.pipe * config.mesh.tensor)
    of_sum = summed_bytes(config) * sizes.hidden_size
    return min(of_sum, computed_bytes(config) * tokens_of_piece(config)) * vocabulary


def kept_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what layers in flight keep for their backward: their inputs, and what `remat` does not compute
    again; of sequences in pieces, what waits for other pieces too.
    """
    if not has_backward(config, sizes):
        return waiting_bytes(config, sizes, topology)
    in_flight = _in_flight(config) if config.mesh.pipe > 1 else 1.0
    of_layers = sum(
        _kept_of(config, sizes, topology, remat, layers, in_flight)
        for remat, layers in layers_by_remat(config, sizes)
    )
    return of_layers + waiting_bytes(config, sizes, topology)


def _kept_of(
    config: Config, sizes: TransformerConfig, topology: Topology, remat: str, layers: float, in_flight: float
) -> float:
    """Counts what so many layers keep that are recomputed in one way."""
    inputs = _inputs_of(config, remat, layers)
    of_number = computed_bytes(config) * tokens_of_microbatch(config)
    saved = _waiting_for_weights(config) * layers * saved_width(config, sizes, topology, remat)
    hidden = kept_hidden_width(config, sizes, topology)
    if remat == "offload":  # they wait in the host's memory
        return of_number * (2 * hidden + saved)
    everything = _residual_width(config, sizes, topology)
    kept = {"selective": kept_width(config, sizes, topology), "none": everything}.get(remat, 0.0)
    again = _copied_width(config, sizes, topology) if remat == "selective" else 0.0
    return of_number * (in_flight * (inputs * hidden + layers * kept) + layers * again + saved)


def _copied_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token the compiler has twice, since a backward reads projections of attention in
    another layout than the forward writes them, one array after the other.

    That is so in 16 bits, without tensor shards and stages, for latent attention (1B on v5p) and where queries and keys
    are normalised. Otherwise these are kept rotated, as the backward reads them (`jaxfb.models.attention.KEPT`).
    """
    chip, mesh = topology.chip, config.mesh
    in_place = max(mesh.pipe, mesh.tensor) > 1 or computed_bytes(config) > 2
    keeps_projections = bool(sizes.latent) or sizes.qk_norm
    if in_place or not keeps_projections or chip is None or chip.kind not in compiler.TABLE:
        return 0.0
    return widest_of_attention(sizes)


def _waiting_for_weights(config: Config) -> float:
    """Returns microbatches of which the gradients of products wait for a pass that takes the weights' gradients."""
    if config.mesh.pipe == 1 or not schedule_kind(config).splits_backward:
        return 0.0
    return short_schedule(config).program.allocated("cotangent") / config.chunks


def _residual_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token a layer keeps that computes nothing again."""
    return residual_width(config, sizes, topology) + _scores(config, sizes, topology)


def _residual_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what such a layer keeps of a microbatch."""
    return computed_bytes(config) * tokens_of_microbatch(config) * _residual_width(config, sizes, topology)


def _inputs_of(config: Config, remat: str, layers: float) -> float:
    """Returns how many arrays as large as a layer's input so many layers keep of a microbatch."""
    if config.mesh.pipe > 1 and remat == "full":
        return config.chunks
    return 2 * layers if remat == "halves" else layers


def _in_flight(config: Config) -> float:
    """Returns microbatches whose activations the first stage keeps: no more than there are, and one slot for ticks in
    which nothing arrives.
    """
    if config.parallel.pieces > 1:
        return pieces_in_flight(config)
    found = schedule_kind(config).in_flight(config.mesh.pipe, config.chunks)
    return min(found, num_microbatches(config) + 1 / config.chunks)


def _layer_work_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what one layer's backward takes beside weights."""
    layers, tokens = layers_here(config, sizes), tokens_of_piece(config)
    parts = layers_by_remat(config, sizes)
    of_stage = any(_inputs_of(config, remat, number) < number for remat, number in parts)
    again = layers * hidden_width(config, sizes) if of_stage else 0
    times = _AT_WORK_ON_GPU if topology.platform == "gpu" and not sizes.num_experts else 2
    times /= 1 if has_backward(config, sizes) else 2
    products = times * (product_width(sizes) - experts_width(sizes) + padding_width(config, sizes, topology))
    if config.mesh.pipe > 1 and topology.platform == "tpu" and not sizes.num_experts:
        products = times / 2 * _dense_at_work(config, sizes, topology)
    at_work = _scores(config, sizes, topology) + products / config.mesh.tensor + again
    at_work += _experts_at_work(config, sizes, times)
    gathered = _gathered_keys_bytes(config, sizes, topology) + bias.memory(config, sizes, topology)
    of_tokens = computed_bytes(config) * tokens * at_work
    return of_tokens + gathered + read_bytes(config, sizes)


def _dense_at_work(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token a dense layer's backward takes, hidden states aside: of an MLP's middle both
    halves and their gradients, beside what attention is made from, or attention's alone with its gradients.

    A pipeline's hidden states are counted by its slots. In eight stages of 8B at 128k tokens, which take 70.8 GB, this
    is 18 GB.
    """
    middle = dense_width(sizes)
    attention = product_width(sizes) - 3 * middle + padding_width(config, sizes, topology)
    return attention + max(4 * middle, attention)


def _experts_at_work(config: Config, sizes: TransformerConfig, times: float) -> float:
    """Returns how many numbers of a token the experts of a layer take in its backward, rows that travel included.

    times: of what their products give, how many times as much is there.

    Of rows those that are sent and the gradient that comes back, and with space for `expert_buffer` times as many those
    that arrive, their outputs' gradient, and their own of two products. While rows that have no space are sent again,
    products give two arrays, but there are those of the first time beside these, and the gradient of all.
    """
    products = experts_width(sizes)
    at_once = times * products / config.mesh.tensor
    if config.mesh.expert == 1 or not sizes.num_experts:
        return at_once
    space, rows = row_space(config, sizes), sizes.experts_per_token * sizes.hidden_size
    at_once += (2 + 4 * space) * rows
    if space == config.mesh.expert:
        return at_once
    return max(at_once, 2 / 3 * space * products / config.mesh.tensor + (3 + 5 * space) * rows)


def _gathered_keys_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts keys and values that are gathered over context, and their gradients."""
    if config.mesh.context == 1 or context_method(config, sizes, topology) != "all_gather":
        return 0.0
    if share_ahead(config, sizes, topology) not in (0.0, 1.0):
        return 0.0  # half a layer ahead they are there when what the MLP takes, which is more, is not
    tokens = tokens_of_microbatch(config) * config.mesh.context
    each = computed_bytes(config)
    if topology.platform == "gpu" and runs_flash(config, sizes, topology):
        each += _WIDE_ON_GPU
    return 4 * each * tokens * sizes.num_kv_heads * sizes.head_size / config.mesh.tensor


def _logit_bytes(config: Config, sizes: TransformerConfig) -> float:
    """Counts a block of the head's logits and their softmax, of the share of the vocabulary that a device has."""
    vocabulary = sizes.vocab_size / (config.mesh.pipe * config.mesh.tensor)
    return 8 * min(tokens_of_piece(config), sizes.loss_chunk) * vocabulary


def relaid_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts copies in another layout that XLA for GPUs keeps of matrices that FSDP cuts along their last dimension,
    since it gathers along the first: of the weights, and of the sums of their gradients.

    Those are matrices out of a layer whose rows a tensor axis cuts.
    """
    mesh = config.mesh
    if topology.platform != "gpu" or min(mesh.fsdp, mesh.tensor) == 1 or not gathers_layers(config):
        return 0.0
    layers, _ = stored(trained_numbers, config, sizes)
    return 2 * 4 * layers * _OUT_OF


def forward_bytes(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Counts what a pass without gradients takes beside the parameters: weights, and of one layer's work and a block of
    logits half of what they are with gradients.

    config: as for `estimate`.
    """
    layers, outer = held_numbers(config, sizes)
    layer = layers / layers_here(config, sizes)
    weights = computed_bytes(config) * (outer + (layer if gathers_layers(config) else layers))
    return weights + (_layer_work_bytes(config, sizes, topology) + _logit_bytes(config, sizes)) / 2


def _scores(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the numbers a token that attention keeps where it makes scores."""
    if runs_flash(config, sizes, topology):
        return 0.0
    if scores_at_once(config, sizes, topology):
        numbers = _SCORES_AT_ONCE / computed_bytes(config) * config.data.sequence_length
        return numbers * sizes.num_heads / config.mesh.tensor
    around = 1 if attends_over(config, sizes, topology) is None else config.mesh.context
    length = config.data.sequence_length // around
    return _SCORES_KEPT * sizes.num_heads * length * seen_share(sizes, length) / config.mesh.tensor
