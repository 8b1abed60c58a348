"""Counts the numbers of a token that a layer's products read and give, and those that are kept for its backward."""

from __future__ import annotations

from collections.abc import Callable

from jaxfb.config import Config
from jaxfb.models.attention_kernels import splash
from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import stack_of
from jaxfb.planner.attends import runs_flash
from jaxfb.planner.counts import computed_bytes, trains_norms
from jaxfb.planner.topology import Topology


def hidden_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns the numbers of a token's hidden state on one device."""
    return sizes.hidden_size / (config.mesh.tensor if sizes.sequence_parallel else 1)


def kept_hidden_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns the numbers of a token's hidden state that a device keeps for the backward: in the slots of a pipeline
    XLA for TPUs cuts it over `tensor`.
    """
    cut = config.mesh.pipe > 1 and topology.platform == "tpu"
    return sizes.hidden_size / config.mesh.tensor if cut else hidden_width(config, sizes)


def widest_of_attention(sizes: TransformerConfig) -> int:
    """Returns the most numbers of a token that a product into attention gives, or the hidden state if that has more."""
    expanded = _expanded_size(sizes) * sizes.num_heads if sizes.latent else 0
    return max(expanded, sizes.num_heads * sizes.head_size, sizes.hidden_size)


def product_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers a layer's products with weights give, a token, in the mean."""
    width = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_size
    if sizes.latent:
        width = _latent_width(sizes) + sizes.hidden_size
    return width + 3 * _mean(sizes, _mlp_width)


def experts_width(sizes: TransformerConfig) -> float:
    """Returns how many of those numbers the products of experts give to which tokens are routed."""
    return 3 * _mean(sizes, lambda one: one.experts_per_token * one.expert_mlp_size if one.num_experts else 0)


def dense_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers a token has in the middle of a layer's MLP without experts, in the mean."""
    of_mlps = sum(number * one.mlp_size for one, number in stack_of(sizes).counted() if not one.num_experts)
    return of_mlps / sizes.num_layers


def inner_width(sizes: TransformerConfig) -> float:
    """Returns how many numbers the last products of a layer's MLP or experts multiply, a token, in the mean."""
    of_experts = sum(
        number * one.experts_per_token * one.expert_mlp_size
        for one, number in stack_of(sizes).counted()
        if one.num_experts
    )
    return dense_width(sizes) + of_experts / sizes.num_layers


def kept_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token a layer keeps of its products for the backward, in the mean.

    Beside its input: what attention is made from, its output before and after the last product, and both halves of an
    MLP's middle, of experts with the space that there is for rows. An MLP's output is not needed again.
    """
    output = _size_of_output(config, sizes, topology)
    width = _attention_width(sizes, output) + 2 * _middle_width(config, sizes)
    return width / config.mesh.tensor + kept_hidden_width(config, sizes, topology)


def residual_width(config: Config, sizes: TransformerConfig, topology: Topology) -> float:
    """Returns how many numbers of a token a layer keeps, beside its input, that computes nothing again: those that a
    backward is traced to read, in the mean.

    Beside what `kept_width` counts: two more arrays of an MLP's middle; of experts' middle four in float32 and one in
    front of the last product, and their rows; hidden states, of which two are in float32, and two more where scales of
    norms have gradients.
    """
    wide = 4 / computed_bytes(config)
    experts = _mean(sizes, lambda one: _experts_width(config, one))
    middle = 2 * (_middle_width(config, sizes) - experts) + (4 * wide - 1) * experts
    hidden = 1 + (4 if trains_norms(config, sizes) else 2) * wide
    kept = kept_width(config, sizes, topology) + middle / config.mesh.tensor
    return kept + hidden * kept_hidden_width(config, sizes, topology) + _rows_width(config, sizes)


def _rows_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns the numbers of a token's rows that experts read, with those that are sent to other devices."""
    choices = _mean(sizes, lambda one: one.experts_per_token if one.num_experts else 0)
    return sizes.hidden_size * choices * (row_space(config, sizes) + (config.mesh.expert > 1))


