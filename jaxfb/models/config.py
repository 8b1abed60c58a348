"""The sizes of the built-in transformer, checked once, and the arithmetic that follows from them.

First step of the model's story: plain Python, so a config is read, refused and sized without a device.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION_BACKENDS = ("auto", "xla", "cudnn")


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU (Llama, Qwen2, Qwen3).

    Sizes left at None are derived: `mlp_size` = 8/3 hidden_size rounded up to a multiple of 64,
    `num_kv_heads` = num_heads, `head_size` = hidden_size / num_heads.

    tied_embeddings: the head is the transposed embedding.
    qkv_bias:        biases on the query, key and value projections (Qwen2).
    qk_norm:         RMSNorm over each query and key head (Qwen3).
    dropout:         rate on both residual branches of a layer, drawn per row; 0 for none.
    attention:       "auto" (cuDNN flash where it is supported, else XLA), "xla" or "cudnn".
    loss_chunk:      tokens whose logits exist at one time, both forward and backward.

    Raises ValueError naming the field and the nearest legal choice.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    attention: str = "auto"
    loss_chunk: int = 1024

    def __post_init__(self):
        _check_positive(self, ("vocab_size", "num_layers", "hidden_size", "num_heads", "loss_chunk"))
        _fill(self, mlp_size=64 * -(-self.hidden_size // 24), num_kv_heads=self.num_heads)
        if self.head_size is None:
            _check_head_size_derives(self)
        _fill(self, head_size=self.hidden_size // self.num_heads)
        _check_positive(self, ("mlp_size", "num_kv_heads", "head_size", "rope_theta", "norm_eps"))
        _check_heads(self)
        _check_choices(self)


def num_params(config: TransformerConfig) -> int:
    """How many parameters `init_params(config, ...)` has, tied weights counted once."""
    width, size = config.hidden_size, config.head_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    biases = (heads + 2 * kv_heads) * size if config.qkv_bias else 0
    norms = 2 * width + (2 * size if config.qk_norm else 0)
    layers = config.num_layers * (_layer_matmul_params(config) + biases + norms)
    tables = config.vocab_size * width * (1 if config.tied_embeddings else 2)
    return layers + tables + width


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Floating-point operations that training spends on one token, forward and backward, no recomputation.

    6 per matmul parameter (2 forward, 4 backward; the embedding lookup is free, the head is not), and for
    attention 12 * layers * heads * head_size * seq_len (PaLM, appendix B), halved because it is causal.
    """
    matmul = config.num_layers * _layer_matmul_params(config) + config.vocab_size * config.hidden_size
    attention = config.num_layers * config.num_heads * config.head_size * seq_len
    return 6 * matmul + 6 * attention


def _layer_matmul_params(config: TransformerConfig) -> int:
    attention = 2 * config.head_size * (config.num_heads + config.num_kv_heads)
    return config.hidden_size * (attention + 3 * config.mlp_size)


def _fill(config: TransformerConfig, **defaults) -> None:
    for name, value in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def _check_positive(config: TransformerConfig, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"[model] {name}={getattr(config, name)} must be positive")


def _check_head_size_derives(config: TransformerConfig) -> None:
    width, heads = config.hidden_size, config.num_heads
    if width % heads:
        below = width - width % heads
        choices = " or ".join(str(size) for size in (below, below + heads) if size)
        raise ValueError(
            f"[model] hidden_size={width} must be a multiple of num_heads={heads} unless head_size is given; "
            f"use hidden_size {choices}"
        )


def _check_heads(config: TransformerConfig) -> None:
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    if heads % kv_heads:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - kv_heads))
        raise ValueError(
            f"[model] num_heads={heads} must be a multiple of num_kv_heads={kv_heads}; "
            f"use num_kv_heads {nearest}"
        )
    if size % 2:
        raise ValueError(f"[model] head_size={size} must be even for rotary positions; use {size + 1}")


def _check_choices(config: TransformerConfig) -> None:
    if not 0 <= config.dropout < 1:
        raise ValueError(f"[model] dropout={config.dropout} must be at least 0 and below 1; use 0 for none")
    if config.attention not in ATTENTION_BACKENDS:
        raise ValueError(
            f"[model] attention={config.attention!r} must be one of {', '.join(ATTENTION_BACKENDS)}"
        )
