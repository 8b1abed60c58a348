"""The sizes of the built-in transformer, checked once, and the arithmetic that follows from them.

Plain Python, so a config is read, refused and sized without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxfb.models.config_checks import (
    check_choices,
    check_experts,
    check_factors,
    check_head_size_derives,
    check_heads,
    check_loss,
    check_positive,
    check_types,
)
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind, settle, stack_of
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.variant import Variant

_DERIVED: Any = None  # of a size that follows from the others where it is not given


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU (Llama, Qwen2, Qwen3).

    vocab_size:      size of the vocabulary: rows of the embedding, and logits of a token.
    num_layers:      layers of attention and MLP.
    hidden_size:     width of the hidden state.
    num_heads:       query heads of attention.
    mlp_size:        width of the MLP; None is 8/3 hidden_size, rounded up to a multiple of 64.
    num_kv_heads:    key and value heads, which divide the query heads into groups; None is num_heads.
    head_size:       width of one head; None is hidden_size / num_heads.
    rope_theta:      base of the rotary positions' wavelengths; None: no rotary positions.
    norm_eps:        added to the mean square in every RMSNorm.
    tied_embeddings: the head is the transposed embedding.
    rope_scaling:    a `jaxfb.models.rope_scaling.RopeScaling` for longer sequences (Llama 3.1, yarn); None: none.
    qkv_bias:        biases on the query, key and value projections (Qwen2).
    qk_norm:         RMSNorm over each query and key head (Qwen3).
    dropout:         rate on both residual branches of a layer, drawn per row; 0 for none.
    attention:       "auto": flash attention where it is supported, on GPUs "cudnn", on TPUs "splash"
                     (`jaxfb.models.attention.choose_backend`), else "xla"; or one of these.
    pattern:         the kinds of a period of layers (`jaxfb.models.pattern.LayerKind`), which is repeated; empty if
                     all layers are alike. A remainder of `num_layers` comes first, as leading layers.
    leading:         the kinds of layers before the first period, outside of the pipeline's stages.
    window:          attention sees a token itself and the window - 1 tokens before it (Mistral's sliding window);
                     None: all before it.
    context_attention: how the parts of a sequence that a context axis cuts attend to each other: "auto": "all_gather"
                     on TPUs and "all_to_all" on GPUs (or "all_gather" if it cannot cut the heads), where their kernels
                     can run, else "ring"; or one of these (`jaxfb.parallel.context`).
    sequence_parallel: between the parts of a layer (norms, dropout, residual sums) each device of the tensor
                     axis holds its share of the tokens (`jaxfb.parallel.tensor.residual_stream`).
    loss_chunk:      tokens whose logits are in memory at one time, both forward and backward.
    logit_softcap:   logits become softcap * tanh(logits / softcap); None leaves them.
    label_smoothing: share of each target that is spread over the vocabulary, a separate term of the loss.
    z_loss:          coefficient of the squared log normalizer, a separate term of the loss.
    mtp_depth:       tokens after the next that are predicted too, each by a further layer (DeepSeek-V3's
                     multi-token prediction, `jaxfb.models.mtp`); 0 for none.
    mtp_weight:      what those losses are worth together; each depth's has mtp_weight / mtp_depth.
    mtp_as_published: each depth reads the model's last norm, and the first half of its projection is the token's, as
                     in DeepSeek-V3's published weights; in the paper neither is so.
    latent:          a `jaxfb.models.latent.Latent`: attention over short vectors (DeepSeek-V3); None: plain.
    variant:         a `jaxfb.models.variant.Variant`: what differs from Llama's layers (Gemma, OLMo 2, gpt-oss).

    num_experts:     experts of each layer, instead of its MLP (Mixtral, DeepSeek); 0 for none.
    experts_per_token:    how many experts each token goes to.
    expert_mlp_size:      width of one expert; `mlp_size` if None.
    shared_expert_size:   width of an expert that every token goes to as well; 0 for none.
    router_scores:        "softmax" over all experts, or "sigmoid" of each.
    router_renormalize:   the chosen experts' scores are divided by their sum.
    router_scale:         factor that the chosen experts' scores are multiplied by.
    balance_coefficient:  coefficient of the balance loss of each sequence (a document of a packed row, else a row); the
                          mean over layers of its mean over tokens.
    batch_balance_coefficient: coefficient of the balance loss of the whole update: all its microbatches and
                          replicas together, counted in a forward pass before the backward (`jaxfb.models.balance`).
    batch_balance_layers: "each": a loss for each layer, and their mean; "together": one loss of all layers' counts,
                          as Mixtral's.
    router_z_coefficient: coefficient of the squared log normalizer of the router; the mean over layers and tokens.
    router_bias_rate:     after each update an expert's bias, which takes part in the choice and nowhere else,
                          goes up by this if it had fewer tokens than the mean, else down; 0: no bias.
    router_bias:          experts have the bias of `router_bias_rate` even where that is 0 and the bias stays as it is
                          (an imported DeepSeek-V3's).
    router_groups:        experts are divided into so many groups (DeepSeek-V3).
    router_top_groups:    a token's experts are in so many of the groups, the best by the sum of their two best scores.
    expert_capacity:      None drops no token. A number c drops what an expert is sent beyond c times a
                          balanced load of a device's microbatch: faster, but results then depend on how rows are split.
    expert_buffer:   rows for which a device's experts have space at a time, as a multiple of a balanced load; the
                     others follow in further rounds, so nothing is dropped. None: space for the worst case, all rows at
                     one device. Where `expert` cuts the experts.
    expert_overlap:  in a forward that nothing is kept of (remat "full", "halves"), a device sends its tokens to the
                     experts in sub-batches, one while the experts compute another; on a TPU with the compiler
                     option xla_tpu_enable_async_ragged_all_to_all.

    Raises ValueError naming the field and the nearest legal choice.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int = _DERIVED
    num_kv_heads: int = _DERIVED
    head_size: int = _DERIVED
    rope_theta: float | None = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    pattern: tuple[LayerKind, ...] = ()
    leading: tuple[LayerKind, ...] = ()
    attention: str = "auto"
    window: int | None = None
    context_attention: str = "auto"
    sequence_parallel: bool = False
    loss_chunk: int = 1024
    logit_softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mtp_depth: int = 0
    mtp_weight: float = 0.3
    mtp_as_published: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    expert_mlp_size: int = _DERIVED
    shared_expert_size: int = 0
    router_scores: str = "softmax"
    router_renormalize: bool = True
    router_scale: float = 1.0
    balance_coefficient: float = 0.01
    batch_balance_coefficient: float = 0.0
    batch_balance_layers: str = "each"
    router_z_coefficient: float = 0.0
    router_bias_rate: float = 0.0
    expert_capacity: float | None = None
    expert_buffer: float | None = 1.25
    expert_overlap: bool = False
    router_bias: bool = False
    router_groups: int = 1
    router_top_groups: int = 1
    variant: Variant = field(default_factory=Variant)
    latent: Latent | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, ("vocab_size", "num_layers", "hidden_size", "num_heads", "loss_chunk"))
        _fill(self, mlp_size=64 * -(-self.hidden_size // 24), num_kv_heads=self.num_heads)
        if self.head_size is None:
            check_head_size_derives(self)
        _fill(self, head_size=self.hidden_size // self.num_heads)
        check_positive(self, ("mlp_size", "num_kv_heads", "head_size", "rope_theta", "norm_eps"))
        _fill(self, expert_mlp_size=self.mlp_size)
        check_heads(self)
        check_choices(self)
        check_loss(self)
        if self.num_experts:
            check_experts(self)
        for name, value in settle(self).items():
            object.__setattr__(self, name, value)
        check_factors(self)

    @property
    def has_router_bias(self) -> bool:
        """Returns whether each expert has a bias in the choice."""
        return self.router_bias or self.router_bias_rate > 0


def num_params(config: TransformerConfig) -> int:
    """Returns how many parameters `init_params(config, ...)` has, tied weights counted once and adapters not."""
    width, stack = config.hidden_size, stack_of(config)
    layers = sum(number * _layer_params(one) for one, number in stack.counted())
    layers += config.mtp_depth * (
        _layer_params(stack.period[-1]) + _mtp_projection_params(config) + 3 * width
    )
    if config.has_router_bias:
        layers += sum(number * one.num_experts for one, number in stack.counted())
    if config.router_bias:
        layers += config.mtp_depth * stack.period[-1].num_experts
    tables = config.vocab_size * width * (1 if config.tied_embeddings else 2)
    return layers + tables + width


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Returns floating-point operations that training spends on one token, forward and backward, no recomputation.

    6 per matmul parameter (2 forward, 4 backward; the embedding lookup is free, the head is not) that the token
    meets, which are the experts that it goes to and not those that there are; and for
    attention 12 * layers * heads * head_size * seq_len (PaLM, appendix B), halved because it is causal; with a window
    the mean number of tokens that one sees takes the place of seq_len / 2. What training some of
    the parameters takes less is in `models/trained_flops.py`.
    """
    stack = stack_of(config)
    heads = (1 + config.mtp_depth) * config.vocab_size * config.hidden_size
    rest = 6 * (heads + config.mtp_depth * _mtp_projection_params(config))
    layers = sum(number * _layer_flops(one, seq_len) for one, number in stack.counted())
    return layers + config.mtp_depth * _layer_flops(stack.period[-1], seq_len) + rest