def saved_width(config: Config, sizes: TransformerConfig, topology: Topology, remat: str) -> float:
    """Returns how many numbers of a token wait, in a layer, for a pass that takes the weights' gradients alone.

    The gradients of what the layer's products give, and what they multiply: of attention and of an MLP the normed
    input and the output in front of the last product. With every residual kept, the gradients alone.
    """
    width, middle = _attention_width(sizes), _middle_width(config, sizes)
    hidden = kept_hidden_width(config, sizes, topology)
    if remat == "none":
        values = sizes.num_heads * (sizes.latent.value_size if sizes.latent else sizes.head_size)
        return (width - values + 2 * middle) / config.mesh.tensor + 2 * hidden
    return (width + 3 * middle) / config.mesh.tensor + 4 * hidden


def _attention_width(sizes: TransformerConfig, size_of_answer: int | None = None) -> int:
    """Returns how many numbers of a token attention is made from, and its output before the last product.

    size_of_answer: of one head, if not that of its values.
    """
    if sizes.latent:
        return _latent_width(sizes) + sizes.num_heads * (size_of_answer or sizes.latent.value_size)
    sides = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
    return sides + sizes.num_heads * (size_of_answer or sizes.head_size)


def _size_of_output(config: Config, sizes: TransformerConfig, topology: Topology) -> int | None:
    """Returns the numbers of a head's output where a kernel gives it in 16 bits: as many as of its keys, on a TPU in
    whole tiles.
    """
    if computed_bytes(config) > 2 or not runs_flash(config, sizes, topology):
        return None
    tile = splash.LANES if topology.platform == "tpu" else 1
    return -(-sizes.head_size // tile) * tile


def padding_width(config: Config, sizes: TransformerConfig, topology: Topology) -> int:
    """Returns how many numbers of a token are zeros or fill tiles in what a kernel of attention reads and gives."""
    if (size := _size_of_output(config, sizes, topology)) is None:
        return 0
    values = sizes.latent.value_size if sizes.latent else sizes.head_size
    of_keys, heads = size - sizes.head_size, sizes.num_heads
    return (2 * heads + sizes.num_kv_heads) * of_keys + sizes.num_kv_heads * (size - values)


def _middle_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many numbers of a token are in the middle of an MLP, or of experts with the space for their rows, in
    the mean.
    """
    return _mean(
        sizes,
        lambda one: (
            _experts_width(config, one) + (one.shared_expert_size if one.num_experts else one.mlp_size)
        ),
    )


def _experts_width(config: Config, sizes: TransformerConfig) -> float:
    """Returns how many numbers of a token one of an expert's first products gives, empty rows included; 0 without."""
    if not sizes.num_experts:
        return 0.0
    return row_space(config, sizes) * sizes.experts_per_token * sizes.expert_mlp_size


def row_space(config: Config, sizes: TransformerConfig) -> float:
    """Returns the rows that a device's experts have space for at a time, over those that its tokens' choices make."""
    axis = config.mesh.expert
    return axis if sizes.expert_buffer is None else min(sizes.expert_buffer, axis)


def _latent_width(sizes: TransformerConfig) -> int:
    """Returns the numbers of a token's short vectors, queries, keys and values in latent attention."""
    latent = sizes.latent
    assert latent is not None
    expanded = sizes.head_size + _expanded_size(sizes)
    return latent.norm_params + latent.rotary_size + sizes.num_heads * expanded


def _expanded_size(sizes: TransformerConfig) -> int:
    """Returns the numbers of a head's key and value that are made from a token's short vector."""
    latent = sizes.latent
    assert latent is not None
    return sizes.head_size - latent.rotary_size + latent.value_size


def _mean(sizes: TransformerConfig, of_layer: Callable[[TransformerConfig], float]) -> float:
    """Returns the mean over layers of a number that each kind of layer has."""
    return sum(number * of_layer(one) for one, number in stack_of(sizes).counted()) / sizes.num_layers


def _mlp_width(sizes: TransformerConfig) -> int:
    if not sizes.num_experts:
        return sizes.mlp_size
    return sizes.experts_per_token * sizes.expert_mlp_size + sizes.shared_expert_size