def _layer_params(config: TransformerConfig) -> int:
    """Returns the parameters of a layer, but for the bias of its router."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    biases = (heads + 2 * kv_heads) * size if config.qkv_bias else 0
    biases += (config.hidden_size if config.variant.output_bias else 0) + _mlp_biases(config)
    biases += heads if config.variant.attention_sinks else 0
    normed = heads + kv_heads if config.variant.qk_norm_over == "token" else 2
    norms = config.variant.norms_of_layer * config.hidden_size + (normed * size if config.qk_norm else 0)
    norms += config.latent.norm_params if config.latent else 0
    matmul = _attention_matmul_params(config) + _mlp_matmul_params(config, config.num_experts)
    return matmul + biases + norms


def _layer_flops(config: TransformerConfig, seq_len: int) -> int:
    matmul = _attention_matmul_params(config) + _mlp_matmul_params(config, config.experts_per_token)
    value_size = config.latent.value_size if config.latent else config.head_size
    attention = config.num_heads * (config.head_size + value_size) * twice_seen(config.window, seq_len) // 2
    return 6 * matmul + 6 * attention


def twice_seen(window: int | None, seq_len: int) -> int:
    """Returns twice the mean number of tokens that a causal token sees."""
    if window is None or window >= seq_len:
        return seq_len
    return window * (2 * seq_len - window) // seq_len


def seen_share(config: TransformerConfig, seq_len: int) -> float:
    """Returns the tokens that attention looks at, as a share of those that it does without windows."""
    seen = sum(number * twice_seen(one.window, seq_len) for one, number in stack_of(config).counted())
    return seen / (seq_len * config.num_layers)


def _attention_matmul_params(config: TransformerConfig) -> int:
    if config.latent:
        return config.latent.matmul_params(config.hidden_size, config.num_heads, config.head_size)
    return config.hidden_size * 2 * config.head_size * (config.num_heads + config.num_kv_heads)


def _mtp_projection_params(config: TransformerConfig) -> int:
    return 2 * config.hidden_size**2


def _mlp_matmul_params(config: TransformerConfig, experts: int) -> int:
    """Returns the parameters of the dense MLP, or of so many experts, the shared one and the router."""
    if not config.num_experts:
        return 3 * config.hidden_size * config.mlp_size
    widths = experts * config.expert_mlp_size + config.shared_expert_size
    return config.hidden_size * (3 * widths + config.num_experts)


def _mlp_biases(config: TransformerConfig) -> int:
    """Returns the parameters of the biases of the MLP, or of all experts, the shared one and the router."""
    if not config.variant.mlp_bias:
        return 0
    if not config.num_experts:
        return 2 * config.mlp_size + config.hidden_size
    shared = 2 * config.shared_expert_size + config.hidden_size if config.shared_expert_size else 0
    return config.num_experts * (2 * config.expert_mlp_size + config.hidden_size + 1) + shared


def _fill(config: TransformerConfig, **defaults) -> None:
    for name, value in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)
